// forward and backward through the public API against the definition in float64, on the CPU
// backend. The bound is the project's rule: twice the error (gradients: three times) that an
// implementation without fusion makes in the same dtype, plus two roundings of a sum with 0.3.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "flashattn/attention.h"
#include "flashattn/error.h"
#include "naive.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::AttentionProblem;
using flashattn::BackwardTensors;
using flashattn::Causal;
using flashattn::DType;
using flashattn::ForwardTensors;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::Naive;
using flashattn::testing::NaiveResult;
using flashattn::testing::Sizes;

// float32 as a value of `dtype`.
float rounded_to(DType dtype, float value) {
  if (dtype == DType::kFloat16) {
    return flashattn::float16_to_float(flashattn::float_to_float16(value));
  }
  if (dtype == DType::kBFloat16) {
    return flashattn::bfloat16_to_float(flashattn::float_to_bfloat16(value));
  }
  return value;
}

double distance(double a, double b) { return a == b ? 0.0 : std::fabs(a - b); }

// got within factor * max|naive - oracle| + 2 max|(oracle + 0.3 - 0.3) - oracle|, where the sum and
// the difference are rounded to got's dtype; NaN never is.
void expect_close(const std::string& name, Array& got, const std::vector<double>& oracle,
                  const std::vector<double>& naive, double factor) {
  const DType dtype = got.view().dtype;
  double error = 0.0;
  double naive_error = 0.0;
  double rounding_error = 0.0;
  bool not_a_number = false;
  for (std::size_t i = 0; i < oracle.size(); ++i) {
    const auto value = static_cast<double>(got.get(static_cast<std::int64_t>(i)));
    not_a_number = not_a_number || std::isnan(value);
    error = std::max(error, distance(value, oracle[i]));
    naive_error = std::max(naive_error, distance(naive[i], oracle[i]));
    if (std::isinf(oracle[i])) continue;
    const float there = rounded_to(dtype, rounded_to(dtype, static_cast<float>(oracle[i])) + 0.3F);
    const float back = rounded_to(dtype, there - 0.3F);
    rounding_error = std::max(rounding_error, distance(static_cast<double>(back), oracle[i]));
  }
  BOOST_TEST(!not_a_number, name << " has a NaN");
  BOOST_TEST(
      error <= factor * naive_error + 2.0 * rounding_error,
      name << ": error " << error << ", naive " << naive_error << ", rounding " << rounding_error);
}

struct Case {
  std::string name;
  Sizes sizes;
  AttentionOptions options;
  std::vector<std::int32_t> kv_lengths;
};

std::vector<Case> cases() {
  const Sizes longer{.seqlen_q = 70, .seqlen_k = 150, .head_dim = 40, .value_dim = 24};
  return {
      {"plain", {}, {}, {}},
      {"longer", longer, {}, {}},
      {"causal", longer, {.causal = Causal::kBottomRight}, {}},
      {"top_left", longer, {.causal = Causal::kTopLeft}, {}},
      {"more rows than keys",
       {.seqlen_q = 90, .seqlen_k = 33},
       {.causal = Causal::kBottomRight},
       {}},
      {"window", longer, {.window = {.left = 20, .right = 5}}, {}},
      {"offsets", longer, {.causal = Causal::kBottomRight, .q_offset = 100, .k_offset = 60}, {}},
      {"lengths", longer, {.causal = Causal::kBottomRight}, {0, 77}},
      {"one row", {.seqlen_q = 1, .seqlen_k = 300, .head_dim = 64, .value_dim = 64}, {}, {300, 5}},
      {"dim 1",
       {.seqlen_q = 5, .seqlen_k = 7, .head_dim = 1, .value_dim = 3},
       {.scale = -0.5F},
       {}},
      {"wide",
       {.batch = 1, .seqlen_q = 20, .seqlen_k = 40, .head_dim = 200, .value_dim = 256},
       {},
       {}},
      {"no keys", {.seqlen_k = 0}, {}, {}},
  };
}

void run_case(const Case& c, DType dtype) {
  BOOST_TEST_CONTEXT(c.name << ' ' << dtype_name(dtype)) {
    Call call(c.sizes, dtype);
    std::vector<std::int32_t> lengths = c.kv_lengths;
    ForwardTensors forward = call.forward_tensors();
    BackwardTensors backward = call.backward_tensors();
    if (!lengths.empty()) {
      forward.inputs.kv_lengths =
          flashattn::contiguous_view(lengths.data(), DType::kInt32, lengths.size());
      backward.inputs.kv_lengths = forward.inputs.kv_lengths;
    }
    AttentionOptions options = c.options;
    options.backend = "cpu";
    flashattn::forward(forward, options);
    flashattn::backward(backward, options);

    const AttentionProblem problem = make_problem(forward, options);
    const auto visibility = make_visibilities(problem, forward.inputs);
    const NaiveResult oracle =
        Naive<double>(call, problem, visibility, [](double value) { return value; }).run();
    const NaiveResult naive = Naive<float>(call, problem, visibility, [dtype](float value) {
                                return rounded_to(dtype, value);
                              }).run();
    expect_close("out", call.out, oracle.out, naive.out, 2.0);
    expect_close("lse", call.lse, oracle.lse, naive.lse, 2.0);
    expect_close("dq", call.dq, oracle.dq, naive.dq, 3.0);
    expect_close("dk", call.dk, oracle.dk, naive.dk, 3.0);
    expect_close("dv", call.dv, oracle.dv, naive.dv, 3.0);
  }
}

