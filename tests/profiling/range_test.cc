#include "profiling/range.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "profiling/clock.h"

namespace moesaic::profiling {
namespace {

using std::chrono::milliseconds;

RangeStats Find(const std::string& name) {
  for (const RangeStats& stats : Snapshot()) {
    if (stats.name == name) {
      return stats;
    }
  }
  throw std::out_of_range(name);
}

class RangeTest : public testing::Test {
 protected:
  void SetUp() override {
    Reset();
    SetTimersEnabled(true);
  }
  void TearDown() override { SetTimersEnabled(false); }
};

void Spend(RangeId id, milliseconds duration) {
  Range range(id);
  std::this_thread::sleep_for(duration);
}

TEST_F(RangeTest, TheSameNameAndCategoryGiveTheSameId) {
  const RangeId id = RegisterRange("twice", "a");
  EXPECT_EQ(RegisterRange("twice", "a"), id);
  EXPECT_NE(RegisterRange("twice", "b"), id);
  EXPECT_NE(RegisterRange("once", "a"), id);
}

TEST_F(RangeTest, SnapshotListsEveryRangeInOrderOfRegistration) {
  RegisterRange("order 1", "order");
  RegisterRange("order 0", "order");
  RegisterRange("order 2", "order");
  RegisterRange("order 0", "order");
  std::vector<std::string> names;
  for (const RangeStats& stats : Snapshot()) {
    if (stats.category == "order") {
      names.push_back(stats.name);
      EXPECT_EQ(stats.calls, 0);
      EXPECT_EQ(stats.threads, 0);
      EXPECT_EQ(stats.min_thread_ns, 0);
      EXPECT_EQ(stats.span_ns, 0);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"order 1", "order 0", "order 2"}));
}

TEST_F(RangeTest, CountsCallsTimeAndWork) {
  const RangeId id = RegisterRange("counted", "test");
  for (int i = 0; i < 3; ++i) {
    Range range(id, {11, 5});
    std::this_thread::sleep_for(milliseconds(2));
  }
  const RangeStats stats = Find("counted");
  EXPECT_EQ(stats.category, "test");
  EXPECT_EQ(stats.calls, 3);
  EXPECT_EQ(stats.threads, 1);
  EXPECT_GE(stats.thread_ns, 6'000'000);
  EXPECT_EQ(stats.min_thread_ns, stats.thread_ns);
  EXPECT_EQ(stats.max_thread_ns, stats.thread_ns);
  EXPECT_GE(stats.span_ns, stats.thread_ns);
  EXPECT_EQ(stats.flops, 33);
  EXPECT_EQ(stats.bytes, 15);
}

TEST_F(RangeTest, WhatSomethingElseTimed) {
  const RangeId id = RegisterRange("timed elsewhere", "test");
  const std::int64_t now = Now();
  AddTimed(id, now, 3000, 5);
  AddTimed(id, now + 10'000, 1000, 6);
  RangeStats stats = Find("timed elsewhere");
  EXPECT_EQ(stats.calls, 2);
  EXPECT_EQ(stats.thread_ns, 4000);
  EXPECT_EQ(stats.span_ns, 11'000);
  EXPECT_EQ(stats.bytes, 11);
  Reset();
  AddTimed(id, now, 1000, 1);  // began before
  SetTimersEnabled(false);
  AddTimed(id, Now(), 1000, 1);
  EXPECT_EQ(Find("timed elsewhere").calls, 0);
}

TEST_F(RangeTest, OffCountsNothing) {
  const RangeId id = RegisterRange("off", "test");
  SetTimersEnabled(false);
  {
    Range range(id, {1, 1});
    SetTimersEnabled(true);  // opened without a start, so it has no length
  }
  EXPECT_EQ(Find("off").calls, 0);
  EXPECT_EQ(Find("off").flops, 0);
}

TEST_F(RangeTest, NestedRangesEachCountTheirOwnTime) {
  const RangeId outer = RegisterRange("outer", "test");
  const RangeId inner = RegisterRange("inner", "test");
  {
    Range range(outer);
    Spend(inner, milliseconds(2));
    Spend(inner, milliseconds(2));
  }
  EXPECT_EQ(Find("outer").calls, 1);
  EXPECT_EQ(Find("inner").calls, 2);
  EXPECT_GE(Find("outer").thread_ns, Find("inner").thread_ns);
  EXPECT_GE(Find("outer").span_ns, Find("inner").span_ns);
}

TEST_F(RangeTest, NestedInItselfSpansFromTheOuterOpening) {
  const RangeId id = RegisterRange("recursive", "test");
  {
    Range range(id);
    std::this_thread::sleep_for(milliseconds(2));
    Range again(id);
  }
  const RangeStats stats = Find("recursive");
  EXPECT_EQ(stats.calls, 2);
  EXPECT_GE(stats.span_ns, 2'000'000);
}

TEST_F(RangeTest, AddsUpOverThreadsThatRunAndThatEnded) {
  const RangeId id = RegisterRange("threads", "test");
  std::thread short_one(Spend, id, milliseconds(1));
  short_one.join();
  std::atomic<bool> done = false, counted = false;
  std::thread long_one([&] {
    Spend(id, milliseconds(20));
    Spend(id, milliseconds(20));
    done = true;
    while (!counted) {
      std::this_thread::yield();
    }
  });
  while (!done) {
    std::this_thread::yield();
  }
  const RangeStats both = Find("threads");
  counted = true;
  long_one.join();
  EXPECT_EQ(both.calls, 3);
  EXPECT_EQ(both.threads, 2);
  EXPECT_GE(both.max_thread_ns, 40'000'000);
  EXPECT_EQ(both.min_thread_ns + both.max_thread_ns, both.thread_ns);
  EXPECT_LT(both.min_thread_ns, both.max_thread_ns);

  const RangeStats after = Find("threads");
  EXPECT_EQ(after.calls, both.calls);
  EXPECT_EQ(after.thread_ns, both.thread_ns);
  EXPECT_EQ(after.span_ns, both.span_ns);
  EXPECT_EQ(after.threads, both.threads);
}

TEST_F(RangeTest, ManyThreadsLoseNothing) {
  const RangeId id = RegisterRange("many", "test");
  constexpr int kThreads = 8, kCalls = 5000;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < kCalls; ++call) {
        Range range(id, {1, 2});
      }
    });
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_LE(Find("many").calls, kThreads * kCalls);  // while they run
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const RangeStats stats = Find("many");
  EXPECT_EQ(stats.calls, kThreads * kCalls);
  EXPECT_EQ(stats.flops, kThreads * kCalls);
  EXPECT_EQ(stats.bytes, 2.0 * kThreads * kCalls);
  EXPECT_EQ(stats.threads, kThreads);
}

