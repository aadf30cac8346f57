// The gradient of a mask: regions that cover dmask once, and sums in the documented order. The
// gradient of a mask that has every axis is unsummed, so what a broadcast mask must give follows
// from it bit for bit.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "cpu/backward_mask_schedule.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"
#include "flashattn/attention.h"
#include "tensors.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::BackwardTensors;
using flashattn::Causal;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::Interval;
using flashattn::TensorView;
using flashattn::cpu::AttentionJob;
using flashattn::cpu::get_num_threads;
using flashattn::cpu::mask_grid;
using flashattn::cpu::mask_region;
using flashattn::cpu::MaskGrid;
using flashattn::cpu::MaskRegion;
using flashattn::cpu::set_isa;
using flashattn::cpu::set_num_threads;
using flashattn::cpu::supported_isas;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::Sizes;

// Several blocks and chunks with a short last one, several heads of a group.
constexpr Sizes kSizes{.batch = 2,
                       .seqlen_q = 150,
                       .seqlen_k = 330,
                       .query_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 16,
                       .value_dim = 24};
const AttentionOptions kOptions{.causal = Causal::kBottomRight, .backend = "cpu"};

std::int64_t row_index(std::int64_t b, std::int64_t h, std::int64_t i) {
  return (b * kSizes.query_heads + h) * kSizes.seqlen_q + i;
}

// dmask of the call with a mask of zeros of the given shape: all other axes are broadcast.
std::vector<float> mask_gradient(Call& call, std::initializer_list<std::int64_t> shape) {
  Array mask(DType::kFloat32, shape);
  Array dmask(DType::kFloat32, shape);
  mask.fill(0.0F);
  dmask.fill(-1.0F);
  ForwardTensors forward = call.forward_tensors();
  forward.inputs.mask = mask.view();
  flashattn::forward(forward, kOptions);
  BackwardTensors backward = call.backward_tensors();
  backward.inputs.mask = mask.view();
  backward.dmask = dmask.view();
  flashattn::backward(backward, kOptions);
  std::vector<float> values;
  for (std::int64_t i = 0; i < dmask.count(); ++i) values.push_back(dmask.get(i));
  return values;
}

std::vector<float> unsummed_gradient(Call& call) {
  return mask_gradient(call, {kSizes.batch, kSizes.query_heads, kSizes.seqlen_q, kSizes.seqlen_k});
}

// All instruction sets of this machine, one after the other.
template <class Body>
void on_every_isa(const Body& body) {
  for (const std::string& isa : supported_isas()) {
    BOOST_TEST_CONTEXT(isa) {
      set_isa(isa);
      body();
    }
  }
  set_isa(supported_isas().front());
}

AttentionJob job_with(bool batches, bool heads, bool rows, bool keys) {
  AttentionJob job;
  job.batch = 3;
  job.query_heads = 6;
  job.kv_heads = 2;
  job.heads_per_kv = 3;
  job.seqlen_q = 700;
  job.seqlen_k = 333;
  job.dmask.batches = batches ? job.batch : 1;
  job.dmask.heads = heads ? job.query_heads : 1;
  job.dmask.rows = rows ? job.seqlen_q : 1;
  job.dmask.keys = keys ? job.seqlen_k : 1;
  return job;
}

std::int64_t length(Interval x) { return x.end - x.begin; }

}  // namespace

BOOST_AUTO_TEST_SUITE(mask_gradient_order)

// Regions hold every score exactly once, whichever axes dmask has and however many threads there
// are: their volumes add up to all scores, and no two overlap.
BOOST_AUTO_TEST_CASE(regions_cover_all_scores_once) {
  for (int axes = 0; axes < 16; ++axes) {
    const AttentionJob job = job_with(axes & 1, axes & 2, axes & 4, axes & 8);
    for (const std::int64_t threads : {1, 2, 16, 200}) {
      BOOST_TEST_CONTEXT("axes " << axes << ", threads " << threads) {
        const MaskGrid grid = mask_grid(job, threads);
        std::int64_t scores = 0;
        std::vector<MaskRegion> regions;
        for (std::int64_t i = 0; i < grid.regions(); ++i) {
          const MaskRegion r = mask_region(job, grid, i);
          scores += length(r.batches) * length(r.heads) * length(r.rows) * length(r.keys);
          BOOST_TEST(r.rows.begin % flashattn::cpu::kBackwardBlockQ == 0);
          BOOST_TEST(r.keys.begin % flashattn::cpu::kBackwardBlockK == 0);
          regions.push_back(r);
        }
        BOOST_TEST(scores == job.batch * job.query_heads * job.seqlen_q * job.seqlen_k);
        const auto apart = [](Interval a, Interval b) {
          return a.end <= b.begin || b.end <= a.begin;
        };
        int overlaps = 0;
        for (std::size_t i = 0; i < regions.size(); ++i) {
          for (std::size_t j = 0; j < i; ++j) {
            const MaskRegion& a = regions[i];
            const MaskRegion& b = regions[j];
            if (!apart(a.batches, b.batches) && !apart(a.heads, b.heads) &&
                !apart(a.rows, b.rows) && !apart(a.keys, b.keys)) {
              ++overlaps;
            }
          }
        }
        BOOST_TEST(overlaps == 0);
      }
    }
  }
}

