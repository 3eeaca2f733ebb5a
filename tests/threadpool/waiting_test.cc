// Idle workers sleep. Wall-clock bounds are wide: the point is the difference between sleeping and spinning.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "tests/threadpool/sources.h"
#include "threadpool/futex.h"
#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

using namespace std::chrono_literals;

std::chrono::microseconds CpuTime() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto time = [](const timeval& t) { return std::chrono::seconds(t.tv_sec) + std::chrono::microseconds(t.tv_usec); };
  return time(usage.ru_utime) + time(usage.ru_stime);
}

class Waiting : public BothSources {};
MOESAIC_BOTH_SOURCES(Waiting);

// libgomp's own threads spin after a region (OMP_WAIT_POLICY): that is the application's choice, so this is for own threads.
TEST(WaitingOwn, SleepsBetweenJobs) {
  Pool pool(4);
  for (int round = 0; round < 100; ++round) pool.ParallelFor(100, [](std::int64_t, int) {});
  std::this_thread::sleep_for(5ms);
  const auto before = CpuTime();
  std::this_thread::sleep_for(200ms);
  EXPECT_LT(CpuTime() - before, 20ms);
}

// One long task: the others, the caller among them, have nothing to do meanwhile.
TEST_P(Waiting, SleepsInsideARun) {
  Pool pool(4, GetParam());
  pool.ParallelFor(100, [](std::int64_t, int) {});
  const auto before = CpuTime();
  pool.ParallelFor(4, [](std::int64_t i, int) {
    if (i == 1) std::this_thread::sleep_for(300ms);
  });
  EXPECT_LT(CpuTime() - before, 60ms);
}

// Workers that went to sleep inside a run come back for tasks that are made ready later, all of them.
TEST_P(Waiting, WakesForLateTasks) {
  Pool pool(4, GetParam());
  for (const TaskGraph::Start start : {TaskGraph::Start::kNext, TaskGraph::Start::kInTurn}) {
    struct State {
      std::atomic<int> inside{0};
    } state;
    TaskGraph graph;
    const TaskId late = graph.Add([](void*, std::int64_t, int) { std::this_thread::sleep_for(20ms); }, nullptr, 0);
    for (int i = 0; i < 4; ++i) {
      // All four must run at once, or this never ends.
      const TaskId task = graph.Add(
          [](void* context, std::int64_t, int) {
            auto& inside = static_cast<State*>(context)->inside;
            ++inside;
            while (inside % 4 != 0) std::this_thread::yield();
          },
          &state, i, start);
      graph.AddEdge(late, task);
    }
    for (int round = 0; round < 5; ++round) {
      state.inside = 0;
      pool.Run(graph);
      EXPECT_EQ(state.inside, 4);
    }
  }
}

TEST_P(Waiting, JobsAfterPauses) {
  Pool pool(3, GetParam());
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> calls{0};
    pool.ParallelFor(30, [&](std::int64_t, int) { ++calls; });
    ASSERT_EQ(calls, 30);
    std::this_thread::sleep_for(std::chrono::microseconds(round));
  }
}

TEST(TurnLock, OneAtATime) {
  TurnLock lock;
  std::int64_t counter = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 2000; ++k) {
        const std::lock_guard turn(lock);
        ++counter;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter, 8000);
}

TEST(TurnLock, InTheOrderOfAsking) {
  TurnLock lock;
  std::vector<int> order;
  std::vector<std::thread> threads;
  lock.lock();
  for (int i = 0; i < 5; ++i) {
    const std::uint32_t asked = lock.asked();
    threads.emplace_back([&, i] {
      const std::lock_guard turn(lock);
      order.push_back(i);
    });
    while (lock.asked() == asked) std::this_thread::yield();
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace moesaic::threadpool
