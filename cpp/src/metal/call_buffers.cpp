// Adopting, staging and copying back; see call_buffers.h.
#include "metal/call_buffers.h"

#include <cstring>
#include <string>

#include "core/pending.h"
#include "flashattn/error.h"
#include "metal/strided_copy.h"

namespace flashattn::metal {

namespace {

constexpr std::uintptr_t kPageSize = 16384;  // of Apple silicon

}  // namespace

// Metal takes whole pages only. The pages may hold other data around the tensor; the kernels touch
// none of it.
bool CallBuffers::adopt(const TensorView& view, BoundTensor* bound) {
  bound->view = view;
  if (byte_count(view) == 0) return false;          // nothing to adopt, but the slot needs a buffer
  if (view.dtype == DType::kFloat64) return false;  // no kernel knows it
  const ByteRange range = touched_bytes(view);
  if (range.before != 0) return false;  // a kernel never goes below the address that is bound
  if (view.device == DeviceKind::kMetal) {
    bound->where = {.buffer = static_cast<MTL::Buffer*>(view.handle),
                    .offset = static_cast<std::uint64_t>(view.byte_offset)};
    return true;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % item_size(view.dtype) != 0) return false;
  const std::uintptr_t first = address / kPageSize * kPageSize;
  const std::uintptr_t last = (address + range.after + kPageSize - 1) / kPageSize * kPageSize;
  if (last - first > from_.max_length) return false;
  auto buffer = NS::TransferPtr(from_.device->newBuffer(
      reinterpret_cast<void*>(first), last - first, MTL::ResourceStorageModeShared, nullptr));
  if (!buffer) return false;
  bound->where = {.buffer = buffer.get(), .offset = address - first};
  adopted_.push_back(std::move(buffer));
  return true;
}

BoundTensor CallBuffers::stage(TensorView view) {
  if (view.dtype == DType::kFloat64) view.dtype = DType::kFloat32;
  BufferPool::Lease lease = from_.pool->take(byte_count(view));
  BoundTensor bound{.where = {.buffer = lease.get(), .offset = 0},
                    .view = contiguous_like(view, lease.contents())};
  leases_.push_back(std::move(lease));
  return bound;
}

BoundTensor CallBuffers::input(const TensorView& view) {
  BoundTensor bound;
  if (adopt(view, &bound)) {
    // What the binding had to copy before it came here was not taken as it is.
    (view.copied ? from_.counters->copied_bytes : from_.counters->adopted_bytes) +=
        byte_count(view);
    return bound;
  }
  bound = stage(view);
  const bool narrowed = view.dtype != bound.view.dtype;
  settle_before_reading(view);
  (narrowed ? copy_narrowed : strided_copy)(bound.view, host_view(view));
  from_.counters->copied_bytes += byte_count(view);
  return bound;
}

BoundTensor CallBuffers::output(const TensorView& view) {
  BoundTensor bound;
  if (adopt(view, &bound)) {
    from_.counters->adopted_bytes += byte_count(view);
    return bound;
  }
  bound = stage(view);
  staged_outputs_.push_back({.destination = view, .source = bound.view});
  return bound;
}

BoundBuffer CallBuffers::scratch(std::size_t bytes) {
  leases_.push_back(from_.pool->take(bytes));
  const BufferPool::Lease& made = leases_.back();
  return {.buffer = made.get(), .offset = 0, .contents = made.contents()};
}

BoundBuffer CallBuffers::table(const void* source, std::size_t bytes) {
  const BoundBuffer made = scratch(bytes);
  std::memcpy(made.contents, source, bytes);
  return made;
}

void CallBuffers::finish() {
  for (const StagedOutput& staged : staged_outputs_) {
    const bool widened = staged.destination.dtype != staged.source.dtype;
    (widened ? copy_widened : strided_copy)(host_view(staged.destination), staged.source);
    from_.counters->copied_bytes += byte_count(staged.source);
  }
  staged_outputs_.clear();
}

void CallBuffers::clear() {
  staged_outputs_.clear();
  leases_.clear();
  adopted_.clear();
}

bool host_sees(const TensorView& view) {
  return view.device == DeviceKind::kCpu ||
         static_cast<MTL::Buffer*>(view.handle)->contents() != nullptr;
}

TensorView host_view(const TensorView& view) {
  if (!view || view.device == DeviceKind::kCpu) return view;
  if (byte_count(view) != 0 && !host_sees(view)) {
    throw Unsupported(
        "metal: an array of " + std::to_string(byte_count(view)) +
        " bytes, which the host has to touch in this call, must be in shared memory and not in "
        "private memory of the GPU");
  }
  TensorView host = view;
  host.data = static_cast<std::byte*>(static_cast<MTL::Buffer*>(view.handle)->contents()) +
              view.byte_offset;
  host.device = DeviceKind::kCpu;
  return host;
}

}  // namespace flashattn::metal