TEST_F(RangeTest, ResetStartsFromZeroOnEveryThread) {
  const RangeId id = RegisterRange("reset", "test");
  std::atomic<int> step = 0;
  std::thread other([&] {
    Spend(id, milliseconds(1));
    step = 1;
    while (step != 2) {
      std::this_thread::yield();
    }
    Spend(id, milliseconds(1));
  });
  std::thread(Spend, id, milliseconds(1)).join();
  while (step != 1) {
    std::this_thread::yield();
  }
  EXPECT_EQ(Find("reset").calls, 2);
  Reset();
  EXPECT_EQ(Find("reset").calls, 0);
  EXPECT_EQ(Find("reset").thread_ns, 0);
  step = 2;
  other.join();
  EXPECT_EQ(Find("reset").calls, 1);
  EXPECT_EQ(Find("reset").threads, 1);
}

TEST_F(RangeTest, ARangeThatWasOpenAtAResetDoesNotCount) {
  const RangeId id = RegisterRange("open", "test");
  {
    Range range(id, {1, 1});
    Reset();
  }
  EXPECT_EQ(Find("open").calls, 0);
  EXPECT_EQ(Find("open").flops, 0);
  Spend(id, milliseconds(0));
  EXPECT_EQ(Find("open").calls, 1);
}

TEST_F(RangeTest, FusedWorkSharesItsTimeByFlops) {
  const RangeId own = RegisterRange("fused own", "test");
  const RangeId other = RegisterRange("fused other", "test");
  const RangeId none = RegisterRange("fused without work", "test");
  {
    const std::array<Share, 2> shares = {Share{other, {10, 1}}, Share{none, {0, 1}}};
    Range range(own, {30, 3}, shares);
    std::this_thread::sleep_for(milliseconds(8));
  }
  const RangeStats first = Find("fused own"), second = Find("fused other");
  EXPECT_TRUE(first.apportioned);
  EXPECT_TRUE(second.apportioned);
  EXPECT_EQ(first.calls, 1);
  EXPECT_EQ(second.calls, 1);
  EXPECT_EQ(first.flops, 30);
  EXPECT_EQ(second.flops, 10);
  EXPECT_EQ(second.bytes, 1);
  EXPECT_GE(first.thread_ns + second.thread_ns, 8'000'000);                                           // nothing is lost
  EXPECT_NEAR(static_cast<double>(first.thread_ns), 3.0 * static_cast<double>(second.thread_ns), 4);  // rounded to whole ns
  EXPECT_EQ(first.span_ns, second.span_ns);
  EXPECT_EQ(Find("fused without work").calls, 0);

  Reset();
  Spend(own, milliseconds(0));
  EXPECT_FALSE(Find("fused own").apportioned);
}

