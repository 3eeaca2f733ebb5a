// Rates on hosts that others use.
#include "profiling/bench/rate.h"

#include <gtest/gtest.h>

namespace moesaic::bench {
namespace {

constexpr std::int64_t kMs = 1'000'000;

TEST(BestWindow, IsTheRateOfAWorkerThatNobodyDisturbs) {
  // One unit a millisecond, but for 3 ms in which somebody else had the core.
  std::vector<Progress> worker;
  for (std::int64_t i = 0; i <= 10; ++i) worker.push_back({(i + (i > 4 ? 3 : 0)) * kMs, static_cast<double>(i)});
  EXPECT_NEAR(BestWindow({worker}, 2e-3), 1000, 1e-6);
  EXPECT_NEAR(BestWindow({worker}, 13e-3), 10 / 13e-3, 1e-6);
  EXPECT_EQ(BestWindow({worker}, 14e-3), 0);  // none is so long
}

TEST(BestWindow, DoesNotAddUpWhatWorkersDoAtDifferentTimes) {
  // Both share a memory: one computes at first, the other one later.
  const std::vector<Progress> first = {{0, 0}, {5 * kMs, 50}, {10 * kMs, 50}}, second = {{0, 0}, {5 * kMs, 0}, {10 * kMs, 50}};
  EXPECT_NEAR(BestWindow({first, second}, 1e-3), 10'000, 1e-6);
  // Only times in which both are there.
  const std::vector<Progress> late = {{8 * kMs, 0}, {12 * kMs, 40}};
  EXPECT_NEAR(BestWindow({second, late}, 1e-3), 0, 1e-6) << "no entry of the first one begins a window";
  EXPECT_NEAR(BestWindow({late, second}, 1e-3), 20'000, 1e-6);
}

TEST(MeasureBestRate, CountsTheWorkOfAllWorkers) {
  threadpool::Pool pool(3);
  std::atomic<int> turns{0};
  const double rate = MeasureBestRate(&pool, 1e-3, 1e-4, [&](int) {
    turns.fetch_add(1);
    for (const std::int64_t start = profiling::Now(); SecondsSince(start) < 1e-5;) {
    }
    return 1.0;
  });
  EXPECT_GT(rate, 0);
  EXPECT_LE(rate, 3 / 1e-5 * 1.001);  // never more than each worker's turns take
  EXPECT_GE(turns.load(), 3);
}

}  // namespace
}  // namespace moesaic::bench
