// Decode: the same bits whatever runs beside it, and no read of a key that no row sees.
#include <sys/mman.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/decode_schedule.h"
#include "cpu/dispatch.h"
#include "cpu/thread_pool.h"
#include "flashattn/attention.h"
#include "tensors.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::Causal;
using flashattn::contiguous_view;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::TensorView;
using flashattn::cpu::set_isa;
using flashattn::cpu::set_num_threads;
using flashattn::cpu::supported_isas;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::Sizes;

// Several chunks and a short last one; a group of five rows is a tile of four and one of one.
constexpr Sizes kSizes{.batch = 3,
                       .seqlen_q = 1,
                       .seqlen_k = 1700,
                       .query_heads = 10,
                       .kv_heads = 2,
                       .head_dim = 64,
                       .value_dim = 40};

std::vector<float> items(const Array& array, std::int64_t begin, std::int64_t end) {
  std::vector<float> all;
  for (std::int64_t i = begin; i < end; ++i) all.push_back(array.get(i));
  return all;
}
std::vector<float> items(const Array& array) { return items(array, 0, array.count()); }

// Restores the number of threads and the instruction set.
struct Settings {
  int threads = flashattn::cpu::get_num_threads();
  std::string isa = flashattn::cpu::active_isa();
  ~Settings() {
    set_num_threads(threads);
    set_isa(isa);
  }
};

