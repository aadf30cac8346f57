// parallel_for: every index once, whoever calls and from wherever; failures reach the caller; a
// child process works; helpers compute as the caller would.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"
#include "flashattn/error.h"

#if defined(__SANITIZE_THREAD__) || defined(FLASHATTN_TESTS_EMULATED)
// In a child of a process with threads, ThreadSanitizer ends on purpose, and qemu cannot start a
// thread.
constexpr bool kForkWorks = false;
#else
constexpr bool kForkWorks = true;
#endif

namespace {

using flashattn::cpu::ThreadPool;

BOOST_AUTO_TEST_SUITE(thread_pool)

BOOST_AUTO_TEST_CASE(every_index_is_done_once) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
      for (const auto& n : calls) BOOST_TEST(n.load() == 1);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_thread_takes_indices_in_ascending_order) {
  ThreadPool pool(4);
  std::atomic<bool> ascending{true};
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> serial{round};
    pool.parallel_for(200, [&](std::int64_t i) {
      thread_local std::int64_t last = -1;
      thread_local int last_round = -1;
      if (last_round == serial.load() && i <= last) ascending = false;
      last = i;
      last_round = serial.load();
    });
  }
  BOOST_TEST(ascending.load());
}

BOOST_AUTO_TEST_CASE(helpers_take_part) {
  ThreadPool pool(2);
  // Each of the two bodies waits for the other: only two threads can finish the loop.
  std::atomic<int> arrived{0};
  pool.parallel_for(2, [&](std::int64_t) {
    ++arrived;
    while (arrived.load() < 2) std::this_thread::yield();
  });
  BOOST_TEST(arrived.load() == 2);
}

BOOST_AUTO_TEST_CASE(many_threads_may_call_at_once) {
  ThreadPool pool(3);
  std::atomic<std::int64_t> total{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        pool.parallel_for(20, [&](std::int64_t i) { total += i; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  BOOST_TEST(total.load() == 6 * 200 * 190);
}

BOOST_AUTO_TEST_CASE(a_loop_does_not_wait_for_helpers_that_are_busy_elsewhere) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  std::atomic<bool> release{false};
  // Occupies the pool's only helper, and its own caller.
  std::thread other([&] {
    pool.parallel_for(2, [&](std::int64_t) {
      ++inside;
      while (!release.load()) std::this_thread::yield();
    });
  });
  while (inside.load() < 2) std::this_thread::yield();
  int done = 0;
  pool.parallel_for(10, [&](std::int64_t) { ++done; });
  BOOST_TEST(done == 10);
  release = true;
  other.join();
}

BOOST_AUTO_TEST_CASE(a_nested_loop_runs_inline) {
  ThreadPool pool(3);
  std::atomic<int> inner{0};
  std::atomic<bool> same_thread{true};
  pool.parallel_for(5, [&](std::int64_t) {
    const auto outer_thread = std::this_thread::get_id();
    pool.parallel_for(7, [&](std::int64_t) {
      ++inner;
      if (std::this_thread::get_id() != outer_thread) same_thread = false;
    });
  });
  BOOST_TEST(inner.load() == 35);
  BOOST_TEST(same_thread.load());
}

BOOST_AUTO_TEST_CASE(an_exception_reaches_the_caller_and_ends_the_loop) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (std::int64_t bad = 0; bad < 20; ++bad) {
      std::atomic<bool> thrown{false};
      std::atomic<int> after{0};
      const auto body = [&](std::int64_t i) {
        if (i == bad) {
          thrown = true;
          throw std::runtime_error("index " + std::to_string(i));
        }
        if (i < bad) return;
        while (!thrown.load()) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        ++after;
      };
      BOOST_CHECK_EXCEPTION(pool.parallel_for(1000000, body), std::runtime_error,
                            [&](const std::runtime_error& error) {
                              return error.what() == "index " + std::to_string(bad);
                            });
      // Other threads may claim some more before they hear of it, but nothing like the whole loop.
      BOOST_TEST(after.load() < 100000);
    }
    int calls = 0;
    pool.parallel_for(1, [&](std::int64_t) { ++calls; });
    BOOST_TEST(calls == 1);
  }
}

