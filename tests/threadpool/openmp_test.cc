// The OpenMP team as a source of threads: it may be smaller than asked for, and the application uses it too.
#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

class OpenMp : public testing::Test {
 protected:
  void SetUp() override {
    if (MOESAIC_TSAN) GTEST_SKIP() << "ThreadSanitizer cannot see libgomp's synchronisation";
  }
};

bool Works(Pool& pool) {
  std::vector<int> calls(500);
  pool.ParallelFor(500, [&](std::int64_t i, int) { ++calls[i]; });
  for (const int count : calls) {
    if (count != 1) return false;
  }
  return true;
}

int ThreadsInUse(Pool& pool) {
  std::vector<std::atomic<int>> used(pool.num_threads());
  for (int round = 0; round < 20; ++round) {
    pool.ParallelFor(200, [&](std::int64_t, int worker) {
      used[worker] = 1;
      std::this_thread::yield();
    });
  }
  int threads = 0;
  for (const auto& worker : used) threads += worker;
  return threads;
}

TEST_F(OpenMp, TasksRunInTheTeam) {
  Pool pool(3, ThreadSource::kOpenMp);
  std::atomic<int> inside{0}, in_region{0};
  pool.ParallelFor(3, [&](std::int64_t, int worker) {
    if (omp_in_parallel() && omp_get_num_threads() == 3 && omp_get_thread_num() == worker) ++in_region;
    ++inside;
    while (inside < 3) std::this_thread::yield();
  });
  EXPECT_EQ(in_region, 3);
}

TEST_F(OpenMp, ATeamOfOneInsideTheApplicationsRegion) {
  Pool pool(4, ThreadSource::kOpenMp);
  std::atomic<int> good{0};
#pragma omp parallel num_threads(3)
  {
    for (int round = 0; round < 20; ++round) good += Works(pool) ? 1 : 0;
  }
  EXPECT_EQ(good, 60);
  EXPECT_TRUE(Works(pool));
}

TEST_F(OpenMp, AlternatesWithTheApplicationsRegions) {
  Pool pool(2, ThreadSource::kOpenMp);
  for (int round = 0; round < 200; ++round) {
    int sum = 0;
#pragma omp parallel for num_threads(2) reduction(+ : sum)
    for (int i = 0; i < 100; ++i) sum += i;
    ASSERT_EQ(sum, 4950);
    ASSERT_TRUE(Works(pool));
  }
}

TEST_F(OpenMp, DynamicTeams) {
  omp_set_dynamic(1);
  Pool pool(64, ThreadSource::kOpenMp);
  for (int round = 0; round < 20; ++round) EXPECT_TRUE(Works(pool));
  omp_set_dynamic(0);
}

// libgomp reads the limit when it is loaded, so this needs a process of its own.
TEST_F(OpenMp, ThreadLimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("OMP_THREAD_LIMIT", "2", 1);
  EXPECT_EXIT(
      {
        Pool pool(8, ThreadSource::kOpenMp);
        const bool good = omp_get_thread_limit() == 2 && Works(pool) && ThreadsInUse(pool) <= 2;
        std::_Exit(good ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  unsetenv("OMP_THREAD_LIMIT");
}

}  // namespace
}  // namespace moesaic::threadpool
