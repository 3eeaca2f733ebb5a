#include "profiling/trace.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "profiling/calls.h"
#include "profiling/clock.h"
#include "profiling/range.h"
#include "tests/threadpool/sources.h"
#include "threadpool/pool.h"

namespace moesaic::profiling {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

void Spend(milliseconds duration) {
  for (const auto end = steady_clock::now() + duration; steady_clock::now() < end;) {
  }
}

class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    Reset();
    SetTimersEnabled(true);
  }
  void TearDown() override {
    StopTrace();
    SetTimersEnabled(false);
  }
};

std::vector<Event> Ranges(RangeId id) {
  std::vector<Event> result;
  for (const ThreadTrace& thread : ReadTrace()) {
    for (const Event& event : thread.events) {
      if (event.kind == EventKind::kRange && event.id == id) result.push_back(event);
    }
  }
  return result;
}

TEST_F(TraceTest, AnEventSaysWhenForWhomAndHowMuch) {
  const RangeId id = RegisterRange("traced", "test");
  StartTrace();
  const std::int64_t before = Now();
  {
    const TaskScope task(7, 32);
    Range range(id, {100, 10});
    Spend(milliseconds(1));
  }
  {
    Range range(id);
  }
  const std::vector<Event> events = Ranges(id);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_GE(events[0].begin_ns, before);
  EXPECT_GE(events[0].end_ns - events[0].begin_ns, 1'000'000);
  EXPECT_EQ(events[0].expert, 7);
  EXPECT_EQ(events[0].rows, 32);
  EXPECT_EQ(events[0].flops, 100);
  EXPECT_EQ(events[0].bytes, 10);
  EXPECT_EQ(events[1].expert, -1);
}

TEST_F(TraceTest, FusedWorkAddsUpToTheTimers) {
  const RangeId own = RegisterRange("traced own", "test"), other = RegisterRange("traced other", "test");
  StartTrace();
  {
    const Share share{other, {10, 1}};
    Range range(own, {30, 3}, {&share, 1});
    Spend(milliseconds(2));
  }
  ASSERT_EQ(Ranges(own).size(), 1u);
  ASSERT_EQ(Ranges(other).size(), 1u);
  const Event a = Ranges(own)[0], b = Ranges(other)[0];
  EXPECT_EQ(a.end_ns, b.begin_ns);
  for (const RangeStats& stats : Snapshot()) {
    if (stats.name == "traced own") {
      EXPECT_EQ(stats.thread_ns, a.end_ns - a.begin_ns);
    }
    if (stats.name == "traced other") {
      EXPECT_EQ(stats.thread_ns, b.end_ns - b.begin_ns);
    }
  }
}

TEST_F(TraceTest, MemoryIsBoundedAndLossesAreCounted) {
  const RangeId id = RegisterRange("many traced", "test");
  StartTrace(10);
  std::thread([&] {
    for (int i = 0; i < 25; ++i) Range range(id);
  }).join();
  EXPECT_EQ(Ranges(id).size(), 10u);
  std::int64_t dropped = 0;
  for (const ThreadTrace& thread : ReadTrace()) dropped += thread.dropped;
  EXPECT_EQ(dropped, 15);
  StartTrace(100);
  EXPECT_TRUE(ReadTrace().empty());
  for (int i = 0; i < 25; ++i) Range range(id);
  EXPECT_EQ(Ranges(id).size(), 25u);
  EXPECT_THROW(StartTrace(0), std::invalid_argument);
}

TEST_F(TraceTest, OffRecordsNothing) {
  const RangeId id = RegisterRange("untraced", "test");
  StartTrace();
  StopTrace();
  {
    Range range(id);
  }
  EXPECT_TRUE(Ranges(id).empty());
}

