#include "profiling/clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

namespace moesaic::profiling {
namespace {

using Reading = CounterLine::Reading;

constexpr std::int64_t kSecond = 1'000'000'000;

/// A machine of two clocks that the test moves, and a line between them.
class Machine {
 public:
  /// @param ticks_per_ns  of the counter; `ns` pass on the system's clock
  void Pass(std::int64_t ns, double ticks_per_ns = kTicksPerNs) {
    now_.ns += ns;
    now_.ticks += static_cast<std::uint64_t>(static_cast<double>(ns) * ticks_per_ns);
  }

  /// What Now() does.
  std::int64_t Read() {
    std::int64_t ns = line_.At(now_.ticks);
    if (ns < 0) ns = line_.Renew(now_);
    EXPECT_GE(ns, last_) << "time went back";
    last_ = ns;
    return ns;
  }

  std::int64_t Error() { return Read() - now_.ns; }
  bool HasLine() const { return line_.At(now_.ticks) >= 0; }

  static constexpr double kTicksPerNs = 2.3;

 private:
  Reading now_{std::uint64_t{1} << 60, 123 * kSecond};
  CounterLine line_;
  std::int64_t last_ = 0;
};

TEST(CounterLine, AsksTheSystemUntilThereIsASlope) {
  Machine machine;
  EXPECT_EQ(machine.Error(), 0);
  machine.Pass(CounterLine::kShortestNs - 1);
  EXPECT_EQ(machine.Error(), 0);
  EXPECT_FALSE(machine.HasLine());
  machine.Pass(1);
  EXPECT_EQ(machine.Error(), 0);
  EXPECT_TRUE(machine.HasLine());
  machine.Pass(kSecond / 2);
  EXPECT_TRUE(machine.HasLine());
  EXPECT_LE(std::abs(machine.Error()), 25);  // the slope is off by a tick in 10 ms at most, which is 22 ns in half a second
}

TEST(CounterLine, DoesNotDriftOverHoursWhileTheSystemsClockIsSlewed) {
  Machine machine;
  machine.Read();
  machine.Pass(CounterLine::kShortestNs);
  for (std::int64_t i = 0; i < 4 * 3600 * 10; ++i) {
    // Ten minutes faster by 400 millionths, then ten slower, as while a time server takes back an error.
    const double ppm = i / 6000 % 2 == 0 ? 400 : -400;
    machine.Pass(kSecond / 10, Machine::kTicksPerNs * (1 + ppm * 1e-6));
    // When the speed changes, the line that is there and the one after it have a slope that is wrong by 800 millionths at most,
    // for a second each.
    ASSERT_LE(std::abs(machine.Error()), i % 6000 > 50 ? 1000 : 2'000'000) << i;
  }
}

TEST(CounterLine, GoesOnAfterHoursWithoutAReading) {
  Machine machine;
  machine.Read();
  machine.Pass(CounterLine::kShortestNs);
  machine.Read();
  machine.Pass(5 * 3600 * kSecond);
  EXPECT_EQ(machine.Error(), 0);
  EXPECT_TRUE(machine.HasLine());
}

TEST(CounterLine, LeavesALineWhenTheClocksDisagree) {
  Machine machine;
  machine.Read();
  machine.Pass(CounterLine::kShortestNs);
  machine.Read();
  machine.Pass(kSecond / 10, 1000);  // the machine slept; the counter went on
  machine.Read();
  EXPECT_FALSE(machine.HasLine());
  machine.Pass(2 * kSecond);
  EXPECT_EQ(machine.Error(), 0);
  EXPECT_TRUE(machine.HasLine());
}

TEST(CounterLine, NeverTakesACounterThatIsSlowerThanNanoseconds) {
  Machine machine;
  for (int i = 0; i < 100; ++i) {
    machine.Pass(kSecond, 0.5);
    EXPECT_EQ(machine.Error(), 0);
    EXPECT_FALSE(machine.HasLine());
  }
}

// A line's slope comes from two readings of both clocks, at least 10 ms apart; a host that takes its core away between the two
// clocks of each of four tries is as many parts wrong, of a second at most.
TEST(Clock, IsThatOfTheSystem) {
  const auto system = [] { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); };
  constexpr std::int64_t kTolerance = 1'000'000;
  for (int i = 0; i < 100'000; ++i) {
    const std::int64_t before = system(), now = Now(), after = system();
    ASSERT_GE(now, before - kTolerance);
    ASSERT_LE(now, after + kTolerance);
  }
}

TEST(Clock, CountsTheThreadsOwnTimeWhereItIsAskedTo) {
  const auto own = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
  };
  CountThreadTime(true);
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t before = own(), now = Now(), after = own();
    ASSERT_GE(now, before);
    ASSERT_LE(now, after);
  }
  CountThreadTime(false);
  constexpr std::int64_t kTolerance = 1'000'000;
  for (int i = 0; i < 1000; ++i) {  // no line that was laid before holds it back
    const std::int64_t system = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    ASSERT_NEAR(static_cast<double>(Now() - system), 0, 100 * kTolerance);
  }
}

TEST(Clock, NeverGoesBackFromThreadToThread) {
  std::atomic<std::int64_t> latest{Now()};
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300'000; ++i) {
        std::int64_t seen = latest.load();
        const std::int64_t now = Now();
        if (now < seen) failed = true;
        while (seen < now && !latest.compare_exchange_weak(seen, now)) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(failed);
}

}  // namespace
}  // namespace moesaic::profiling
