// merge_attention and its gradients: rows are independent, so each is one task's business from its
// weights to its last element, and threads change no bit. Relies on the thread pool.
#include "flashattn/merge.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "core/checks.h"
#include "core/half.h"
#include "core/pending.h"
#include "cpu/thread_pool.h"

namespace flashattn {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Elements of outs that a task should read at least, so that it outweighs waking a thread.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 16;

float to_float(float x) { return x; }
struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};
float to_float(Half x) { return float16_to_float(x.bits); }
float to_float(Brain x) { return bfloat16_to_float(x.bits); }
void store(float& to, float x) { to = x; }
void store(Half& to, float x) { to.bits = float_to_float16(x); }
void store(Brain& to, float x) { to.bits = float_to_bfloat16(x); }

// Calls body with an item of the dtype's type.
template <class Body>
void with_item(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kFloat16) return body(Half{});
  return body(Brain{});
}

// One row of one head of a (batch, seqlen_q, heads, dim) view.
template <class Item>
struct Row {
  Item* data = nullptr;
  std::int64_t stride = 1;
  Item& operator[](std::int64_t d) const { return data[d * stride]; }
};

struct RowIndex {
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t head = 0;
};

template <class Item>
Row<Item> row_at(const TensorView& view, const RowIndex& at) {
  return {.data = static_cast<Item*>(view.data) + at.batch * view.stride[0] +
                  at.row * view.stride[1] + at.head * view.stride[2],
          .stride = view.stride[3]};
}

float& scalar_at(const TensorView& view, const RowIndex& at) {
  return static_cast<float*>(
      view.data)[at.batch * view.stride[0] + at.head * view.stride[1] + at.row * view.stride[2]];
}

// exp(lse_p - lse) of every part, and lse. All are 0 where every part is -inf.
struct Weights {
  explicit Weights(std::size_t parts) : of_part(parts) {}

  void read(const std::vector<TensorView>& lses, const RowIndex& at) {
    float largest = kMinusInfinity;
    for (const TensorView& view : lses) {
      const float value = scalar_at(view, at);
      if (!(value <= largest)) largest = value;  // a NaN is kept
    }
    float sum = 0.0F;
    for (std::size_t p = 0; p < lses.size(); ++p) {
      const float value = scalar_at(lses[p], at);
      of_part[p] = value == kMinusInfinity ? 0.0F : std::exp(value - largest);
      sum += of_part[p];
    }
    lse = sum == 0.0F ? kMinusInfinity : largest + std::log(sum);
    if (sum == 0.0F) return;
    for (float& weight : of_part) weight /= sum;
  }

  std::vector<float> of_part;
  float lse = kMinusInfinity;
};

// Calls body(row index, scratch) for every row, `scratch` being `floats` floats of the task's own.
template <class Body>
void for_each_row(const TensorView& shape, std::size_t parts, const Body& body) {
  const std::int64_t batch = shape.shape[0];
  const std::int64_t rows = shape.shape[1];
  const std::int64_t heads = shape.shape[2];
  const std::int64_t elements =
      std::max<std::int64_t>(1, heads * shape.shape[3] * static_cast<std::int64_t>(parts));
  const std::int64_t per_task = std::max<std::int64_t>(1, kTaskElements / elements);
  const std::int64_t total = batch * rows;
  cpu::ThreadPool::global().parallel_for((total + per_task - 1) / per_task, [&](std::int64_t task) {
    std::vector<float> scratch(static_cast<std::size_t>(shape.shape[3]));
    Weights weights(parts);
    const std::int64_t end = std::min(total, (task + 1) * per_task);
    for (std::int64_t i = task * per_task; i < end; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        body({.batch = i / rows, .row = i % rows, .head = h}, weights, scratch.data());
      }
    }
  });
}

template <class Item>
float dot(const Row<Item>& a, const Row<Item>& b, std::int64_t dim) {
  float sum = 0.0F;
  for (std::int64_t d = 0; d < dim; ++d) sum += to_float(a[d]) * to_float(b[d]);
  return sum;
}

void check_host(const Checks& check, const NamedView& arg) {
  if (arg.view.device != DeviceKind::kCpu) {
    check.fail_unsupported(std::string(arg.name) + ".device", "metal", "be in host memory");
  }
  check.memory(arg, DeviceKind::kCpu);
}

// Every part like the first, or absent where that is allowed.
void check_parts(const Checks& check, const char* name, const std::vector<TensorView>& parts,
                 const TensorView& like, bool optional) {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (optional && !parts[p]) continue;
    const std::string label = std::string(name) + "[" + std::to_string(p) + "]";
    const NamedView arg{label.c_str(), parts[p]};
    check.shape(arg, like.shape, like.rank);
    check.dtype_equal(arg, "", like.dtype);
    check_host(check, arg);
    if (optional) check.writable(arg, DeviceKind::kCpu);
  }
}

// outs and lses fit each other. Returns what a lse has to look like.
TensorView check_inputs(const Checks& check, const MergeTensors& tensors) {
  if (tensors.outs.empty()) check.fail_value("outs", "empty", "hold at least one array");
  check.equal("lses.length", static_cast<std::int64_t>(tensors.lses.size()), "outs.length",
              static_cast<std::int64_t>(tensors.outs.size()));
  const TensorView& first = tensors.outs.front();
  check.rank({"outs[0]", first}, 4);
  if (first.dtype != DType::kFloat32 && first.dtype != DType::kFloat16 &&
      first.dtype != DType::kBFloat16) {
    check.fail_type("outs[0].dtype", std::string(dtype_name(first.dtype)),
                    "be float32, float16 or bfloat16");
  }
  check_parts(check, "outs", tensors.outs, first, false);
  const TensorView lse_like{.rank = 3,
                            .shape = {first.shape[0], first.shape[2], first.shape[1], 0}};
  check_parts(check, "lses", tensors.lses, lse_like, false);
  return lse_like;
}

