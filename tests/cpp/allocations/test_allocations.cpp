// Every request for memory that a call makes, failing one after the other: the call throws
// std::bad_alloc or does without, nothing is lost, and the next call works.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "allocations/failing_allocations.h"
#include "cpu/thread_pool.h"
#include "flashattn/attention.h"
#include "flashattn/dropout.h"
#include "flashattn/kv_cache.h"
#include "flashattn/merge.h"
#include "tensors.h"

namespace {

using flashattn::AttentionOptions;
using flashattn::Causal;
using flashattn::contiguous_view;
using flashattn::DType;
using flashattn::testing::Array;
using flashattn::testing::fail_request;
using flashattn::testing::is_waiting;
using flashattn::testing::live_blocks;
using flashattn::testing::Sizes;

constexpr Sizes kSizes{.seqlen_q = 150, .seqlen_k = 200, .head_dim = 16, .value_dim = 16};

// A call with everything that it needs; `run` is called again and again.
struct Problem {
  virtual ~Problem() = default;
  virtual void run() = 0;
  virtual const Array& result() const = 0;
};

// Forward and backward with every option.
struct Everything : Problem {
  flashattn::testing::Call call{kSizes};
  Array mask{DType::kFloat32, {1, 4, 150, 200}};
  Array dmask{DType::kFloat32, {1, 4, 150, 200}};
  Array slopes{DType::kFloat32, {4}};
  Array dslopes{DType::kFloat32, {4}};
  Array sinks{DType::kFloat32, {4}};
  Array dsinks{DType::kFloat32, {4}};

  Everything() {
    for (Array* x : {&mask, &slopes, &sinks}) x->fill_normal(9);
  }
  void add(flashattn::AttentionInputs& in) {
    in.mask = mask.view();
    in.alibi_slopes = slopes.view();
    in.sinks = sinks.view();
  }
  void run() override {
    const AttentionOptions options{.causal = Causal::kBottomRight,
                                   .softcap = 2.0F,
                                   .dropout = {.probability = 0.25, .seed = 3},
                                   .backend = "cpu"};
    auto forward = call.forward_tensors();
    add(forward.inputs);
    flashattn::forward(forward, options);
    auto backward = call.backward_tensors();
    add(backward.inputs);
    backward.dmask = dmask.view();
    backward.dalibi_slopes = dslopes.view();
    backward.dsinks = dsinks.view();
    flashattn::backward(backward, options);
  }
  const Array& result() const override { return call.dk; }
};

struct Plain : Problem {
  flashattn::testing::Call call;
  explicit Plain(const Sizes& sizes) : call(sizes) {}
  void run() override {
    const AttentionOptions options{.causal = Causal::kBottomRight, .backend = "cpu"};
    flashattn::forward(call.forward_tensors(), options);
    flashattn::backward(call.backward_tensors(), options);
  }
  const Array& result() const override { return call.dq; }
};

// A paged cache that is appended to, with rotary embeddings; then a merge and a dropout mask.
struct Cache : Problem {
  Array query{DType::kFloat32, {2, 1, 4, 16}};
  Array pages{DType::kFloat32, {64, 16, 2, 16}};
  Array values{DType::kFloat32, {64, 16, 2, 16}};
  Array added{DType::kFloat32, {2, 1, 2, 16}};
  Array cos{DType::kFloat32, {512, 8}};
  Array out{DType::kFloat32, {2, 1, 4, 16}};
  Array lse{DType::kFloat32, {2, 4, 1}};
  Array mask{DType::kFloat32, {2, 4, 3, 50}};
  std::vector<std::int32_t> lengths = {400, 7};
  std::vector<std::int64_t> table;

