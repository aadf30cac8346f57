// What Metal's validation layer refuses aborts here too, and says why: each mistake in a child
// process.
#include <Metal/Metal.hpp>
#include <functional>

#include "support.h"

namespace {

using flashattn::metal::AutoreleaseScope;
using flashattn::metal::to_ns;
using flashattn::testing::Axpy;
using flashattn::testing::contains;
using flashattn::testing::text_of_abort;

// An encoder over kAxpy with everything bound.
struct Encoding {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  Axpy axpy{device.get()};
  NS::SharedPtr<MTL::CommandQueue> queue = NS::TransferPtr(device->newCommandQueue());
  NS::SharedPtr<MTL::Buffer> buffer =
      NS::TransferPtr(device->newBuffer(4096, MTL::ResourceStorageModeShared));
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();

  Encoding() {
    const float a = 1.0F;
    encoder->setComputePipelineState(axpy.pipeline.get());
    encoder->setBuffer(buffer.get(), 0, 0);
    encoder->setBuffer(buffer.get(), 2048, 1);
    encoder->setBytes(&a, sizeof a, 2);
    encoder->setThreadgroupMemoryLength(512, 0);
  }
  ~Encoding() {
    if (!ended_) end();
  }
  void end() {
    encoder->endEncoding();
    ended_ = true;
  }
  void dispatch(NS::UInteger threads = 32) {
    encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), MTL::Size(threads, 1, 1));
  }

 private:
  bool ended_ = false;
};

void expect_abort(const std::function<void(Encoding&)>& mistake, const std::string& message) {
  Encoding encoding;
  const std::string text = text_of_abort([&] { mistake(encoding); });
  BOOST_TEST(contains(text, message), text);
}

BOOST_AUTO_TEST_SUITE(metal_validation)

BOOST_AUTO_TEST_CASE(no_mistake_no_abort) {
  Encoding encoding;
  encoding.dispatch();
  encoding.end();
  encoding.commands->commit();
  encoding.commands->waitUntilCompleted();
  BOOST_TEST(encoding.commands->status() == MTL::CommandBufferStatusCompleted);
}

BOOST_AUTO_TEST_CASE(unknown_selector) {
  expect_abort([](Encoding& e) { e.device->newSharedEvent(); },
               "-[MTLDevice newSharedEvent]: not implemented");
  expect_abort([](Encoding&) { MTL::HeapDescriptor::alloc(); },
               "+[MTLHeapDescriptor alloc]: not implemented");
}

BOOST_AUTO_TEST_CASE(unset_buffer) {
  expect_abort(
      [](Encoding& e) {
        e.encoder->setBuffer(nullptr, 0, 1);
        e.dispatch();
      },
      "axpy: missing buffer binding at index 1 for y");
}

BOOST_AUTO_TEST_CASE(unset_threadgroup_memory) {
  expect_abort(
      [](Encoding& e) {
        e.encoder->setThreadgroupMemoryLength(0, 0);
        e.dispatch();
      },
      "missing threadgroup memory at index 0");
}

BOOST_AUTO_TEST_CASE(too_much_threadgroup_memory) {
  expect_abort(
      [](Encoding& e) {
        e.encoder->setThreadgroupMemoryLength(32784, 0);
        e.dispatch();
      },
      "threadgroup memory 32784 must not exceed 32768");
}

BOOST_AUTO_TEST_CASE(too_many_threads) {
  expect_abort([](Encoding& e) { e.dispatch(2048); },
               "2048 threads per threadgroup must be 1..1024");
}

BOOST_AUTO_TEST_CASE(empty_grid) {
  expect_abort(
      [](Encoding& e) { e.encoder->dispatchThreadgroups(MTL::Size(0, 1, 1), MTL::Size(32, 1, 1)); },
      "the grid must not be empty");
}

BOOST_AUTO_TEST_CASE(offsets) {
  expect_abort([](Encoding& e) { e.encoder->setBuffer(e.buffer.get(), 4096, 0); },
               "offset 4096 must be below the buffer's length 4096");
  expect_abort(
      [](Encoding& e) {
        e.encoder->setBuffer(e.buffer.get(), 2, 0);
        e.dispatch();
      },
      "offset 2 of x must be a multiple of 4");
}

BOOST_AUTO_TEST_CASE(set_bytes) {
  static const char bytes[5000] = {};
  expect_abort([](Encoding& e) { e.encoder->setBytes(bytes, sizeof bytes, 2); },
               "setBytes: length 5000 must be 1..4096");
  expect_abort(
      [](Encoding& e) {
        e.encoder->setBytes(bytes, 256, 1);
        e.dispatch();
      },
      "setBytes is bound to y, which the kernel may write");
}

BOOST_AUTO_TEST_CASE(encoders) {
  expect_abort([](Encoding& e) { e.commands->commit(); }, "has not ended encoding");
  expect_abort([](Encoding& e) { e.commands->computeCommandEncoder(); },
               "previous encoder has not ended");
  expect_abort(
      [](Encoding& e) {
        e.end();
        e.dispatch();
      },
      "the encoder has ended encoding");
  expect_abort(
      [](Encoding& e) {
        const AutoreleaseScope inner;
        MTL::CommandBuffer* other = e.queue->commandBuffer();
        other->computeCommandEncoder();
      },
      "released without endEncoding");
}

BOOST_AUTO_TEST_CASE(command_buffers) {
  expect_abort([](Encoding& e) { e.commands->waitUntilCompleted(); }, "would wait forever");
  expect_abort(
      [](Encoding& e) {
        e.end();
        e.commands->commit();
        e.commands->commit();
      },
      "committed already");
}

BOOST_AUTO_TEST_CASE(references) {
  expect_abort(
      [](Encoding&) {
        const AutoreleaseScope inner;
        to_ns("once too often")->release();
      },
      "which was released once too often");
  expect_abort(
      [](Encoding& e) {
        MTL::Buffer* buffer = e.device->newBuffer(16, MTL::ResourceStorageModeShared);
        buffer->release();
        buffer->length();
      },
      "length]: message to a freed object");
}

BOOST_AUTO_TEST_CASE(autorelease_without_a_pool) {
  const std::string text =
      text_of_abort([] { NS::String::string("leaks", NS::UTF8StringEncoding); });
  BOOST_TEST(contains(text, "NSString"), text);
  BOOST_TEST(contains(text, "no pool in place"), text);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
