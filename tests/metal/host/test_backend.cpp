// The Metal backend end to end on the simulated device: numbers against the CPU backend, adopted
// and copied bytes, live objects, device failures and calls from many threads. The rules of
// attention are tested elsewhere, on both.
#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "device/faults.h"
#include "flashattn/attention.h"
#include "flashattn/backend.h"
#include "flashattn/error.h"
#include "support.h"
#include "tensors.h"

namespace {

using flashattn::Backend;
using flashattn::CopyStats;
using flashattn::DType;
using flashattn::TensorView;
using flashattn::testing::Array;
using flashattn::testing::Call;
using flashattn::testing::contains;
using flashattn::testing::LiveObjectCheck;
using flashattn::testing::ScopedVariable;
using flashattn::testing::Sizes;

constexpr Sizes kSmall{.batch = 2, .seqlen_q = 37, .seqlen_k = 50, .head_dim = 16, .value_dim = 16};

Backend& metal() {
  for (Backend* backend : flashattn::backends()) {
    if (backend->name() == "metal") return *backend;
  }
  BOOST_FAIL("no metal backend in this build");
  return *flashattn::backends().front();
}

double largest_difference(const Array& a, const Array& b) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < a.count(); ++i) {
    const double difference =
        std::fabs(static_cast<double>(a.get(i)) - static_cast<double>(b.get(i)));
    if (!(difference <= largest)) largest = difference;  // NaN counts as different
  }
  return largest;
}

void run(Call* call, const std::string& backend, bool backward) {
  flashattn::forward(call->forward_tensors(),
                     {.causal = flashattn::Causal::kBottomRight, .backend = backend});
  if (!backward) return;
  flashattn::backward(call->backward_tensors(),
                      {.causal = flashattn::Causal::kBottomRight, .backend = backend});
}

BOOST_AUTO_TEST_SUITE(metal_backend)

BOOST_AUTO_TEST_CASE(it_is_listed_first_and_never_chosen_by_default) {
  BOOST_TEST(flashattn::backends().front()->name() == "metal");
  BOOST_TEST(!metal().chosen_by_default());
  BOOST_TEST(metal().available().ok, metal().available().reason);
  BOOST_TEST(contains(metal().device(), "simulated"));
}

BOOST_AUTO_TEST_CASE(forward_agrees_with_the_cpu) {
  Call on_cpu(kSmall);
  Call on_metal(kSmall);
  run(&on_cpu, "cpu", false);
  run(&on_metal, "metal", false);
  BOOST_TEST(largest_difference(on_cpu.out, on_metal.out) < 1e-5);
  BOOST_TEST(largest_difference(on_cpu.lse, on_metal.lse) < 1e-5);
}

BOOST_AUTO_TEST_CASE(backward_agrees_with_the_cpu) {
  Call on_cpu(kSmall);
  Call on_metal(kSmall);
  run(&on_cpu, "cpu", true);
  run(&on_metal, "metal", true);
  BOOST_TEST(largest_difference(on_cpu.dq, on_metal.dq) < 1e-4);
  BOOST_TEST(largest_difference(on_cpu.dk, on_metal.dk) < 1e-4);
  BOOST_TEST(largest_difference(on_cpu.dv, on_metal.dv) < 1e-4);
}

BOOST_AUTO_TEST_CASE(a_gradient_that_nobody_wants_is_not_written) {
  Call whole(kSmall);
  Call part(kSmall);
  run(&whole, "metal", true);
  run(&part, "metal", false);
  flashattn::BackwardTensors tensors = part.backward_tensors();
  tensors.dk = {};
  tensors.dlse = {};
  Call without_dlse(kSmall);
  run(&without_dlse, "metal", false);
  flashattn::BackwardTensors all = without_dlse.backward_tensors();
  all.dlse = {};
  const flashattn::AttentionOptions options{.causal = flashattn::Causal::kBottomRight,
                                            .backend = "metal"};
  flashattn::backward(tensors, options);
  flashattn::backward(all, options);
  BOOST_TEST(largest_difference(part.dq, without_dlse.dq) == 0.0);
  BOOST_TEST(std::isnan(part.dk.get(0)));
  BOOST_TEST(largest_difference(whole.dq, without_dlse.dq) > 0.0);  // dlse matters
}

// Bytes of all arrays of a forward call.
std::uint64_t forward_bytes(const Call& call) {
  return static_cast<std::uint64_t>(call.query.count() + call.key.count() + call.value.count() +
                                    call.out.count() + call.lse.count()) *
         4;
}

