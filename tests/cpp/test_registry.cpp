// The choice of a backend, with backends made up for the test, and the list of this build.
#include <boost/test/unit_test.hpp>
#include <string>
#include <vector>

#include "core/registry.h"
#include "flashattn/error.h"

namespace {

using flashattn::AttentionProblem;
using flashattn::Backend;
using flashattn::BackendName;
using flashattn::choose_from;
using flashattn::Support;

// Answers what the test tells it to and computes nothing.
class FakeBackend : public Backend {
 public:
  FakeBackend(std::string name, Support available, Support supports, bool by_default = true)
      : name_(std::move(name)),
        available_(std::move(available)),
        supports_(std::move(supports)),
        by_default_(by_default) {}

  std::string name() const override { return name_; }
  std::string device() const override { return "none"; }
  Support available() const override { return available_; }
  bool chosen_by_default() const override { return by_default_; }
  std::vector<std::string> features() const override { return {}; }
  Support supports(const AttentionProblem&) const override { return supports_; }
  void forward(const AttentionProblem&, const flashattn::ForwardTensors&) override {}
  void backward(const AttentionProblem&, const flashattn::BackwardTensors&) override {}
  flashattn::CopyStats copy_stats(bool) override { return {}; }

 private:
  std::string name_;
  Support available_;
  Support supports_;
  bool by_default_;
};

const Support kYes{.ok = true, .reason = ""};
const AttentionProblem kProblem{.batch = 1,
                                .query_heads = 2,
                                .kv_heads = 2,
                                .seqlen_q = 3,
                                .seqlen_k = 3,
                                .head_dim = 4,
                                .value_dim = 4};

template <typename Error>
std::string refusal(const std::vector<Backend*>& list, const BackendName& asked,
                    const AttentionProblem& problem = kProblem) {
  try {
    choose_from(list, problem, asked);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

BOOST_AUTO_TEST_SUITE(registry)

BOOST_AUTO_TEST_CASE(the_first_that_can_is_chosen) {
  FakeBackend absent("gpu", {.ok = false, .reason = "no device"}, kYes);
  FakeBackend unable("npu", kYes, {.ok = false, .reason = "softcap is not implemented"});
  FakeBackend able("cpu", kYes, kYes);
  FakeBackend also("slow", kYes, kYes);
  BOOST_TEST(choose_from({&absent, &unable, &able, &also}, kProblem, {}).name() == "cpu");
  BOOST_TEST(choose_from({&absent, &unable, &able, &also}, kProblem, {.name = "slow"}).name() ==
             "slow");
}

BOOST_AUTO_TEST_CASE(one_that_must_be_named_is_passed_over) {
  FakeBackend simulated("metal", kYes, kYes, false);
  FakeBackend cpu("cpu", kYes, kYes);
  BOOST_TEST(choose_from({&simulated, &cpu}, kProblem, {}).name() == "cpu");
  BOOST_TEST(choose_from({&simulated, &cpu}, kProblem, {.name = "metal"}).name() == "metal");
}

BOOST_AUTO_TEST_CASE(refusals_list_every_reason) {
  FakeBackend absent("gpu", {.ok = false, .reason = "no device"}, kYes);
  FakeBackend unable("cpu", kYes, {.ok = false, .reason = "softcap is not implemented"});
  BOOST_TEST(refusal<flashattn::Unsupported>({&absent, &unable}, {}) ==
             "attention: no backend can do forward float32 B=1 H=2 T=3 D=4\n"
             "  gpu: no device\n"
             "  cpu: softcap is not implemented");
  BOOST_TEST(refusal<flashattn::Unsupported>({&absent, &unable}, {.name = "gpu"}) ==
             "attention: backend \"gpu\" cannot do forward float32 B=1 H=2 T=3 D=4: no device");
  BOOST_TEST(refusal<flashattn::InvalidArgument>({&absent, &unable}, {.name = "tpu"}) ==
             "attention: backend (\"tpu\") must be one of: gpu, cpu");
}

BOOST_AUTO_TEST_CASE(refusals_name_the_function_and_where_the_name_came_from) {
  FakeBackend absent("gpu", {.ok = false, .reason = "no device"}, kYes);
  AttentionProblem backward = kProblem;
  backward.pass = flashattn::Pass::kBackward;
  const auto from_environment = [](const char* name) {
    return BackendName{.name = name, .source = "FLASHATTN_BACKEND"};
  };
  BOOST_TEST(refusal<flashattn::InvalidArgument>({&absent}, from_environment("tpu"), backward) ==
             "attention_backward: FLASHATTN_BACKEND (\"tpu\") must be one of: gpu");
  BOOST_TEST(refusal<flashattn::Unsupported>({&absent}, from_environment("gpu"), backward) ==
             "attention_backward: FLASHATTN_BACKEND \"gpu\" cannot do backward float32 B=1 H=2 T=3 "
             "D=4: no device");
  BOOST_TEST(refusal<flashattn::Unsupported>({&absent}, {}, backward) ==
             "attention_backward: no backend can do backward float32 B=1 H=2 T=3 D=4\n"
             "  gpu: no device");
}

BOOST_AUTO_TEST_SUITE_END()
