// A list with room for a fixed number of items: what a call makes anew every time, and takes no
// memory for. Plain C++20.
#pragma once

#include <array>
#include <cassert>
#include <cstddef>
#include <initializer_list>

namespace flashattn::metal {

template <typename Item, std::size_t capacity>
class FixedVector {
 public:
  FixedVector() = default;
  FixedVector(std::initializer_list<Item> items) {
    for (const Item& item : items) push_back(item);
  }

  // The caller knows that there is room.
  void push_back(const Item& item) {
    assert(size_ < capacity);
    items_[size_++] = item;
  }

  const Item* begin() const { return items_.data(); }
  const Item* end() const { return items_.data() + size_; }
  Item* begin() { return items_.data(); }
  Item* end() { return items_.data() + size_; }
  const Item& operator[](std::size_t i) const { return items_[i]; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  std::array<Item, capacity> items_{};
  std::size_t size_ = 0;
};

}  // namespace flashattn::metal