// Every case with every instruction set of this machine.
void run_cases(DType dtype) {
  const std::string before = flashattn::cpu::active_isa();
  for (const std::string& isa : flashattn::cpu::supported_isas()) {
    BOOST_TEST_CONTEXT(isa) {
      flashattn::cpu::set_isa(isa);
      for (const Case& c : cases()) run_case(c, dtype);
    }
  }
  flashattn::cpu::set_isa(before);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(attention)

BOOST_AUTO_TEST_CASE(float32_matches_the_definition) { run_cases(DType::kFloat32); }

BOOST_AUTO_TEST_CASE(float16_matches_the_definition) { run_cases(DType::kFloat16); }

BOOST_AUTO_TEST_CASE(bfloat16_matches_the_definition) { run_cases(DType::kBFloat16); }

BOOST_AUTO_TEST_CASE(a_batch_row_alone_has_the_bits_it_has_in_its_batch) {
  const Sizes sizes{.batch = 3, .seqlen_q = 130, .seqlen_k = 200, .head_dim = 32, .value_dim = 32};
  Call whole(sizes);
  const AttentionOptions options{.causal = Causal::kBottomRight, .backend = "cpu"};
  flashattn::forward(whole.forward_tensors(), options);
  flashattn::backward(whole.backward_tensors(), options);

  Sizes one = sizes;
  one.batch = 1;
  Call alone(one);
  for (const auto& [from, to] : {std::pair{&whole.query, &alone.query},
                                 {&whole.key, &alone.key},
                                 {&whole.value, &alone.value},
                                 {&whole.dout, &alone.dout},
                                 {&whole.dlse, &alone.dlse}}) {
    // The last batch entry, which other entries' work comes before.
    for (std::int64_t i = 0; i < to->count(); ++i) to->set(i, from->get(2 * to->count() + i));
  }
  flashattn::forward(alone.forward_tensors(), options);
  flashattn::backward(alone.backward_tensors(), options);
  for (const auto& [from, to] : {std::pair{&whole.out, &alone.out},
                                 {&whole.lse, &alone.lse},
                                 {&whole.dq, &alone.dq},
                                 {&whole.dk, &alone.dk},
                                 {&whole.dv, &alone.dv}}) {
    std::int64_t different = 0;
    for (std::int64_t i = 0; i < to->count(); ++i) {
      different += flashattn::bits_of_float(to->get(i)) !=
                   flashattn::bits_of_float(from->get(2 * to->count() + i));
    }
    BOOST_TEST(different == 0);
  }
}

BOOST_AUTO_TEST_CASE(gradients_that_are_not_wanted_may_be_absent) {
  Call all({.seqlen_q = 20, .seqlen_k = 30});
  Call some({.seqlen_q = 20, .seqlen_k = 30});
  const AttentionOptions options{.backend = "cpu"};
  for (Call* call : {&all, &some}) flashattn::forward(call->forward_tensors(), options);
  flashattn::backward(all.backward_tensors(), options);
  for (const auto member : {&BackwardTensors::dq, &BackwardTensors::dk, &BackwardTensors::dv}) {
    BackwardTensors tensors = some.backward_tensors();
    tensors.*member = {};
    flashattn::backward(tensors, options);
  }
  for (std::int64_t i = 0; i < all.dq.count(); ++i) BOOST_TEST(all.dq.get(i) == some.dq.get(i));
  for (std::int64_t i = 0; i < all.dk.count(); ++i) BOOST_TEST(all.dk.get(i) == some.dk.get(i));
  for (std::int64_t i = 0; i < all.dv.count(); ++i) BOOST_TEST(all.dv.get(i) == some.dv.get(i));
}

// Keys are counted in 32 bits there. All of them are one row: no memory is needed to ask.
BOOST_AUTO_TEST_CASE(what_the_cpu_cannot_do_is_refused_by_name) {
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  for (flashattn::TensorView* view : {&tensors.inputs.key, &tensors.inputs.value}) {
    view->shape[1] = std::int64_t{1} << 31;
    view->stride[1] = 0;
  }
  std::string refusal = "no error";
  try {
    flashattn::forward(tensors, {.backend = "cpu"});
  } catch (const flashattn::Unsupported& error) {
    refusal = error.what();
  }
  BOOST_TEST(refusal.find("seqlen_k") != std::string::npos, refusal);
}

BOOST_AUTO_TEST_SUITE_END()
