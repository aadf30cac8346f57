// merge_attention through the C++ API: weights, empty parts, other output dtypes, gradients.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>

#include "flashattn/merge.h"
#include "tensors.h"

namespace {

using flashattn::DType;
using flashattn::MergeTensors;
using flashattn::testing::Array;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One row of one head with two dimensions, in two parts.
struct Parts {
  Array first{DType::kFloat32, {1, 1, 1, 2}};
  Array second{DType::kFloat32, {1, 1, 1, 2}};
  Array first_lse{DType::kFloat32, {1, 1, 1}};
  Array second_lse{DType::kFloat32, {1, 1, 1}};
  Array out{DType::kFloat32, {1, 1, 1, 2}};
  Array lse{DType::kFloat32, {1, 1, 1}};

  MergeTensors tensors() {
    return {.outs = {first.view(), second.view()},
            .lses = {first_lse.view(), second_lse.view()},
            .out = out.view(),
            .lse = lse.view()};
  }
};

}  // namespace

BOOST_AUTO_TEST_SUITE(merge)

BOOST_AUTO_TEST_CASE(weights_are_those_of_the_sums) {
  Parts parts;
  parts.first.set(0, 1.0F);
  parts.second.set(0, 5.0F);
  parts.first_lse.set(0, std::log(3.0F));
  parts.second_lse.set(0, 0.0F);
  flashattn::merge_attention(parts.tensors());
  BOOST_TEST(parts.out.get(0) == 2.0F, boost::test_tools::tolerance(1e-6F));
  BOOST_TEST(parts.lse.get(0) == std::log(4.0F), boost::test_tools::tolerance(1e-6F));
}

BOOST_AUTO_TEST_CASE(empty_parts_contribute_nothing) {
  Parts parts;
  parts.first.fill(std::nanf(""));
  parts.first_lse.set(0, -kInfinity);
  parts.second.fill(0.3F);
  parts.second_lse.set(0, 7.25F);
  flashattn::merge_attention(parts.tensors());
  BOOST_TEST(parts.out.get(1) == 0.3F);
  BOOST_TEST(parts.lse.get(0) == 7.25F);
  parts.second_lse.set(0, -kInfinity);
  flashattn::merge_attention(parts.tensors());
  BOOST_TEST(parts.out.get(0) == 0.0F);
  BOOST_TEST(parts.lse.get(0) == -kInfinity);
}

BOOST_AUTO_TEST_CASE(out_may_have_another_dtype) {
  Parts parts;
  parts.first.fill(1.5F);
  parts.second.fill(1.5F);
  Array half(DType::kBFloat16, {1, 1, 1, 2});
  MergeTensors tensors = parts.tensors();
  tensors.out = half.view();
  flashattn::merge_attention(tensors);
  BOOST_TEST(half.get(1) == 1.5F);
}

// With weights 3/4 and 1/4, outs 1 and 5 and dout 2 in the first dimension:
// d out = (1.5, 0.5); d lse_p = a_p (2 out_p - 2 * 2 + dlse).
BOOST_AUTO_TEST_CASE(gradients) {
  Parts parts;
  parts.first.set(0, 1.0F);
  parts.second.set(0, 5.0F);
  parts.first_lse.set(0, std::log(3.0F));
  Array dout(DType::kFloat32, {1, 1, 1, 2});
  Array dlse(DType::kFloat32, {1, 1, 1});
  Array dfirst(DType::kFloat32, {1, 1, 1, 2});
  Array dfirst_lse(DType::kFloat32, {1, 1, 1});
  Array dsecond_lse(DType::kFloat32, {1, 1, 1});
  dout.set(0, 2.0F);
  dlse.set(0, 10.0F);
  flashattn::merge_attention_backward(parts.tensors(),
                                      {.dout = dout.view(),
                                       .dlse = dlse.view(),
                                       .douts = {dfirst.view(), {}},
                                       .dlses = {dfirst_lse.view(), dsecond_lse.view()}});
  const auto close = boost::test_tools::tolerance(1e-5F);
  BOOST_TEST(dfirst.get(0) == 1.5F, close);
  BOOST_TEST(dfirst_lse.get(0) == 0.75F * (2.0F - 4.0F + 10.0F), close);
  BOOST_TEST(dsecond_lse.get(0) == 0.25F * (10.0F - 4.0F + 10.0F), close);
}

BOOST_AUTO_TEST_CASE(refusals) {
  Parts parts;
  MergeTensors none = parts.tensors();
  none.outs.clear();
  BOOST_CHECK_THROW(flashattn::merge_attention(none), flashattn::InvalidArgument);
  MergeTensors aliased = parts.tensors();
  aliased.out = aliased.outs[0];
  BOOST_CHECK_THROW(flashattn::merge_attention(aliased), flashattn::InvalidArgument);
  MergeTensors on_metal = parts.tensors();
  on_metal.outs[1].device = flashattn::DeviceKind::kMetal;
  BOOST_CHECK_THROW(flashattn::merge_attention(on_metal), flashattn::Unsupported);
}

BOOST_AUTO_TEST_SUITE_END()