BOOST_AUTO_TEST_CASE(the_number_of_threads_can_change) {
  ThreadPool pool(1);
  std::atomic<int> sum{0};
  for (const int threads : {1, 5, 2, 3, 1}) {
    pool.set_threads(threads);
    BOOST_TEST(pool.threads() == threads);
    std::atomic<int> at_once{0};
    std::atomic<int> most{0};
    pool.parallel_for(64, [&](std::int64_t) {
      const int now = ++at_once;
      int seen = most.load();
      while (seen < now && !most.compare_exchange_weak(seen, now)) {
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      --at_once;
      ++sum;
    });
    BOOST_TEST(most.load() <= threads);
  }
  BOOST_TEST(sum.load() == 5 * 64);
}

BOOST_AUTO_TEST_CASE(numbers_of_threads_are_checked) {
  const int before = flashattn::cpu::get_num_threads();
  for (const int wrong : {0, -1, flashattn::cpu::kMaxThreads + 1}) {
    BOOST_CHECK_THROW(flashattn::cpu::set_num_threads(wrong), flashattn::InvalidArgument);
  }
  BOOST_TEST(flashattn::cpu::get_num_threads() == before);
  flashattn::cpu::set_num_threads(3);
  BOOST_TEST(flashattn::cpu::get_num_threads() == 3);
  BOOST_TEST(ThreadPool::global().threads() == 3);
  flashattn::cpu::set_num_threads(before);
}

BOOST_AUTO_TEST_CASE(a_forked_child_gets_a_pool_of_its_own, *boost::unit_test::timeout(60)) {
  if (!kForkWorks) return;
  flashattn::cpu::set_num_threads(2);
  // The parent's helper exists by now, and does not in the child.
  std::atomic<int> arrived{0};
  const auto meet = [&](std::int64_t) {
    ++arrived;
    while (arrived.load() % 2 != 0) std::this_thread::yield();
  };
  ThreadPool::global().parallel_for(2, meet);
  const pid_t child = fork();
  BOOST_REQUIRE(child >= 0);
  if (child == 0) {
    alarm(20);
    ThreadPool::global().parallel_for(2, meet);
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      alarm(20);
      ThreadPool::global().parallel_for(2, meet);
      _exit(arrived.load() == 6 ? 0 : 1);
    }
    int status = -1;
    waitpid(grandchild, &status, 0);
    _exit(status == 0 && arrived.load() == 4 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  BOOST_TEST(status == 0);
  ThreadPool::global().parallel_for(2, meet);
  BOOST_TEST(arrived.load() == 4);
}

#if defined(__x86_64__)
BOOST_AUTO_TEST_CASE(helpers_compute_under_the_callers_rounding_and_denormal_mode) {
  constexpr unsigned kFlushToZero = 0x8000;
  ThreadPool pool(2);
  const unsigned mode = __builtin_ia32_stmxcsr();
  const auto modes_seen = [&] {
    std::vector<unsigned> seen(2);
    std::atomic<int> arrived{0};
    pool.parallel_for(2, [&](std::int64_t i) {
      seen[static_cast<std::size_t>(i)] = __builtin_ia32_stmxcsr() & kFlushToZero;
      ++arrived;
      while (arrived.load() < 2) std::this_thread::yield();
    });
    return seen;
  };
  BOOST_TEST(modes_seen() == (std::vector<unsigned>{0, 0}), boost::test_tools::per_element());
  __builtin_ia32_ldmxcsr(mode | kFlushToZero);
  const std::vector<unsigned> flushing = modes_seen();
  __builtin_ia32_ldmxcsr(mode);
  BOOST_TEST(flushing == (std::vector<unsigned>{kFlushToZero, kFlushToZero}),
             boost::test_tools::per_element());
  BOOST_TEST(modes_seen() == (std::vector<unsigned>{0, 0}), boost::test_tools::per_element());
}
#endif

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
