// The clock of all timers: CLOCK_MONOTONIC, which is also Python's time.perf_counter_ns() and std::chrono::steady_clock.
//
// Between two tasks the caches hold something else, and then clock_gettime costs a range more than all the rest of it: code
// and data of its own pages. Where the system itself trusts the processor's time-stamp counter (the clock source "tsc", and
// the counter is invariant), Now() multiplies the counter along a line that is laid anew every second, through
// CLOCK_MONOTONIC. MOESAIC_CLOCK=system asks the system every time.
#pragma once

#include <atomic>
#include <cstdint>

namespace moesaic::profiling {

/// From readings of the counter to nanoseconds, for kTicks ticks at a time. Never goes back, on any thread: as soon as a line
/// has ended, the next one begins where CLOCK_MONOTONIC is, or where it ended if that is later, and its slope takes the
/// difference back. Before there is a line, and when the two clocks disagree about the past one (by 1/1000, more than any
/// time server may ask for: the machine has slept), the system is asked for kShortestNs.
class CounterLine {
 public:
  static constexpr std::uint64_t kTicks = std::uint64_t{1} << 31;  ///< below a second at more than 2.1 GHz
  static constexpr std::int64_t kShortestNs = 10'000'000;          ///< from which a slope is taken

  /// Both clocks at one moment.
  struct Reading {
    std::uint64_t ticks = 0;
    std::int64_t ns = 0;
  };

  /// Nanoseconds at a reading of the counter; -1: no line is valid then, Renew().
  std::int64_t At(std::uint64_t ticks) const {
    const std::uint32_t version = version_.load(std::memory_order_acquire);
    const std::uint64_t since = ticks - ticks_.load(std::memory_order_acquire);
    const std::int64_t ns = ns_.load(std::memory_order_acquire);
    const std::uint64_t slope = slope_.load(std::memory_order_acquire);
    if (since >= kTicks || slope == 0 || version % 2 != 0 || version_.load(std::memory_order_relaxed) != version) return -1;
    return ns + static_cast<std::int64_t>(since * slope >> 32);
  }

  /// Takes a new line from what both clocks say now, where the present one has ended; the time then. One thread at a time.
  std::int64_t Renew(Reading now);

  /// Forgets all it knows: no line is valid until the next one is laid, which may begin before this one would have ended. One
  /// thread at a time, as Renew().
  void Drop();

 private:
  void Lay(Reading from, std::uint64_t slope);

  // Read by every thread, together in one line of the cache.
  alignas(64) std::atomic<std::uint32_t> version_{0};  // odd: being changed
  std::atomic<std::uint64_t> ticks_{0};
  std::atomic<std::int64_t> ns_{0};
  std::atomic<std::uint64_t> slope_{0};  // ns a tick, times 2^32; 0: no line

  Reading last_;            // from which the next slope is taken
  double ns_per_tick_ = 0;  // of the present line, before it takes a difference back; 0: none
  std::int64_t most_ = 0;   // no thread was told more
};

/// Throws std::invalid_argument where MOESAIC_CLOCK says anything but "system".
void CheckClock();

namespace internal {
extern CounterLine counter_line;
std::int64_t NowOfSystem();
}  // namespace internal

/// Whether Now() is the CPU time of the calling thread instead, until this is called again: for measuring what one thread does
/// on hosts that others use. Readings of different threads, and from before and after, have nothing to do with each other.
void CountThreadTime(bool on);

/// Nanoseconds of CLOCK_MONOTONIC, or as CountThreadTime() says. Any thread; what one thread reads after another is not less.
inline std::int64_t Now() {
  __builtin_ia32_lfence();  // what came before is done
  const std::int64_t ns = internal::counter_line.At(__builtin_ia32_rdtsc());
  return ns >= 0 ? ns : internal::NowOfSystem();
}

}  // namespace moesaic::profiling
