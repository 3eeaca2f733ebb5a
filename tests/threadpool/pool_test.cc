// The pool as its callers meet it: sizes, sources, callers at once, nesting, affinity.
#include "threadpool/pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {
namespace {

class PoolTest : public BothSources {};
MOESAIC_BOTH_SOURCES(PoolTest);

/// ParallelFor over `count`: each index once.
void ExpectAllOnce(Pool& pool, std::int64_t count) {
  std::vector<int> calls(count);
  pool.ParallelFor(count, [&](std::int64_t i, int) { ++calls[i]; });
  for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(calls[i], 1) << i;
}

TEST_P(PoolTest, ParallelForCallsEachIndexOnce) {
  for (const int threads : {1, 2, 7}) {
    Pool pool(threads, GetParam());
    for (const std::int64_t count : {0, 1, 2, 3, 31, 32, 33, 1000, 12345}) ExpectAllOnce(pool, count);
    EXPECT_THROW(pool.ParallelFor(-1, [](std::int64_t, int) {}), std::invalid_argument);
    EXPECT_THROW(pool.ParallelFor(1, nullptr, nullptr), std::invalid_argument);
  }
}

TEST_P(PoolTest, ManySmallJobs) {
  Pool pool(3, GetParam());
  const int jobs = GetParam() == ThreadSource::kOwn ? 20000 : 2000;
  std::int64_t sum[3] = {};
  for (int job = 0; job < jobs; ++job) pool.ParallelFor(3, [&](std::int64_t i, int) { sum[i] += job; });
  for (const std::int64_t s : sum) EXPECT_EQ(s, std::int64_t{jobs} * (jobs - 1) / 2);
}

TEST_P(PoolTest, MoreThreadsThanCores) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  Pool pool(8 * cores + 3, GetParam());
  EXPECT_EQ(pool.num_threads(), 8 * cores + 3);
  for (int round = 0; round < 20; ++round) ExpectAllOnce(pool, 1000);
}

// Every worker takes part: each task waits until all of them are inside.
TEST_P(PoolTest, AllWorkersRunAtOnce) {
  Pool pool(4, GetParam());
  for (int round = 0; round < 5; ++round) {
    std::atomic<int> inside{0};
    std::vector<std::atomic<int>> calls(4);
    pool.ParallelFor(4, [&](std::int64_t, int worker) {
      ++calls[worker];
      ++inside;
      while (inside < 4) std::this_thread::yield();
    });
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
}

TEST_P(PoolTest, TheCallerIsWorkerZero) {
  Pool pool(3, GetParam());
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 50; ++round) {
    pool.ParallelFor(100, [&](std::int64_t, int worker) {
      EXPECT_EQ(worker == 0, std::this_thread::get_id() == caller);
      if (worker == 0) std::this_thread::yield();
    });
  }
}

