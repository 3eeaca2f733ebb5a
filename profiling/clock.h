// The clock of all timers: steady, the same that Python's time.perf_counter_ns() reads.
#pragma once

#include <chrono>
#include <cstdint>

namespace moesaic::profiling {

/// Nanoseconds since an arbitrary moment.
inline std::int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace moesaic::profiling