TEST_F(RangeTest, ASumHoldsWhatItsRangesTake) {
  RegisterRange("sum of sums", "sums", RangeKind::kSum);
  RegisterRange("sum", "sum of sums", RangeKind::kSum);
  const RangeId a = RegisterRange("a", "sum"), b = RegisterRange("b", "sum"), beside = RegisterRange("c", "sum of sums");
  Spend(a, milliseconds(1));
  Spend(b, milliseconds(2));
  std::thread(Spend, b, milliseconds(4)).join();  // of a thread that is gone
  {
    Range range(beside, {6, 2});
  }
  const RangeStats sum = Find("sum"), all = Find("sum of sums");
  EXPECT_EQ(sum.calls, 3);
  EXPECT_EQ(sum.thread_ns, Find("a").thread_ns + Find("b").thread_ns);
  EXPECT_EQ(sum.threads, 2);
  EXPECT_EQ(sum.min_thread_ns + sum.max_thread_ns, sum.thread_ns);
  EXPECT_GE(sum.max_thread_ns, 4'000'000);
  EXPECT_GE(sum.span_ns, 7'000'000);
  EXPECT_EQ(all.calls, 4);
  EXPECT_EQ(all.thread_ns, sum.thread_ns + Find("c").thread_ns);
  EXPECT_EQ(all.flops, 6);
}

TEST_F(RangeTest, GroupsAddUpToTheWhole) {
  const RangeId id = RegisterRange("grouped", "test"), other = RegisterRange("grouped share", "test");
  const auto work = [&](GroupId group, double flops) {
    const GroupScope scope(group);
    const Share share{other, {1, 0}};
    Range range(id, {flops, 2}, {&share, 1});
  };
  work(5, 10);
  work(3, 20);
  work(5, 30);
  work(0, 40);
  std::thread([&] {
    const GroupScope outer(7);
    work(5, 50);  // scopes nest
    Spend(id, milliseconds(1));
  }).join();
  const auto of = [&](GroupId group, RangeId range) {
    for (const GroupStats& stats : GroupSnapshot()) {
      if (stats.group == group && stats.id == range) return stats;
    }
    return GroupStats{};
  };
  EXPECT_EQ(of(5, id).calls, 3);
  EXPECT_EQ(of(5, id).flops, 90);
  EXPECT_EQ(of(5, id).bytes, 6);
  EXPECT_EQ(of(5, other).flops, 3);
  EXPECT_EQ(of(3, id).flops, 20);
  EXPECT_EQ(of(7, id).calls, 1);
  EXPECT_GE(of(7, id).thread_ns, 1'000'000);
  EXPECT_EQ(of(0, id).calls, 0) << "nobody's work is in the sums alone";
  EXPECT_EQ(Find("grouped").calls, 6);
  EXPECT_EQ(Find("grouped").flops, 150);
  Reset();
  EXPECT_TRUE(GroupSnapshot().empty());
  work(5, 1);
  ASSERT_EQ(GroupSnapshot().size(), 2u);
  EXPECT_EQ(of(5, id).flops, 1);
}

TEST_F(RangeTest, AChildOfForkGoesOnCounting) {
  const RangeId id = RegisterRange("fork", "test");
  Spend(id, milliseconds(0));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Spend(id, milliseconds(0));
    RegisterRange("of the child", "test");
    _exit(Find("fork").calls == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(Find("fork").calls, 1);
}

TEST_F(RangeTest, RegistrationIsLimitedAndSaysSo) {
  const RangeId id = RegisterRange("before the limit", "test");
  const pid_t child = fork();  // names stay for the life of a process
  ASSERT_GE(child, 0);
  if (child == 0) {
    try {
      for (int i = 0; i <= 4096; ++i) {
        RegisterRange("limit " + std::to_string(i), "limit");
      }
      _exit(1);
    } catch (const std::length_error&) {
      Spend(id, milliseconds(0));  // what is registered goes on working
      _exit(Find("before the limit").calls == 1 ? 0 : 2);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// Off, a range must be cheap enough to stay in every task: 100 ns would still be nothing beside a task of 50 us, and leaves
// room for a slow or shared host.
TEST(RangeCost, OffIsCheap) {
#ifdef MOESAIC_SANITIZED
  GTEST_SKIP() << "a sanitizer takes most of the time";
#endif
  const RangeId id = RegisterRange("cost", "test");
  SetTimersEnabled(false);
  constexpr int kCalls = 200'000;
  double best_ns = 1e9;
  for (int repetition = 0; repetition < 5; ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      Range range(id);
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
    best_ns = std::min(best_ns, elapsed.count() / kCalls);
  }
  RecordProperty("ns", std::to_string(best_ns));
  std::printf("a range costs %.1f ns with timers off\n", best_ns);
  EXPECT_LT(best_ns, 100);
}

}  // namespace
}  // namespace moesaic::profiling
