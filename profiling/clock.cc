#include "profiling/clock.h"

#include <cpuid.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

namespace moesaic::profiling {

std::int64_t CounterLine::Renew(Reading now) {
  if (const std::int64_t ns = At(now.ticks); ns >= 0) return ns;  // another thread was faster
  const std::int64_t ns = std::max(now.ns, most_);
  const std::int64_t passed = now.ns - last_.ns;
  if (last_.ticks != 0 && passed < kShortestNs && ns_per_tick_ == 0) return most_ = ns;
  const double rate = static_cast<double>(passed) / static_cast<double>(now.ticks - last_.ticks);
  const bool plausible = last_.ticks != 0 && now.ticks > last_.ticks && rate > 0 && rate < 1 &&
                         (ns_per_tick_ == 0 || std::abs(rate / ns_per_tick_ - 1) < 1e-3);
  last_ = now;
  ns_per_tick_ = plausible ? rate : 0;
  if (!plausible) {
    Lay({}, 0);
    return most_ = ns;
  }
  const double slope = rate - static_cast<double>(ns - now.ns) / static_cast<double>(kTicks);
  Lay({now.ticks, ns}, static_cast<std::uint64_t>(std::ldexp(std::max(slope, rate / 2), 32)));
  most_ = ns + static_cast<std::int64_t>(kTicks * slope_.load(std::memory_order_relaxed) >> 32);
  return ns;
}

void CounterLine::Drop() {
  Lay({}, 0);
  last_ = {};
  ns_per_tick_ = 0;
  most_ = 0;
}

void CounterLine::Lay(Reading from, std::uint64_t slope) {
  const std::uint32_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, std::memory_order_relaxed);
  ticks_.store(from.ticks, std::memory_order_release);
  ns_.store(from.ns, std::memory_order_release);
  slope_.store(slope, std::memory_order_release);
  version_.store(version + 2, std::memory_order_release);
}

namespace {

std::string_view WantedClock() {
  const char* wanted = std::getenv("MOESAIC_CLOCK");
  return wanted == nullptr ? "" : wanted;
}

}  // namespace

void CheckClock() {
  const std::string_view wanted = WantedClock();
  if (wanted.empty() || wanted == "system") return;
  throw std::invalid_argument("MOESAIC_CLOCK is \"" + std::string(wanted) + "\"; expected \"system\", or nothing");
}

namespace internal {

constinit CounterLine counter_line;

namespace {

std::int64_t SystemNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The kernel takes "tsc" where the counters of all cores agree, and watches them.
bool CounterIsTrusted() {
  constexpr unsigned kInvariant = 1U << 8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0x80000007, &eax, &ebx, &ecx, &edx) == 0 || (edx & kInvariant) == 0) return false;
  if (WantedClock() == "system") return false;
  std::string source;
  std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource") >> source;
  return source == "tsc";
}

bool Trusted() {
  static const bool trusted = CounterIsTrusted();
  return trusted;
}
// Asked when the library is loaded: a child of fork() must not find the guard held by a thread that it does not have.
[[maybe_unused]] const bool kAsked = Trusted();

// The counter is read first: a line through it is never behind the system's clock.
CounterLine::Reading ReadBoth() {
  CounterLine::Reading best;
  std::uint64_t least = ~std::uint64_t{0};
  for (int i = 0; i < 4; ++i) {  // the shortest of some: a thread may lose its core between the two
    const CounterLine::Reading now{__builtin_ia32_rdtsc(), SystemNs()};
    const std::uint64_t took = __builtin_ia32_rdtsc() - now.ticks;
    if (took < least) {
      least = took;
      best = now;
    }
  }
  return best;
}

constinit std::mutex mutex;
constinit std::atomic<bool> thread_time{false};
// Handlers that are registered first take their locks last, as everybody else does who reads the clock with a lock of his own.
[[maybe_unused]] const int kRegistered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });

}  // namespace

std::int64_t NowOfSystem() {
  if (thread_time.load(std::memory_order_relaxed)) {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
  }
  if (!Trusted()) return SystemNs();
  const std::lock_guard lock(mutex);
  if (thread_time) return SystemNs();  // since it was asked above
  return counter_line.Renew(ReadBoth());
}

}  // namespace internal

void CountThreadTime(bool on) {
  const std::lock_guard lock(internal::mutex);
  internal::thread_time = on;
  internal::counter_line.Drop();
}

}  // namespace moesaic::profiling
