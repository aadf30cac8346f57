// The blocks runtime: what clang's -fblocks code calls. Stack blocks are copied to the heap with a
// count; global blocks are never copied. Layout and flag bits are those of the published Block ABI.
// Objects captured by a block are not retained, which no caller here relies on.
#include "objc/blocks.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int kCountStep = 2;  // the count lives in bits 1..15
constexpr int kCountMask = 0xfffe;
constexpr int kNeedsFree = 1 << 24;
constexpr int kHasCopyDispose = 1 << 25;
constexpr int kIsGlobal = 1 << 28;
constexpr int kFieldIsBlock = 7;
constexpr int kFieldIsByref = 8;

struct BlockDescriptor {
  unsigned long reserved;
  unsigned long size;
  void (*copy)(void* destination, const void* source);
  void (*dispose)(const void* block);
};

struct Block {
  void* isa;
  int flags;
  int reserved;
  void* invoke;
  BlockDescriptor* descriptor;
};

struct Byref {
  void* isa;
  Byref* forwarding;
  int flags;
  unsigned size;
  void (*keep)(Byref* destination, Byref* source);
  void (*destroy)(Byref* byref);
};

int count_down(int* flags) {
  return __atomic_sub_fetch(flags, kCountStep, __ATOMIC_ACQ_REL) & kCountMask;
}
void count_up(int* flags) { __atomic_fetch_add(flags, kCountStep, __ATOMIC_RELAXED); }

Byref* copy_byref(Byref* source) {
  Byref* target = source->forwarding;
  if ((target->flags & kNeedsFree) != 0) {
    count_up(&target->flags);
    return target;
  }
  auto* copy = static_cast<Byref*>(std::malloc(source->size));
  std::memcpy(copy, source, source->size);
  copy->flags =
      (source->flags & ~0xffff) | kNeedsFree | 2 * kCountStep;  // the stack's and the block's
  copy->forwarding = copy;
  source->forwarding = copy;
  if ((source->flags & kHasCopyDispose) != 0) source->keep(copy, source);
  return copy;
}

void release_byref(Byref* byref) {
  Byref* target = byref->forwarding;
  if ((target->flags & kNeedsFree) == 0) return;
  if (count_down(&target->flags) != 0) return;
  if ((target->flags & kHasCopyDispose) != 0) target->destroy(target);
  std::free(target);
}

}  // namespace

extern "C" {

void* _NSConcreteStackBlock[32];
void* _NSConcreteGlobalBlock[32];
static void* heap_block_class[32];

void* _Block_copy(const void* argument) {
  auto* block = static_cast<Block*>(const_cast<void*>(argument));
  if (block == nullptr || (block->flags & kIsGlobal) != 0) return block;
  if ((block->flags & kNeedsFree) != 0) {
    count_up(&block->flags);
    return block;
  }
  auto* copy = static_cast<Block*>(std::malloc(block->descriptor->size));
  std::memcpy(copy, block, block->descriptor->size);
  copy->isa = heap_block_class;
  copy->flags = (copy->flags & ~0xffff) | kNeedsFree | kCountStep;
  if ((copy->flags & kHasCopyDispose) != 0) copy->descriptor->copy(copy, block);
  return copy;
}

void _Block_release(const void* argument) {
  auto* block = static_cast<Block*>(const_cast<void*>(argument));
  if (block == nullptr || (block->flags & kNeedsFree) == 0) return;
  if (count_down(&block->flags) != 0) return;
  if ((block->flags & kHasCopyDispose) != 0) block->descriptor->dispose(block);
  std::free(block);
}

void _Block_object_assign(void* destination, const void* object, int flags) {
  void* value = const_cast<void*>(object);
  if ((flags & kFieldIsByref) != 0) {
    value = copy_byref(static_cast<Byref*>(value));
  } else if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    value = _Block_copy(value);
  }
  *static_cast<void**>(destination) = value;
}

void _Block_object_dispose(const void* object, int flags) {
  if ((flags & kFieldIsByref) != 0) {
    release_byref(static_cast<Byref*>(const_cast<void*>(object)));
  } else if ((flags & kFieldIsBlock) == kFieldIsBlock) {
    _Block_release(object);
  }
}

}  // extern "C"