// One (rows, keys) mask for all: batch entries, then heads, in ascending order.
BOOST_AUTO_TEST_CASE(planes_are_added_in_ascending_order) {
  on_every_isa([] {
    Call call(kSizes);
    const std::vector<float> full = unsummed_gradient(call);
    const std::vector<float> summed = mask_gradient(call, {1, 1, kSizes.seqlen_q, kSizes.seqlen_k});
    std::int64_t different = 0;
    for (std::int64_t i = 0; i < kSizes.seqlen_q; ++i) {
      for (std::int64_t j = 0; j < kSizes.seqlen_k; ++j) {
        float sum = 0.0F;
        for (std::int64_t b = 0; b < kSizes.batch; ++b) {
          for (std::int64_t h = 0; h < kSizes.query_heads; ++h) {
            sum += full[static_cast<std::size_t>(row_index(b, h, i) * kSizes.seqlen_k + j)];
          }
        }
        different += sum != summed[static_cast<std::size_t>(i * kSizes.seqlen_k + j)];
      }
    }
    BOOST_TEST(different == 0);
  });
}

// One key for all: tiles of four keys in pairs, the tiles of a block, the blocks of a chunk, then
// for each (batch, kv head) the chunks with the heads of the group inside.
BOOST_AUTO_TEST_CASE(keys_are_added_by_tile_block_chunk_and_head) {
  on_every_isa([] {
    Call call(kSizes);
    const std::vector<float> full = unsummed_gradient(call);
    const std::vector<float> summed = mask_gradient(call, {kSizes.seqlen_q, 1});
    const auto at = [&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
      if (j >= kSizes.seqlen_k) return 0.0F;
      return full[static_cast<std::size_t>(row_index(b, h, i) * kSizes.seqlen_k + j)];
    };
    constexpr std::int64_t kBlock = flashattn::cpu::kBackwardBlockK;
    constexpr std::int64_t kChunk = flashattn::cpu::kMaskRegionBlocks * kBlock;
    constexpr std::int64_t kGroup = kSizes.query_heads / kSizes.kv_heads;
    std::int64_t different = 0;
    for (std::int64_t i = 0; i < kSizes.seqlen_q; ++i) {
      float total = 0.0F;
      for (std::int64_t pair = 0; pair < kSizes.batch * kSizes.kv_heads; ++pair) {
        const std::int64_t b = pair / kSizes.kv_heads;
        for (std::int64_t chunk = 0; chunk < kSizes.seqlen_k; chunk += kChunk) {
          for (std::int64_t g = 0; g < kGroup; ++g) {
            const std::int64_t h = pair % kSizes.kv_heads * kGroup + g;
            float part = 0.0F;
            for (std::int64_t block = chunk; block < chunk + kChunk; block += kBlock) {
              float keys = 0.0F;
              for (std::int64_t j = block; j < block + kBlock; j += 4) {
                keys += (at(b, h, i, j) + at(b, h, i, j + 1)) +
                        (at(b, h, i, j + 2) + at(b, h, i, j + 3));
              }
              part += keys;
            }
            total += part;
          }
        }
      }
      different += total != summed[static_cast<std::size_t>(i)];
    }
    BOOST_TEST(different == 0);
  });
}

// The smaller regions of many threads sum the same.
BOOST_AUTO_TEST_CASE(no_bit_depends_on_the_threads) {
  const int before = get_num_threads();
  for (const std::initializer_list<std::int64_t> shape :
       {std::initializer_list<std::int64_t>{1, 1, kSizes.seqlen_q, kSizes.seqlen_k},
        {kSizes.seqlen_k},
        {kSizes.seqlen_q, 1},
        {kSizes.query_heads, 1, 1},
        {1}}) {
    Call call(kSizes);
    set_num_threads(1);
    const std::vector<float> one = mask_gradient(call, shape);
    for (const int threads : {2, 3, 5, 40}) {
      set_num_threads(threads);
      const bool same = mask_gradient(call, shape) == one;
      BOOST_TEST(same, shape.size() << " axes, " << threads << " threads");
    }
  }
  set_num_threads(before);
}

BOOST_AUTO_TEST_SUITE_END()
