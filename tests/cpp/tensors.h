// Owned arrays for tests: a vector of float32, half or bfloat16 items with a contiguous view, and
// the whole set of tensors of a plain call.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

#include "core/half.h"
#include "flashattn/attention.h"

namespace flashattn::testing {

// Up to four axes, items of any dtype, memory aligned for all of them.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    view_.dtype = dtype;
    view_.rank = static_cast<int>(shape.size());
    std::size_t axis = 0;
    for (const std::int64_t size : shape) {
      view_.shape[axis++] = size;
      count *= size;
    }
    std::int64_t step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      view_.stride[i] = step;
      step *= view_.shape[i];
    }
    count_ = count;
    // One spare word, so that the array of an empty shape has an address too.
    words_.resize((static_cast<std::size_t>(count) * item_size(dtype)) / 8 + 1);
  }

  TensorView view() {
    TensorView view = view_;
    view.data = words_.data();
    return view;
  }
  std::int64_t count() const { return count_; }

  // Item `i` in memory order, as the float it means.
  float get(std::int64_t i) const {
    if (view_.dtype == DType::kFloat32) return items<float>()[i];
    const std::uint16_t bits = items<std::uint16_t>()[i];
    return view_.dtype == DType::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
  }
  void set(std::int64_t i, float value) {
    if (view_.dtype == DType::kFloat32) {
      items<float>()[i] = value;
    } else {
      items<std::uint16_t>()[i] =
          view_.dtype == DType::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
    }
  }
  void fill_normal(std::uint32_t seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count_; ++i) set(i, normal(engine));
  }
  void fill(float value) {
    for (std::int64_t i = 0; i < count_; ++i) set(i, value);
  }

 private:
  template <typename T>
  T* items() {
    return reinterpret_cast<T*>(words_.data());
  }
  template <typename T>
  const T* items() const {
    return reinterpret_cast<const T*>(words_.data());
  }

  TensorView view_;
  std::int64_t count_ = 0;
  std::vector<std::uint64_t> words_;
};

struct Sizes {
  std::int64_t batch = 2;
  std::int64_t seqlen_q = 6;
  std::int64_t seqlen_k = 6;
  std::int64_t query_heads = 4;
  std::int64_t kv_heads = 2;
  std::int64_t head_dim = 8;
  std::int64_t value_dim = 8;
};

// Every array of a forward and a backward call; inputs and dout are normal, outputs NaN so that a
// missing write shows.
struct Call {
  explicit Call(const Sizes& s = {}, DType dtype = DType::kFloat32)
      : query(dtype, {s.batch, s.seqlen_q, s.query_heads, s.head_dim}),
        key(dtype, {s.batch, s.seqlen_k, s.kv_heads, s.head_dim}),
        value(dtype, {s.batch, s.seqlen_k, s.kv_heads, s.value_dim}),
        out(dtype, {s.batch, s.seqlen_q, s.query_heads, s.value_dim}),
        lse(DType::kFloat32, {s.batch, s.query_heads, s.seqlen_q}),
        dout(dtype, {s.batch, s.seqlen_q, s.query_heads, s.value_dim}),
        dlse(DType::kFloat32, {s.batch, s.query_heads, s.seqlen_q}),
        dq(dtype, {s.batch, s.seqlen_q, s.query_heads, s.head_dim}),
        dk(dtype, {s.batch, s.seqlen_k, s.kv_heads, s.head_dim}),
        dv(dtype, {s.batch, s.seqlen_k, s.kv_heads, s.value_dim}) {
    std::uint32_t seed = 1;
    for (Array* input : {&query, &key, &value, &dout, &dlse}) input->fill_normal(seed++);
    for (Array* output : {&out, &lse, &dq, &dk, &dv}) output->fill(float_from_bits(0x7fc00000U));
  }

  ForwardTensors forward_tensors() {
    return {.inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
            .out = out.view(),
            .lse = lse.view()};
  }
  BackwardTensors backward_tensors() {
    return {.inputs = {.query = query.view(), .key = key.view(), .value = value.view()},
            .out = out.view(),
            .lse = lse.view(),
            .dout = dout.view(),
            .dlse = dlse.view(),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view()};
  }

  Array query, key, value, out, lse, dout, dlse, dq, dk, dv;
};

}  // namespace flashattn::testing