BOOST_AUTO_TEST_CASE(host_arrays_are_adopted_and_counted) {
  Call call(kSmall);
  metal().copy_stats(true);
  run(&call, "metal", false);
  const CopyStats stats = metal().copy_stats(true);
  BOOST_TEST(stats.adopted_bytes == forward_bytes(call));
  BOOST_TEST(stats.copied_bytes == 0U);
}

BOOST_AUTO_TEST_CASE(memory_that_cannot_be_adopted_is_copied_and_counted) {
  Call expected(kSmall);
  run(&expected, "metal", true);
  Call call(kSmall);
  metal().copy_stats(true);
  flashattn_simulated_refuse_adoption(1);
  run(&call, "metal", false);
  const CopyStats stats = metal().copy_stats(true);
  run(&call, "metal", true);
  flashattn_simulated_refuse_adoption(0);
  BOOST_TEST(stats.adopted_bytes == 0U);
  BOOST_TEST(stats.copied_bytes == forward_bytes(call));
  BOOST_TEST(largest_difference(call.out, expected.out) == 0.0);
  BOOST_TEST(largest_difference(call.lse, expected.lse) == 0.0);
  BOOST_TEST(largest_difference(call.dk, expected.dk) == 0.0);
}

BOOST_AUTO_TEST_CASE(strided_arrays_in_place_and_through_copies) {
  // The heads of query and out run backwards in memory, and key is one head seen through a stride
  // of 0.
  Call call(kSmall);
  const auto run_strided = [&call] {
    flashattn::ForwardTensors tensors = call.forward_tensors();
    for (TensorView* view : {&tensors.inputs.query, &tensors.out}) {
      view->data = static_cast<float*>(view->data) + 3 * view->stride[2];
      view->stride[2] = -view->stride[2];
    }
    tensors.inputs.key.stride[2] = 0;
    flashattn::forward(tensors, {.backend = "metal"});
  };
  metal().copy_stats(true);
  run_strided();
  // A kernel never goes below the address that is bound, so negative strides cost a copy.
  BOOST_TEST(metal().copy_stats(true).copied_bytes ==
             static_cast<std::uint64_t>(call.query.count() + call.out.count()) * 4);
  const Array in_place = call.out;
  call.out.fill(0.0F);
  flashattn_simulated_refuse_adoption(1);
  run_strided();
  flashattn_simulated_refuse_adoption(0);
  BOOST_TEST(largest_difference(in_place, call.out) == 0.0);

  // The same attention spelled with contiguous query, key and out: both key heads hold head 0, and
  // value's heads run backwards instead of query's and out's.
  Call plain(kSmall);
  for (std::int64_t row = 0; row < kSmall.batch * kSmall.seqlen_k; ++row) {
    for (std::int64_t d = 0; d < kSmall.head_dim; ++d) {
      plain.key.set((row * 2 + 1) * kSmall.head_dim + d,
                    plain.key.get(row * 2 * kSmall.head_dim + d));
    }
  }
  flashattn::ForwardTensors tensors = plain.forward_tensors();
  tensors.inputs.value.data =
      static_cast<float*>(tensors.inputs.value.data) + tensors.inputs.value.stride[2];
  tensors.inputs.value.stride[2] = -tensors.inputs.value.stride[2];
  flashattn::forward(tensors, {.backend = "metal"});
  BOOST_TEST(largest_difference(plain.out, in_place) == 0.0);
}

BOOST_AUTO_TEST_CASE(metal_arrays_are_used_in_place) {
  const flashattn::metal::AutoreleaseScope scope;
  const auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  Call expected(kSmall);
  run(&expected, "metal", false);
  Call call(kSmall);
  flashattn::ForwardTensors tensors = call.forward_tensors();
  std::vector<NS::SharedPtr<MTL::Buffer>> kept;
  constexpr std::int64_t kOffset = 256;
  for (TensorView* view : {&tensors.inputs.query, &tensors.inputs.key, &tensors.inputs.value,
                           &tensors.out, &tensors.lse}) {
    const std::size_t bytes = 4096 * 16;
    kept.push_back(NS::TransferPtr(device->newBuffer(bytes, MTL::ResourceStorageModeShared)));
    std::size_t count = 4;
    for (int axis = 0; axis < view->rank; ++axis)
      count *= static_cast<std::size_t>(view->shape[static_cast<std::size_t>(axis)]);
    BOOST_REQUIRE(count + kOffset <= bytes);
    std::memcpy(static_cast<char*>(kept.back()->contents()) + kOffset, view->data, count);
    view->device = flashattn::DeviceKind::kMetal;
    view->handle = kept.back().get();
    view->byte_offset = kOffset;
    view->data = nullptr;
  }
  flashattn::forward(tensors, {.causal = flashattn::Causal::kBottomRight, .backend = "metal"});
  const char* out = static_cast<const char*>(kept[3]->contents()) + kOffset;
  BOOST_TEST(std::memcmp(out, expected.out.view().data,
                         static_cast<std::size_t>(expected.out.count()) * 4) == 0);
}