TEST_P(PoolTest, CallersAreServedOneAfterTheOther) {
  Pool pool(3, GetParam());
  constexpr int kCallers = 6;
  std::atomic<int> running[kCallers] = {};
  std::atomic<int> overlaps{0}, calls{0};
  std::vector<std::thread> callers;
  for (int me = 0; me < kCallers; ++me) {
    callers.emplace_back([&, me] {
      for (int round = 0; round < 50; ++round) {
        pool.ParallelFor(20, [&](std::int64_t, int) {
          ++running[me];
          for (int other = 0; other < kCallers; ++other) {
            if (other != me && running[other] != 0) ++overlaps;
          }
          ++calls;
          --running[me];
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(overlaps, 0);
  EXPECT_EQ(calls, kCallers * 50 * 20);
}

TEST_P(PoolTest, ATurnKeepsOthersOut) {
  Pool pool(3, GetParam()), other(2, GetParam());
  int shared = 0;  // no lock but the turn
  std::vector<std::thread> callers;
  for (int me = 0; me < 4; ++me) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const Pool::Turn turn(pool);
        const int before = ++shared;
        ExpectAllOnce(pool, 20);
        ExpectAllOnce(other, 20);  // a turn on one pool is none on another
        const Pool::Turn nested(pool);
        pool.ParallelFor(4, [&](std::int64_t, int) { const Pool::Turn inside(pool); });
        pool.SetNumThreads(2 + round % 2);
        EXPECT_EQ(shared, before);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(shared, 200);
}

TEST_P(PoolTest, ARunInsideATaskIsExecutedByItsWorker) {
  Pool pool(3, GetParam());
  std::atomic<int> mistakes{0}, calls{0};
  pool.ParallelFor(24, [&](std::int64_t, int worker) {
    const std::thread::id thread = std::this_thread::get_id();
    const auto check = [&](int inner) {
      if (inner != worker || std::this_thread::get_id() != thread) ++mistakes;
      ++calls;
    };
    pool.ParallelFor(5, [&](std::int64_t, int inner) { check(inner); });
    TaskGraph graph;
    struct Check {
      std::function<void(int)> function;
    } context{check};
    const TaskFunction task = [](void* c, std::int64_t, int inner) { static_cast<Check*>(c)->function(inner); };
    const TaskId first = graph.Add(task, &context, 0), second = graph.Add(task, &context, 1);
    graph.AddEdge(second, first);
    pool.Run(graph);
    pool.ParallelFor(2, [&](std::int64_t, int) { pool.ParallelFor(2, [&](std::int64_t, int inner) { check(inner); }); });
  });
  EXPECT_EQ(mistakes, 0);
  EXPECT_EQ(calls, 24 * (5 + 2 + 4));
}

TEST_P(PoolTest, AnExceptionPassesThroughNestedRuns) {
  Pool pool(2, GetParam());
  EXPECT_THROW(pool.ParallelFor(
                   4, [&](std::int64_t, int) { pool.ParallelFor(3, [](std::int64_t, int) { throw std::domain_error("x"); }); }),
               std::domain_error);
  std::atomic<int> caught{0};
  pool.ParallelFor(4, [&](std::int64_t, int) {
    try {
      pool.ParallelFor(3, [](std::int64_t, int) { throw std::domain_error("x"); });
    } catch (const std::domain_error&) {
      ++caught;
    }
  });
  EXPECT_EQ(caught, 4);
}

TEST_P(PoolTest, ATaskMayCallAnotherPool) {
  Pool outer(3, GetParam()), inner(2, GetParam());
  std::atomic<int> calls{0}, mistakes{0};
  outer.ParallelFor(12, [&](std::int64_t, int) {
    inner.ParallelFor(10, [&](std::int64_t, int worker) {
      if (worker < 0 || worker >= 2) ++mistakes;
      ++calls;
    });
  });
  EXPECT_EQ(calls, 120);
  EXPECT_EQ(mistakes, 0);
}

TEST_P(PoolTest, SizeAndSourceChangeWhileOthersRun) {
  Pool pool(2, GetParam());
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      while (!stop) ExpectAllOnce(pool, 100);
    });
  }
  for (int round = 0; round < 30; ++round) {
    pool.SetNumThreads(1 + round % 5);
    EXPECT_EQ(pool.num_threads(), 1 + round % 5);
    if (!MOESAIC_TSAN) pool.SetSource(round % 2 == 0 ? ThreadSource::kOwn : ThreadSource::kOpenMp);
    ExpectAllOnce(pool, 50);
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

TEST_P(PoolTest, ASizeThatIsNoneIsRefused) {
  EXPECT_THROW(Pool(-1, GetParam()), std::invalid_argument);
  EXPECT_THROW(Pool(4097, GetParam()), std::invalid_argument);
  Pool pool(2, GetParam());
  EXPECT_THROW(pool.SetNumThreads(0), std::invalid_argument);
  EXPECT_THROW(pool.SetNumThreads(4097), std::invalid_argument);
  EXPECT_EQ(pool.num_threads(), 2);
  ExpectAllOnce(pool, 10);
}

TEST_P(PoolTest, ATaskCannotResizeItsOwnPool) {
  Pool pool(2, GetParam());
  EXPECT_THROW(pool.ParallelFor(2, [&](std::int64_t, int) { pool.SetNumThreads(3); }), std::logic_error);
  EXPECT_THROW(pool.ParallelFor(2, [&](std::int64_t, int) { pool.SetSource(ThreadSource::kOwn); }), std::logic_error);
  EXPECT_EQ(pool.num_threads(), 2);
  ExpectAllOnce(pool, 10);
}

TEST(PoolEnvironment, NumberOfThreads) {
  setenv("MOESAIC_NUM_THREADS", "3", 1);
  EXPECT_EQ(Pool().num_threads(), 3);
  EXPECT_EQ(Pool(2).num_threads(), 2);
  for (const char* bad : {"0", "-1", "4097", "two", "3 ", "3x", "1e2", "99999999999999"}) {
    setenv("MOESAIC_NUM_THREADS", bad, 1);
    try {
      Pool pool;
      FAIL() << bad;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("MOESAIC_NUM_THREADS"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(bad), std::string::npos) << error.what();
    }
  }
  for (const bool set : {true, false}) {
    set ? setenv("MOESAIC_NUM_THREADS", "", 1) : unsetenv("MOESAIC_NUM_THREADS");
    EXPECT_EQ(Pool().num_threads(), Topology::Host().UsableCores());
  }
}

TEST(PoolEnvironment, TheDefaultPoolIsOne) {
  std::vector<Pool*> seen(4);
  std::vector<std::thread> threads;
  for (Pool*& pool : seen) threads.emplace_back([&pool] { pool = &Pool::Default(); });
  for (std::thread& thread : threads) thread.join();
  for (Pool* pool : seen) EXPECT_EQ(pool, &Pool::Default());
  ExpectAllOnce(Pool::Default(), 100);
}

cpu_set_t AffinityOfThisThread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(pthread_getaffinity_np(pthread_self(), sizeof(set), &set), 0);
  return set;
}

TEST_P(PoolTest, TheCallersAffinityStaysAsItIs) {
  const cpu_set_t before = AffinityOfThisThread();
  for (const int threads : {1, 2, static_cast<int>(std::thread::hardware_concurrency()) + 1}) {
    Pool pool(threads, GetParam());
    for (int round = 0; round < 20; ++round) {
      ExpectAllOnce(pool, 100);
      const cpu_set_t now = AffinityOfThisThread();
      ASSERT_TRUE(CPU_EQUAL(&now, &before));
    }
  }
}

/// What each worker but the caller is bound to; all must be inside at once, so that each is seen.
std::vector<cpu_set_t> WorkerAffinities(Pool& pool) {
  std::vector<cpu_set_t> sets(pool.num_threads());
  std::atomic<int> inside{0};
  pool.ParallelFor(pool.num_threads(), [&](std::int64_t, int worker) {
    sets[worker] = AffinityOfThisThread();
    ++inside;
    while (inside < pool.num_threads()) std::this_thread::yield();
  });
  sets.erase(sets.begin());
  return sets;
}

TEST(PoolAffinity, OwnThreadsArePinnedEachToItsOwnCpu) {
  const int cpus = static_cast<int>(Topology::Host().affinity.size());
  if (cpus < 2) GTEST_SKIP() << "this process may use one CPU only";
  Pool pool(cpus);
  for (int round = 0; round < 5; ++round) {
    std::set<int> taken;
    for (const cpu_set_t& set : WorkerAffinities(pool)) {
      ASSERT_EQ(CPU_COUNT(&set), 1);
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set)) continue;
        EXPECT_TRUE(taken.insert(cpu).second) << "two workers on CPU " << cpu;
      }
    }
    EXPECT_EQ(static_cast<int>(taken.size()), cpus - 1);
  }
}

TEST(PoolAffinity, WorkersLeaveTheCallersCpu) {
  const std::vector<int> cpus = Topology::Host().affinity;
  if (cpus.size() < 2) GTEST_SKIP() << "this process may use one CPU only";
  Pool pool(static_cast<int>(cpus.size()));
  // The caller pins itself to one CPU after the other.
  std::thread([&] {
    for (int round = 0; round < 3; ++round) {
      for (const int cpu : {cpus.front(), cpus.back()}) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
        for (const cpu_set_t& set : WorkerAffinities(pool)) EXPECT_FALSE(CPU_ISSET(cpu, &set));
        const cpu_set_t now = AffinityOfThisThread();
        EXPECT_TRUE(CPU_EQUAL(&now, &one));
      }
    }
  }).join();
}

TEST(PoolAffinity, TooManyThreadsMayRunAnywhere) {
  const std::vector<int>& cpus = Topology::Host().affinity;
  Pool pool(static_cast<int>(cpus.size()) + 1);
  std::thread([&] {
    // Workers do not inherit the binding of the thread that happened to start them.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus.front(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    for (const cpu_set_t& set : WorkerAffinities(pool)) EXPECT_EQ(CPU_COUNT(&set), static_cast<int>(cpus.size()));
  }).join();
}

}  // namespace
}  // namespace moesaic::threadpool
