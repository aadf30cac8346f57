// Buffers without kernels: the pool's reuse and limit, and copies of strided views.
#include <array>
#include <vector>

#include "metal/buffer_pool.h"
#include "metal/device.h"
#include "metal/strided_copy.h"
#include "support.h"

namespace {

using flashattn::DType;
using flashattn::TensorView;
using flashattn::metal::AutoreleaseScope;
using flashattn::metal::BufferPool;
using flashattn::metal::choose_device;
using flashattn::testing::LiveObjectCheck;

BOOST_AUTO_TEST_SUITE(metal_buffers)

BOOST_AUTO_TEST_CASE(the_pool_reuses_what_fits_and_keeps_to_its_limit) {
  const AutoreleaseScope scope;
  const auto device = choose_device();
  const LiveObjectCheck live;
  constexpr std::size_t kPage = 16384;
  BufferPool pool(device.get(), 4 * kPage);
  const MTL::Buffer* first = pool.take(kPage).get();
  BOOST_TEST(pool.idle_bytes() == kPage);
  {
    const BufferPool::Lease again = pool.take(100);
    BOOST_TEST((again.get() == first));
    BOOST_TEST(pool.idle_bytes() == 0U);
    const BufferPool::Lease other = pool.take(100);
    BOOST_TEST((other.get() != first));
  }
  BOOST_TEST(pool.idle_bytes() == 2 * kPage);
  pool.take(3 * kPage);
  BOOST_TEST(pool.idle_bytes() == 4 * kPage);  // the oldest one page went
  pool.take(5 * kPage);
  BOOST_TEST(pool.idle_bytes() == 0U);  // too large to keep, and it pushed the others out
}

BOOST_AUTO_TEST_CASE(touched_bytes_follow_the_signs_of_the_strides) {
  const TensorView view{.dtype = DType::kFloat16, .rank = 2, .shape = {3, 4}, .stride = {-10, 2}};
  const auto range = flashattn::metal::touched_bytes(view);
  BOOST_TEST(range.before == 40U);
  BOOST_TEST(range.after == 14U);
}

BOOST_AUTO_TEST_CASE(a_strided_copy_is_element_by_element) {
  std::array<float, 24> source{};
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i);
  std::array<float, 6> destination{};
  // Rows 2, 1, 0 of a 3 x 8 array, every fourth column.
  const TensorView from{.data = &source[16], .rank = 2, .shape = {3, 2}, .stride = {-8, 4}};
  const TensorView to = flashattn::metal::contiguous_like(from, destination.data());
  flashattn::metal::strided_copy(to, from);
  const std::array<float, 6> expected{16, 20, 8, 12, 0, 4};
  BOOST_TEST(destination == expected, boost::test_tools::per_element());
  flashattn::metal::strided_zero(from);
  BOOST_TEST(source[16] == 0.0F);
  BOOST_TEST(source[4] == 0.0F);
  BOOST_TEST(source[5] == 5.0F);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