// No output overlaps a part or another output.
void check_distinct(const Checks& check, const std::vector<TensorView>& outputs,
                    const std::vector<TensorView>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (const TensorView& input : inputs) {
      check.distinct({"an output", outputs[i]}, {"a part", input});
    }
    for (std::size_t j = 0; j < i; ++j) {
      check.distinct({"an output", outputs[i]}, {"an output", outputs[j]});
    }
  }
}

std::vector<TensorView> joined(std::vector<TensorView> a, const std::vector<TensorView>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

void merge_attention(const MergeTensors& tensors) {
  settle_pending();
  const Checks check("merge_attention", Pass::kForward);
  const TensorView lse_like = check_inputs(check, tensors);
  const TensorView& first = tensors.outs.front();
  check.shape({"out", tensors.out}, first.shape, 4);
  check.shape({"lse", tensors.lse}, lse_like.shape, 3);
  check.dtype_equal({"lse", tensors.lse}, "", DType::kFloat32);
  for (const NamedView& output : {NamedView{"out", tensors.out}, NamedView{"lse", tensors.lse}}) {
    check_host(check, output);
    check.writable(output, DeviceKind::kCpu);
  }
  check_distinct(check, {tensors.out, tensors.lse}, joined(tensors.outs, tensors.lses));

  const std::int64_t dim = first.shape[3];
  const auto row = [&](auto part_item, auto out_item, const RowIndex& at, Weights& weights,
                       float* sum) {
    weights.read(tensors.lses, at);
    std::fill(sum, sum + dim, 0.0F);
    for (std::size_t p = 0; p < tensors.outs.size(); ++p) {
      const float weight = weights.of_part[p];
      if (weight == 0.0F) continue;  // what such a part holds may be anything
      const auto part = row_at<decltype(part_item)>(tensors.outs[p], at);
      for (std::int64_t d = 0; d < dim; ++d) sum[d] += weight * to_float(part[d]);
    }
    const auto out = row_at<decltype(out_item)>(tensors.out, at);
    for (std::int64_t d = 0; d < dim; ++d) store(out[d], sum[d]);
    scalar_at(tensors.lse, at) = weights.lse;
  };
  with_item(first.dtype, [&](auto part_item) {
    with_item(tensors.out.dtype, [&](auto out_item) {
      for_each_row(first, tensors.outs.size(),
                   [&](const RowIndex& at, Weights& weights, float* scratch) {
                     row(part_item, out_item, at, weights, scratch);
                   });
    });
  });
}

// With a_p = exp(lse_p - lse):
//   d out_p = a_p dout,   d lse_p = a_p (dout . out_p - sum_q a_q dout . out_q + dlse)
void merge_attention_backward(const MergeTensors& tensors, const MergeGradients& gradients) {
  settle_pending();
  const Checks check("merge_attention", Pass::kBackward);
  const TensorView lse_like = check_inputs(check, tensors);
  const TensorView& first = tensors.outs.front();
  const std::size_t parts = tensors.outs.size();
  check_parts(check, "dout", {gradients.dout}, first, false);
  if (gradients.dlse) check_parts(check, "dlse", {gradients.dlse}, lse_like, false);
  for (const std::vector<TensorView>* some : {&gradients.douts, &gradients.dlses}) {
    check.equal("gradients.length", static_cast<std::int64_t>(some->size()), "outs.length",
                static_cast<std::int64_t>(parts));
  }
  check_parts(check, "douts", gradients.douts, first, true);
  check_parts(check, "dlses", gradients.dlses, lse_like, true);
  check_distinct(check, joined(gradients.douts, gradients.dlses),
                 joined(joined(tensors.outs, tensors.lses), {gradients.dout, gradients.dlse}));

  const std::int64_t dim = first.shape[3];
  with_item(first.dtype, [&](auto item) {
    using Item = decltype(item);
    for_each_row(first, parts, [&](const RowIndex& at, Weights& weights, float*) {
      weights.read(tensors.lses, at);
      const Row<Item> dout = row_at<Item>(gradients.dout, at);
      std::vector<float> products(parts);
      float mean = 0.0F;
      for (std::size_t p = 0; p < parts; ++p) {
        if (weights.of_part[p] == 0.0F) continue;
        products[p] = dot(dout, row_at<Item>(tensors.outs[p], at), dim);
        mean += weights.of_part[p] * products[p];
      }
      const float dlse = gradients.dlse ? scalar_at(gradients.dlse, at) : 0.0F;
      for (std::size_t p = 0; p < parts; ++p) {
        const float weight = weights.of_part[p];
        if (gradients.dlses[p]) {
          scalar_at(gradients.dlses[p], at) =
              weight == 0.0F ? 0.0F : weight * (products[p] - mean + dlse);
        }
        if (!gradients.douts[p]) continue;
        const Row<Item> to = row_at<Item>(gradients.douts[p], at);
        for (std::int64_t d = 0; d < dim; ++d) {
          store(to[d], weight == 0.0F ? 0.0F : weight * to_float(dout[d]));
        }
      }
    });
  });
}

}  // namespace flashattn