TEST_F(TraceTest, AChildOfForkTracesOn) {
  const RangeId id = RegisterRange("forked trace", "test");
  StartTrace();
  {
    Range range(id);
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    {
      Range range(id);
    }
    _exit(Ranges(id).size() == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(Ranges(id).size(), 1u);
}

class AccountTest : public TraceTest, public testing::WithParamInterface<threadpool::ThreadSource> {
 protected:
  void SetUp() override {
    if (MOESAIC_TSAN && GetParam() == threadpool::ThreadSource::kOpenMp) {
      GTEST_SKIP() << "ThreadSanitizer cannot see libgomp's synchronisation and would report races that are none";
    }
    TraceTest::SetUp();
  }
};

// Four chains of tasks on three workers: one worker has two chains, the others wait for it at the end.
TEST_P(AccountTest, BusyAndIdleTimesAddUpToTheRun) {
  constexpr int kThreads = 3, kChains = 4, kLinks = 5;
  static constexpr milliseconds kTask(2);
  threadpool::Pool pool(kThreads, GetParam());
  threadpool::TaskGraph graph;
  const RangeId id = RegisterRange("account", "test");
  struct Context {
    RangeId id;
  } context{id};
  for (int chain = 0; chain < kChains; ++chain) {
    threadpool::TaskId before = -1;
    for (int link = 0; link < kLinks; ++link) {
      const threadpool::TaskId task = graph.Add(
          [](void* self, std::int64_t, int) {
            Range range(static_cast<Context*>(self)->id);
            Spend(kTask);
          },
          &context, 0);
      if (before >= 0) graph.AddEdge(before, task);
      before = task;
    }
  }
  pool.Run(graph);  // starts the threads
  // A host that takes the core away between two readings of the clock can spoil a run, not all of ten.
  double worst = 1;
  for (int attempt = 0; attempt < 10 && worst > 0.02; ++attempt) {
    Reset();
    StartTrace();
    const std::int64_t begin = Now();
    pool.Run(graph);
    const std::int64_t wall = Now() - begin;
    const PoolTotals totals = PoolSnapshot();
    EXPECT_EQ(totals.runs, 1);
    EXPECT_EQ(totals.tasks, kChains * kLinks);
    EXPECT_EQ(totals.busy_ns + totals.stealing_ns + totals.waiting_ns + totals.parked_ns, totals.lane_ns);
    EXPECT_LE(totals.wall_ns, wall);
    EXPECT_GE(totals.busy_ns, std::chrono::nanoseconds(kTask).count() * kChains * kLinks);
    EXPECT_GE(totals.parked_ns, 0);
    EXPECT_LE(totals.least_busy_ns, totals.most_busy_ns);
    EXPECT_LE(totals.most_busy_ns, totals.wall_ns);

    // Intervals on the time line are what the sums say, less those too short to draw.
    std::int64_t idle = 0;
    for (const ThreadTrace& thread : ReadTrace()) {
      for (const Event& event : thread.events) {
        if (event.kind == EventKind::kIdle) idle += event.end_ns - event.begin_ns;
      }
    }
    EXPECT_LE(idle, totals.stealing_ns + totals.waiting_ns + totals.parked_ns);
    // The phases, timed by themselves, and the idle time of the pool: together all the time that three threads have.
    std::int64_t phases = 0;
    for (const RangeStats& stats : Snapshot()) phases += stats.thread_ns;
    const double sum = static_cast<double>(phases + totals.stealing_ns + totals.waiting_ns + totals.parked_ns);
    worst = std::abs(sum / static_cast<double>(kThreads * totals.wall_ns) - 1);
  }
  EXPECT_LE(worst, 0.02);
}

TEST_P(AccountTest, NothingIsCountedWhileTimersAreOff) {
  threadpool::Pool pool(2, GetParam());
  SetTimersEnabled(false);
  pool.ParallelFor(8, [](std::int64_t, int) { Spend(milliseconds(1)); });
  EXPECT_EQ(PoolSnapshot().runs, 0);
  SetTimersEnabled(true);
  pool.ParallelFor(8, [](std::int64_t, int) { Spend(milliseconds(1)); });
  EXPECT_EQ(PoolSnapshot().runs, 1);
  EXPECT_GE(PoolSnapshot().busy_ns, 8'000'000);
}

INSTANTIATE_TEST_SUITE_P(Sources, AccountTest,
                         testing::Values(threadpool::ThreadSource::kOwn, threadpool::ThreadSource::kOpenMp),
                         [](const auto& source) { return source.param == threadpool::ThreadSource::kOwn ? "Own" : "OpenMp"; });

}  // namespace
}  // namespace moesaic::profiling
