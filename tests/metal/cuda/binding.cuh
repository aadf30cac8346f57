// One kernel run of the check program: which kernel it is, and all buffers and parameters that it
// may be bound to. Inputs that a kernel takes from an earlier one come from the reference; outputs
// are filled with NaN first.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "device_array.cuh"
#include "dropout.h"
#include "problem.h"
#include "registry.h"
#include "shaders/abi.h"

namespace check {

namespace abi = flashattn::metal::abi;

enum class Kind {
  kForward,
  kDelta,
  kBackwardDq,
  kBackwardDv,
  kBackwardDk,
  kBackwardDkv,
  kMaskGradient,
  kSlopeGradient,
  kSinkGradient,
};

struct Entry {
  const char* kernel;  // host name
  const char* unit;
  Kind kind;
  Storage storage;
  int head_tile, value_tile;
  int block_rows, block_columns, threads;
  int constants;  // bit n: function constant n is on
  bool fault;
  const char* merge;  // host name of what puts a split call's chunks together, "" elsewhere

  bool has(abi::FunctionConstantId constant) const { return (constants >> constant & 1) != 0; }
  bool accumulates() const { return has(abi::kConstantAccumulate) && kind != Kind::kDelta; }
  bool splits() const { return merge[0] != '\0'; }
  bool key_side() const {
    return kind == Kind::kBackwardDv || kind == Kind::kBackwardDk || kind == Kind::kBackwardDkv;
  }
  bool subtracts() const { return has(abi::kConstantHasDlse) && kind == Kind::kDelta; }
  // One result per head.
  bool sums() const { return kind == Kind::kSlopeGradient || kind == Kind::kSinkGradient; }
  bool takes_options() const { return has(abi::kConstantHasModifiers) || sums(); }
};

using Buffer = DeviceArray<std::uint8_t>;

inline abi::TensorStrides strides(int rows, int heads, int dim) {
  const std::int64_t d = dim;
  return {d * heads * rows, d * heads, d, 1};
}

inline abi::AttentionParams make_params(const Problem& p) {
  abi::AttentionParams params{};
  params.query = params.dq = strides(p.seqlen_q, p.query_heads, p.head_dim);
  params.key = params.dk = strides(p.seqlen_k, p.kv_heads, p.head_dim);
  params.value = params.dv = strides(p.seqlen_k, p.kv_heads, p.value_dim);
  params.out = params.dout = strides(p.seqlen_q, p.query_heads, p.value_dim);
  params.lse = params.dlse = {std::int64_t{p.query_heads} * p.seqlen_q, p.seqlen_q, 1};
  params.query_heads = static_cast<unsigned>(p.query_heads);
  params.kv_heads = static_cast<unsigned>(p.kv_heads);
  params.heads_per_kv = static_cast<unsigned>(p.group());
  params.batch = static_cast<unsigned>(p.batch);
  params.seqlen_q = static_cast<unsigned>(p.seqlen_q);
  params.seqlen_k = static_cast<unsigned>(p.seqlen_k);
  params.head_dim = static_cast<unsigned>(p.head_dim);
  params.value_dim = static_cast<unsigned>(p.value_dim);
  params.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  params.scale_log2e = params.scale * 1.44269504f;
  params.table_rows = static_cast<unsigned>(p.seqlen_q);
  return params;
}

inline int blocks_of(int length, int block) { return (length + block - 1) / block; }

// Keys of a chunk where they are split: few, so that small problems have several.
constexpr int kChunkKeys = 64;

// What register kernels read besides: all blocks in one dispatch, a lagging maximum, chunks.
inline abi::AttentionParams register_params(const Entry& entry, const Problem& p) {
  abi::AttentionParams params = make_params(p);
  const int rows = entry.key_side() ? p.seqlen_k : p.seqlen_q;
  params.blocks = static_cast<unsigned>(blocks_of(rows, entry.block_rows));
  params.max_slack = 8;
  if (entry.splits()) {
    params.few_rows = static_cast<unsigned>(p.seqlen_q);
    params.chunk_keys = kChunkKeys;
    params.chunks = static_cast<unsigned>(blocks_of(p.seqlen_k, kChunkKeys));
  }
  return params;
}

template <class T>
std::vector<std::uint8_t> bytes_of(const std::vector<T>& table) {
  std::vector<std::uint8_t> bytes(table.size() * sizeof(T));
  std::memcpy(bytes.data(), table.data(), bytes.size());
  return bytes;
}

inline std::vector<std::uint8_t> row_intervals(const Problem& p) {
  constexpr int kFar = 1 << 30;
  const int begin = p.window < 0 ? -kFar : p.visible_begin(0);
  const int end = p.window < 0 && !p.causal ? kFar : p.visible_end(0);
  return bytes_of(
      std::vector<abi::RowInterval>(p.batch, abi::RowInterval{begin, end, p.seqlen_k, 0}));
}

// Options that change no result: a mask of zeros that the heads share, ALiBi slopes of 0, sinks of
// -inf; and dropout, which keeps everything unless the problem says otherwise.
inline abi::ModifierParams make_modifiers(const Problem& p) {
  abi::ModifierParams m{};
  const std::int64_t rows = p.seqlen_q, keys = p.seqlen_k, heads = p.query_heads;
  m.mask = m.dmask = {rows * keys, 0, keys, 1};
  m.mask_tile_rows = m.mask_tile_keys = 1u << 30;  // one tile for all
  m.mask_batch = static_cast<unsigned>(p.batch);
  m.mask_heads = 1;
  m.mask_rows = static_cast<unsigned>(rows);
  m.mask_keys = static_cast<unsigned>(keys);
  m.tile_count = static_cast<unsigned>(heads);
  m.slopes_head = m.dslopes_head = 1;
  m.sinks_head = m.dsinks_head = 1;
  m.global_heads = static_cast<unsigned>(heads);
  m.global_queries = static_cast<unsigned>(rows);
  m.global_keys = static_cast<unsigned>(keys);
  m.dropout_threshold = dropout_threshold(p);
  m.dropout_scale = static_cast<float>(1 / (1 - p.dropout_p));
  m.dropout_offset = kDropoutOffset;
  m.seed_low = static_cast<unsigned>(kDropoutSeed);
  m.seed_high = static_cast<unsigned>(kDropoutSeed >> 32);
  return m;
}

inline std::vector<float> narrow(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// What is in dq, dk and dv before a kernel that adds to them, and in dlse. Exact in every storage
// type.
constexpr float kBefore = 0.5f;
constexpr float kDlse = 0.25f;
// The sink whose gradient is taken, of rows whose log-sum-exp knows nothing of it.
constexpr float kSink = 0.5f;

// All buffers of one kernel run, by slot.
class Binding {
 public:
  Binding(const Entry& entry, const Problem& p, const Reference& r)
      : storage_(entry.storage), params_(register_params(entry, p)), modifiers_(make_modifiers(p)) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto nans = [&](std::size_t count) { return std::vector<float>(count, nan); };
    const auto before = [&](std::size_t count) {
      return std::vector<float>(count, entry.accumulates() ? kBefore : nan);
    };
    const bool backward = entry.kind != Kind::kForward && entry.kind != Kind::kDelta;
    set(abi::kBufferQuery, r.query, storage_);
    set(abi::kBufferKey, r.key, storage_);
    set(abi::kBufferValue, r.value, storage_);
    set(abi::kBufferDout, r.dout, storage_);
    set(abi::kBufferOut, entry.kind == Kind::kDelta ? narrow(r.out.value) : nans(r.dout.size()),
        storage_);
    set(abi::kBufferLse, backward ? narrow(r.lse.value) : nans(r.lse.value.size()),
        Storage::kFloat32);
    set(abi::kBufferDelta, backward ? narrow(r.delta.value) : nans(r.lse.value.size()),
        Storage::kFloat32);
    set(abi::kBufferDlse, std::vector<float>(r.lse.value.size(), kDlse), Storage::kFloat32);
    set(abi::kBufferDq, before(r.query.size()), storage_);
    set(abi::kBufferDk, before(r.key.size()), storage_);
    set(abi::kBufferDv, before(r.value.size()), storage_);
    buffers_[abi::kBufferRowIntervals] = std::make_unique<Buffer>(row_intervals(p));
    buffers_[abi::kBufferStatus] =
        std::make_unique<Buffer>(bytes_of(std::vector<std::uint32_t>{abi::kStatusGood}));
    if (entry.splits()) {
      const std::size_t parts = r.lse.value.size() * params_.chunks;
      set(abi::kBufferPartialOut, nans(parts * p.value_dim), Storage::kFloat32);
      set(abi::kBufferPartialState, nans(parts * 2), Storage::kFloat32);
    }
    if (entry.takes_options()) set_options(entry, p, r);
  }

  void launch(const metal_cuda::KernelEntry& kernel, unsigned groups, unsigned threads) {
    std::vector<void*> pointers(kernel.arguments.size());
    std::vector<void*> arguments;
    for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
      const metal_cuda::ArgumentSlot& argument = kernel.arguments[i];
      if (argument.bytes > 0) {
        arguments.push_back(by_value(argument));
      } else {
        // What belongs to an option that is off is not there.
        const auto found = buffers_.find(argument.slot);
        pointers[i] = found == buffers_.end() ? nullptr : found->second->pointer();
        arguments.push_back(&pointers[i]);
      }
    }
    CHECK_CUDA(cudaLaunchKernel(kernel.function, dim3(groups), dim3(threads), arguments.data(), 0,
                                nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // What register kernels found wrong.
  unsigned status() const {
    unsigned status = 0;
    std::memcpy(&status, buffers_.at(abi::kBufferStatus)->read().data(), sizeof status);
    return status;
  }

  std::vector<float> result(unsigned slot, Storage storage) const {
    return from_storage(buffers_.at(slot)->read(), storage);
  }

 private:
  void set_options(const Entry& entry, const Problem& p, const Reference& r) {
    const std::size_t heads = p.query_heads;
    const std::size_t rows = r.lse.value.size();
    const std::size_t scores = r.dmask.value.size();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float sink = entry.sums() ? kSink : -std::numeric_limits<float>::infinity();
    buffers_[abi::kBufferModifiers] =
        std::make_unique<Buffer>(bytes_of(std::vector<abi::ModifierParams>{modifiers_}));
    set(abi::kBufferMask, std::vector<float>(scores, 0.0f), Storage::kFloat32);
    buffers_[abi::kBufferMaskTiles] =
        std::make_unique<Buffer>(std::vector<std::uint8_t>{abi::kMaskTileMixed});
    set(abi::kBufferAlibiSlopes, std::vector<float>(heads, 0.0f), Storage::kFloat32);
    buffers_[abi::kBufferRowShifts] = std::make_unique<Buffer>(
        bytes_of(std::vector<std::int64_t>(p.batch, std::int64_t{p.shift()})));
    set_entries(p);
    set(abi::kBufferSinks, std::vector<float>(heads, sink), Storage::kFloat32);
    set(abi::kBufferDmask, std::vector<float>(scores, nan), Storage::kFloat32);
    set(abi::kBufferDalibiSlopes, std::vector<float>(heads, nan), Storage::kFloat32);
    set(abi::kBufferDsinks, std::vector<float>(heads, nan), Storage::kFloat32);
    const bool sums_rows = entry.kind == Kind::kSlopeGradient;
    set(abi::kBufferSlopeRows,
        sums_rows ? narrow(r.slope_rows.value) : std::vector<float>(rows, nan), Storage::kFloat32);
  }

  // Entries that say what holds without them, so that reading them changes no result; no pages.
  void set_entries(const Problem& p) {
    std::vector<abi::EntryRows> entries;
    for (int b = 0; b < p.batch; ++b) {
      abi::EntryRows entry{};
      entry.query_batch = entry.key_batch = static_cast<unsigned>(b);
      entry.seqlen_q = static_cast<unsigned>(p.seqlen_q);
      entry.seqlen_k = static_cast<unsigned>(p.seqlen_k);
      entries.push_back(entry);
    }
    buffers_[abi::kBufferEntries] = std::make_unique<Buffer>(bytes_of(entries));
    buffers_[abi::kBufferBlockTable] =
        std::make_unique<Buffer>(bytes_of(std::vector<std::uint32_t>{0}));
  }

  void* by_value(const metal_cuda::ArgumentSlot& argument) {
    if (argument.slot == abi::kBufferParams && argument.bytes == sizeof params_) return &params_;
    if (argument.slot == abi::kBufferModifiers && argument.bytes == sizeof modifiers_) {
      return &modifiers_;
    }
    std::fprintf(stderr, "slot %u: not the parameters of shaders/abi.h\n", argument.slot);
    std::exit(2);
  }

  void set(unsigned slot, const std::vector<float>& values, Storage storage) {
    buffers_[slot] = std::make_unique<Buffer>(to_storage(values, storage));
  }

  Storage storage_;
  abi::AttentionParams params_;
  abi::ModifierParams modifiers_;
  std::map<unsigned, std::unique_ptr<Buffer>> buffers_;
};

}  // namespace check
