// Ordinary metal-cpp host code against the simulated device: messages, struct returns, blocks,
// errors, and one kernel from source to result.
#include <objc/message.h>

#include <Metal/Metal.hpp>
#include <cstdlib>
#include <vector>

#include "support.h"

namespace {

using flashattn::metal::AutoreleaseScope;
using flashattn::metal::to_ns;
using flashattn::metal::to_std;
using flashattn::testing::Axpy;
using flashattn::testing::contains;
using flashattn::testing::LiveObjectCheck;

struct Device {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
};

BOOST_FIXTURE_TEST_SUITE(metal_dispatch, Device)

BOOST_AUTO_TEST_CASE(a_message_to_nil_returns_zero) {
  // Straight through objc_msgSend: a C++ member call on a null pointer would be undefined.
  const auto send = reinterpret_cast<NS::UInteger (*)(void*, SEL)>(&objc_msgSend);
  BOOST_TEST(send(nullptr, sel_registerName("length")) == 0U);
  const auto send_double = reinterpret_cast<double (*)(void*, SEL)>(&objc_msgSend);
  BOOST_TEST(send_double(nullptr, sel_registerName("GPUStartTime")) == 0.0);
}

BOOST_AUTO_TEST_CASE(structs_come_back_whole) {
  const MTL::Size threads = device->maxThreadsPerThreadgroup();
  BOOST_TEST(threads.width == 1024U);
  BOOST_TEST(threads.depth == 1024U);
  BOOST_TEST(NS::ProcessInfo::processInfo()->operatingSystemVersion().majorVersion == 14);
}

BOOST_AUTO_TEST_CASE(a_kernel_runs_from_source_to_result) {
  const LiveObjectCheck live;
  const AutoreleaseScope inner;
  const Axpy axpy(device.get());
  const auto queue = NS::TransferPtr(device->newCommandQueue());
  const std::size_t bytes = 64 * sizeof(float);
  const auto x = NS::TransferPtr(device->newBuffer(bytes, MTL::ResourceStorageModeShared));
  const auto y = NS::TransferPtr(device->newBuffer(bytes, MTL::ResourceStorageModeShared));
  for (int i = 0; i < 64; ++i) static_cast<float*>(x->contents())[i] = static_cast<float>(i);

  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  const float a = 10.0F;
  encoder->setComputePipelineState(axpy.pipeline.get());
  encoder->setBuffer(x.get(), 0, 0);
  encoder->setBuffer(y.get(), 0, 1);
  encoder->setBytes(&a, sizeof a, 2);
  encoder->setThreadgroupMemoryLength(32 * sizeof(float), 0);
  encoder->dispatchThreadgroups(MTL::Size(2, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  int handlers = 0;
  int* counted = &handlers;
  commands->addCompletedHandler([counted](MTL::CommandBuffer*) { ++*counted; });
  commands->commit();
  commands->waitUntilCompleted();

  BOOST_TEST(commands->status() == MTL::CommandBufferStatusCompleted);
  BOOST_TEST((commands->error() == nullptr));
  BOOST_TEST(handlers == 1);
  BOOST_TEST(static_cast<float*>(y->contents())[4] == 10.0F * 5.0F + 2.0F);
  BOOST_TEST(static_cast<float*>(y->contents())[63] == 10.0F * 62.0F + 2.0F);
}

BOOST_AUTO_TEST_CASE(a_source_that_does_not_compile_is_an_error_with_its_line) {
  const LiveObjectCheck live;
  const AutoreleaseScope inner;
  NS::Error* error = nullptr;
  const auto library =
      NS::TransferPtr(device->newLibrary(to_ns("#line 41 \"wrong.metal\"\n[[kernel]] void f(device "
                                               "float* x [[buffer(0)]]) { x[0] = missing; }\n"),
                                         nullptr, &error));
  BOOST_TEST(!library);
  BOOST_TEST(contains(to_std(error->localizedDescription()), "wrong.metal:41"));
  BOOST_TEST(contains(to_std(error->localizedDescription()), "missing"));
}

BOOST_AUTO_TEST_CASE(an_unknown_function_is_an_error) {
  NS::Error* error = nullptr;
  const auto library =
      NS::TransferPtr(device->newLibrary(to_ns(flashattn::testing::kAxpy), nullptr, &error));
  const auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  const auto function =
      NS::TransferPtr(library->newFunction(to_ns("nobody"), constants.get(), &error));
  BOOST_TEST(!function);
  BOOST_TEST(contains(to_std(error->localizedDescription()), "nobody"));
}

BOOST_AUTO_TEST_CASE(pages_are_adopted_and_the_deallocator_runs_once) {
  const LiveObjectCheck live;
  constexpr std::size_t kPage = 16384;
  void* pages = std::aligned_alloc(kPage, 2 * kPage);
  __block int calls = 0;
  {
    const auto buffer = NS::TransferPtr(device->newBuffer(
        pages, 2 * kPage, MTL::ResourceStorageModeShared, ^(void* pointer, NS::UInteger) {
          std::free(pointer);
          ++calls;
        }));
    BOOST_TEST(buffer->contents() == pages);
  }
  BOOST_TEST(calls == 1);
}

BOOST_AUTO_TEST_CASE(memory_that_is_not_whole_pages_is_not_adopted) {
  constexpr std::size_t kPage = 16384;
  std::vector<std::byte> memory(4 * kPage);
  const auto start = (reinterpret_cast<std::uintptr_t>(memory.data()) + kPage - 1) / kPage * kPage;
  const auto attempt = [&](std::uintptr_t at, std::size_t length) {
    return NS::TransferPtr(device->newBuffer(reinterpret_cast<void*>(at), length,
                                             MTL::ResourceStorageModeShared, nullptr));
  };
  BOOST_TEST(!attempt(start + 4096, kPage));
  BOOST_TEST(!attempt(start, kPage / 2));
  BOOST_TEST((attempt(start, kPage).get() != nullptr));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