// `bytes` of memory between pages that may not be touched.
class Fenced {
 public:
  Fenced(std::size_t before, std::size_t bytes, std::size_t after)
      : total_(before + bytes + after), before_(before) {
    base_ = static_cast<char*>(
        mmap(nullptr, total_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    BOOST_REQUIRE(base_ != MAP_FAILED);
    BOOST_REQUIRE(mprotect(base_ + before, bytes, PROT_READ | PROT_WRITE) == 0);
  }
  ~Fenced() { munmap(base_, total_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  char* whole() const { return base_; }
  float* open() const { return reinterpret_cast<float*>(base_ + before_); }

 private:
  std::size_t total_;
  std::size_t before_;
  char* base_ = nullptr;
};

BOOST_AUTO_TEST_SUITE(decode)

BOOST_AUTO_TEST_CASE(any_number_of_threads_gives_the_same_bits) {
  const Settings restore;
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      std::vector<float> first;
      for (const int threads : {1, 2, 3, 5, 16}) {
        set_num_threads(threads);
        Call call(kSizes, dtype);
        flashattn::forward(call.forward_tensors(), {.backend = "cpu"});
        if (first.empty()) first = items(call.out);
        BOOST_TEST(items(call.out) == first, isa << ' ' << threads << " threads");
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(a_batch_entry_alone_has_the_bits_it_has_among_others) {
  const Settings restore;
  std::vector<std::int64_t> lengths = {3, 900, 1513};
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    Call whole(kSizes);
    ForwardTensors tensors = whole.forward_tensors();
    tensors.inputs.kv_lengths = contiguous_view(lengths.data(), DType::kInt64, 3);
    flashattn::forward(tensors, {.backend = "cpu"});
    for (std::int64_t b = 0; b < kSizes.batch; ++b) {
      Sizes one = kSizes;
      one.batch = 1;
      one.seqlen_k = lengths[static_cast<std::size_t>(b)];
      Call alone(one);
      // The keys that exist are the first ones of the entry.
      for (const auto& [from, to] : {std::pair{&whole.query, &alone.query},
                                     {&whole.key, &alone.key},
                                     {&whole.value, &alone.value}}) {
        const std::int64_t entry = b * (from->count() / kSizes.batch);
        for (std::int64_t i = 0; i < to->count(); ++i) to->set(i, from->get(entry + i));
      }
      flashattn::forward(alone.forward_tensors(), {.backend = "cpu"});
      const std::int64_t outs = alone.out.count();
      BOOST_TEST(items(alone.out) == items(whole.out, b * outs, (b + 1) * outs));
      const std::int64_t rows = alone.lse.count();
      BOOST_TEST(items(alone.lse) == items(whole.lse, b * rows, (b + 1) * rows));
    }
  }
}

BOOST_AUTO_TEST_CASE(keys_that_no_row_sees_are_not_read) {
  const Settings restore;
  constexpr std::int64_t kDim = 64;
  constexpr std::int64_t kKeys = 8192;
  constexpr std::int64_t kRowBytes = kDim * 4;
  const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
  // Whole pages [first, last) of keys are readable; the window and the length open exactly those.
  const std::int64_t rows_of_page = std::max<std::int64_t>(1, page / kRowBytes);
  const std::int64_t first = 5008 / rows_of_page * rows_of_page;
  const std::int64_t last = first + 11 * rows_of_page;
  const auto bytes = [&](std::int64_t rows) { return static_cast<std::size_t>(rows * kRowBytes); };
  const Fenced key(bytes(first), bytes(last - first), bytes(kKeys - last));
  const Fenced value(bytes(first), bytes(last - first), bytes(kKeys - last));
  for (std::int64_t i = 0; i < (last - first) * kDim; ++i) {
    key.open()[i] = static_cast<float>(i % 7) * 0.1F;
    value.open()[i] = 2.0F;
  }
  for (const std::string& isa : supported_isas()) {
    set_isa(isa);
    Array query(DType::kFloat32, {1, 2, 1, kDim});
    Array out(DType::kFloat32, {1, 2, 1, kDim});
    Array lse(DType::kFloat32, {1, 1, 2});
    query.fill_normal(1);
    std::vector<std::int32_t> lengths = {static_cast<std::int32_t>(last)};
    const ForwardTensors tensors{
        .inputs = {.query = query.view(),
                   .key = contiguous_view(key.whole(), DType::kFloat32, 1, kKeys, 1, kDim),
                   .value = contiguous_view(value.whole(), DType::kFloat32, 1, kKeys, 1, kDim),
                   .mask = {},
                   .alibi_slopes = {},
                   .sinks = {},
                   .q_offsets = {},
                   .kv_lengths = contiguous_view(lengths.data(), DType::kInt32, 1)},
        .out = out.view(),
        .lse = lse.view()};
    // Row 0 stands at last - 2 and sees back to key `first`.
    AttentionOptions options;
    options.causal = Causal::kBottomRight;
    options.window = {.left = last - 2 - first, .right = 0};
    options.backend = "cpu";
    flashattn::forward(tensors, options);
    for (std::int64_t i = 0; i < out.count(); ++i) {
      BOOST_TEST(out.get(i) == 2.0F, boost::test_tools::tolerance(1e-6F));
    }
  }
}

// Whether decode computes `rows` rows of one kv head that see `visible` of `seqlen_k` keys.
bool decodes(std::int64_t seqlen_q, std::int64_t heads_per_kv, std::int64_t visible,
             std::int64_t seqlen_k, DType dtype = DType::kFloat32) {
  const flashattn::Visibility visibility{.seqlen_q = seqlen_q, .key_limit = visible};
  flashattn::cpu::AttentionJob job;
  job.visibility = &visibility;
  job.dtype = dtype;
  job.seqlen_q = seqlen_q;
  job.seqlen_k = seqlen_k;
  job.heads_per_kv = heads_per_kv;
  job.head_dim = job.value_dim = 64;
  return flashattn::cpu::prefers_decode(job, 0);
}

BOOST_AUTO_TEST_CASE(few_rows_are_decoded_whatever_they_see) {
  for (const std::int64_t keys : {0, 1, 100, 100000}) {
    BOOST_TEST(decodes(1, 8, keys, keys));
    BOOST_TEST(!decodes(17, 1, keys, keys));
    BOOST_TEST(!decodes(16, 9, keys, keys));
  }
}

BOOST_AUTO_TEST_CASE(more_rows_are_decoded_over_many_keys) {
  BOOST_TEST(!decodes(16, 1, 128, 128));
  BOOST_TEST(decodes(16, 1, 129, 129));
  BOOST_TEST(!decodes(16, 1, 1024, 1024, DType::kBFloat16));
  BOOST_TEST(decodes(16, 1, 1025, 1025, DType::kBFloat16));
  BOOST_TEST(!decodes(4, 32, 1024, 1024));
  BOOST_TEST(decodes(4, 32, 1025, 1025));
}

BOOST_AUTO_TEST_CASE(padding_does_not_change_the_choice) {
  BOOST_TEST(!decodes(16, 1, 100, 100000));
  BOOST_TEST(decodes(16, 1, 200, 100000));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