  Cache() {
    for (Array* x : {&query, &pages, &values, &added, &cos}) x->fill_normal(4);
    for (std::int64_t page = 0; page < 64; ++page) table.push_back(page);
  }
  void run() override {
    flashattn::KvCacheTensors tensors;
    tensors.call.inputs = {.query = query.view(), .key = pages.view(), .value = values.view()};
    tensors.call.inputs.kv_lengths = contiguous_view(lengths.data(), DType::kInt32, 2);
    tensors.call.inputs.block_table = contiguous_view(table.data(), DType::kInt64, 2, 32);
    tensors.call.out = out.view();
    tensors.call.lse = lse.view();
    tensors.new_key = added.view();
    tensors.new_value = added.view();
    tensors.rotary = {.cos = cos.view(), .sin = cos.view()};
    flashattn::attention_kvcache(tensors, {.causal = Causal::kBottomRight, .backend = "cpu"});
    flashattn::dropout_mask(mask.view(), {.probability = 0.5, .seed = 1});
    Array merged_lse(DType::kFloat32, {2, 4, 1});
    Array merged(DType::kFloat32, {2, 1, 4, 16});
    flashattn::merge_attention({.outs = {out.view(), out.view()},
                                .lses = {lse.view(), lse.view()},
                                .out = merged.view(),
                                .lse = merged_lse.view()});
  }
  const Array& result() const override { return out; }
};

bool same_bits(const std::vector<float>& before, const Array& array) {
  for (std::int64_t i = 0; i < array.count(); ++i) {
    const float now = array.get(i);
    if (std::memcmp(&now, &before[static_cast<std::size_t>(i)], sizeof(now)) != 0) return false;
  }
  return true;
}

std::vector<float> numbers(const Array& array) {
  std::vector<float> copy;
  for (std::int64_t i = 0; i < array.count(); ++i) copy.push_back(array.get(i));
  return copy;
}

bool interrupts_are_let_in() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, SIGINT) == 0;
}

// Runs the problem with request n failing. What the exit status of a cold run tells, too.
enum class Ending : std::uint8_t { kNeverAsked, kThrew, kDidWithout, kWrong };

Ending run_with_failure(Problem& problem, long n) {
  fail_request(n);
  bool threw = false;
  try {
    problem.run();
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  const bool never_asked = is_waiting();
  fail_request(0);
  if (!interrupts_are_let_in() || (threw && never_asked)) return Ending::kWrong;
  if (never_asked) return Ending::kNeverAsked;
  return threw ? Ending::kThrew : Ending::kDidWithout;
}

// Warm: nothing that is kept between calls is asked for, so every block has to come back.
void check_warm(Problem& problem) {
  for (int i = 0; i < 3; ++i) problem.run();
  const std::vector<float> expected = numbers(problem.result());
  for (long n = 1;; ++n) {
    const long before = live_blocks();
    const Ending ending = run_with_failure(problem, n);
    const long after = live_blocks();
    BOOST_TEST(after <= before, "request " << n << " leaves " << after - before << " blocks");
    BOOST_REQUIRE((ending != Ending::kWrong));
    problem.run();
    BOOST_TEST(same_bits(expected, problem.result()), "after request " << n);
    if (ending == Ending::kNeverAsked) return;
  }
}

// Cold: the first call of a process, which starts threads and makes what is kept. Returns how many
// requests made it throw.
long check_cold(const std::function<void(long)>& run_in_child) {
  long threw = 0;
  for (long n = 1;; ++n) {
    const pid_t child = fork();
    if (child == 0) run_in_child(n);
    int status = 0;
    BOOST_REQUIRE(waitpid(child, &status, 0) == child);
    BOOST_REQUIRE_MESSAGE(WIFEXITED(status), "request " << n << " ended the process");
    const auto ending = static_cast<Ending>(WEXITSTATUS(status));
    BOOST_REQUIRE_MESSAGE((ending != Ending::kWrong), "request " << n);
    if (ending == Ending::kNeverAsked) return threw;
    threw += ending == Ending::kThrew ? 1 : 0;
  }
}

template <class Make>
void check(const Make& make) {
  const long threw = check_cold([&make](long n) {
    auto problem = make();
    flashattn::cpu::set_num_threads(2);
    const Ending ending = run_with_failure(problem, n);
    problem.run();
    const std::vector<float> once = numbers(problem.result());
    problem.run();
    _exit(static_cast<int>(same_bits(once, problem.result()) ? ending : Ending::kWrong));
  });
  BOOST_TEST(threw >= 3);
}

}  // namespace

BOOST_AUTO_TEST_SUITE(allocations)

// Before the process has threads: a child of fork has the calling one alone.
BOOST_AUTO_TEST_CASE(first_calls) {
  check([] { return Plain(kSizes); });
  check([] { return Everything(); });
  check([] { return Plain({.seqlen_q = 1, .seqlen_k = 900}); });
  check([] { return Cache(); });
}

BOOST_AUTO_TEST_CASE(later_calls) {
  flashattn::cpu::set_num_threads(2);
  Plain plain(kSizes);
  Everything everything;
  Plain decode({.seqlen_q = 1, .seqlen_k = 900});
  Cache cache;
  for (Problem* problem : {static_cast<Problem*>(&plain), static_cast<Problem*>(&everything),
                           static_cast<Problem*>(&decode), static_cast<Problem*>(&cache)}) {
    check_warm(*problem);
  }
}

BOOST_AUTO_TEST_SUITE_END()
