// Buffers: aligned, as large as asked for, reused, and not hoarded.
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/scratch.h"

namespace {

using namespace flashattn::cpu;

bool aligned(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kScratchAlignment == 0;
}

BOOST_AUTO_TEST_SUITE(scratch)

BOOST_AUTO_TEST_CASE(thread_scratch_is_aligned_and_large_enough) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4096},
                                  std::size_t{100000}, std::size_t{5} << 20}) {
    std::byte* data = thread_scratch(bytes);
    BOOST_TEST(aligned(data));
    if (bytes != 0) std::memset(data, 1, bytes);
  }
}

BOOST_AUTO_TEST_CASE(thread_scratch_stays_and_belongs_to_its_thread) {
  std::byte* mine = thread_scratch(1 << 16);
  BOOST_TEST(thread_scratch(1 << 12) == mine);
  std::byte* others = nullptr;
  std::thread([&] { others = thread_scratch(1 << 16); }).join();
  BOOST_TEST(thread_scratch(1 << 16) == mine);
  BOOST_TEST(others != mine);
}

BOOST_AUTO_TEST_CASE(trimming_keeps_what_is_small) {
  std::byte* small = thread_scratch(1 << 16);
  std::memset(small, 7, 1 << 16);
  trim_thread_scratch();
  BOOST_TEST(thread_scratch(1 << 16) == small);
  thread_scratch(kKeptThreadBytes + 1);
  BOOST_TEST(thread_scratch_bytes() > kKeptThreadBytes);
  trim_thread_scratch();
  BOOST_TEST(thread_scratch_bytes() == 0U);
  std::memset(thread_scratch(1 << 16), 7, 1 << 16);
}

BOOST_AUTO_TEST_CASE(a_workspace_is_reused) {
  std::byte* first = nullptr;
  {
    const Workspace workspace(1 << 20);
    first = workspace.data();
    BOOST_TEST(aligned(first));
    BOOST_TEST(workspace.bytes() >= std::size_t{1 << 20});
    std::memset(first, 1, workspace.bytes());
  }
  const Workspace again(1 << 20);
  BOOST_TEST(again.data() == first);
  const Workspace meanwhile(1 << 20);
  BOOST_TEST(meanwhile.data() != first);
}

BOOST_AUTO_TEST_CASE(threads_never_share_a_workspace) {
  std::atomic<bool> intact{true};
  std::vector<std::thread> threads;
  for (int t = 1; t <= 6; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 300; ++round) {
        const auto bytes = static_cast<std::size_t>(t * 1000 + round * 10);
        const Workspace workspace(bytes);
        std::memset(workspace.data(), t, bytes);
        for (std::size_t i = 0; i < bytes; ++i) {
          if (workspace.data()[i] != static_cast<std::byte>(t)) intact = false;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(intact.load());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