BOOST_AUTO_TEST_CASE(live_objects_return_to_the_start) {
  Call warm(kSmall);
  run(&warm, "metal", true);  // pipelines and pooled buffers stay
  const LiveObjectCheck live;
  for (int i = 0; i < 3; ++i) {
    Call call(kSmall);
    run(&call, "metal", true);
  }
}

BOOST_AUTO_TEST_CASE(a_failed_command_buffer_names_the_driver_s_text_and_the_kernel) {
  Call call(kSmall);
  run(&call, "metal", false);
  const LiveObjectCheck live;
  flashattn_simulated_fail_next("the planted fault");
  try {
    run(&call, "metal", false);
    BOOST_ERROR("the call must fail");
  } catch (const flashattn::DeviceError& error) {
    const std::string text = error.what();
    BOOST_TEST(contains(text, "the planted fault"), text);
    BOOST_TEST(contains(text, "forward_float32_d16_v16"), text);
  }
  run(&call, "metal", false);  // the next call works
}

// Runs a backward call that has to fail, undoes what made it fail, and wants the next call to work.
std::string text_of_failure(Call* call, void (*refuse)(int)) {
  std::string text = "nothing was thrown";
  refuse(1);
  {
    const LiveObjectCheck live;
    try {
      run(call, "metal", true);
    } catch (const flashattn::DeviceError& error) {
      text = error.what();
    }
  }
  refuse(0);
  run(call, "metal", true);
  return text;
}

BOOST_AUTO_TEST_CASE(a_shortage_is_an_error_with_its_size_and_the_next_call_works) {
  const ScopedVariable staged("FLASHATTN_METAL_KERNELS", "staged");
  Call expected(kSmall);
  run(&expected, "metal", true);
  Call call(kSmall);
  run(&call, "metal", true);
  // Whatever the pool holds is too small for this one's scratch memory. Its pipelines are there:
  // those of the staged kernels do not depend on lengths.
  Call large({.seqlen_q = 5000, .seqlen_k = 3, .head_dim = 1, .value_dim = 1});
  const std::string allocation = text_of_failure(&large, flashattn_simulated_refuse_allocation);
  BOOST_TEST(contains(allocation, "metal: a buffer of "), allocation);
  BOOST_TEST(contains(allocation, " bytes cannot be allocated"), allocation);
  const std::string commands = text_of_failure(&call, flashattn_simulated_refuse_command_buffers);
  BOOST_TEST(contains(commands, "the device gives no command buffer"), commands);
  BOOST_TEST(largest_difference(call.dk, expected.dk) == 0.0);
}

// Metal objects do not survive a fork; the child must say so, and the parent must not notice.
BOOST_AUTO_TEST_CASE(a_forked_child_is_refused_with_the_reason) {
  Call call(kSmall);
  run(&call, "metal", false);
  const pid_t child = fork();
  if (child == 0) {
    try {
      run(&call, "metal", false);
    } catch (const flashattn::Unsupported& error) {
      _exit(contains(error.what(), "this process was forked from one that uses the GPU") ? 0 : 2);
    }
    _exit(1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  BOOST_TEST(status == 0);
  run(&call, "metal", false);
}

BOOST_AUTO_TEST_CASE(many_threads_get_the_bits_of_one) {
  Call expected(kSmall);
  run(&expected, "metal", true);
  std::vector<Call> calls;
  for (int i = 0; i < 8; ++i) calls.emplace_back(kSmall);
  const auto run_all = [&calls] {
    std::vector<std::thread> threads;
    for (Call& call : calls) threads.emplace_back([&call] { run(&call, "metal", true); });
    for (std::thread& thread : threads) thread.join();
  };
  run_all();
  for (const Call& call : calls) {
    BOOST_TEST(largest_difference(call.out, expected.out) == 0.0);
    BOOST_TEST(largest_difference(call.dk, expected.dk) == 0.0);
  }
  // Pooled buffers are all that may be left: as many as were ever in use at the same time.
  const long buffers = flashattn_simulated_live_instances("MTLBuffer");
  BOOST_TEST(buffers <= 8 * 2 * 2);
  BOOST_TEST(flashattn_simulated_live_instances("NSString") <= 1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
