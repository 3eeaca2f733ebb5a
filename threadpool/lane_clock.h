// Where a lane's time in one run goes. Written by the lane, read by the caller of the run after it.
#pragma once

#include <array>
#include <cstdint>

#include "profiling/clock.h"
#include "profiling/trace.h"

namespace moesaic::threadpool {

class LaneClock {
 public:
  /// kAway: not in the run (yet, or any more).
  enum State { kStealing, kWaiting, kParked, kBusy, kAway };
  static_assert(kStealing == static_cast<int>(profiling::Idle::kStealing) &&
                kWaiting == static_cast<int>(profiling::Idle::kWaiting) &&
                kParked == static_cast<int>(profiling::Idle::kParked));

  /// Before a run: whether it is timed.
  void Restart(bool on) {
    on_ = on;
    state_ = kAway;
    ns_.fill(0);
    steals_ = parks_ = 0;
  }

  void Enter(State state) {
    if (!on_) return;
    const std::int64_t now = profiling::Now();
    if (state_ != kAway) {
      ns_[state_] += now - since_;
      // The looks between two tasks are too short for a time line.
      if (state_ != kBusy && now - since_ > kShortestIdleNs && profiling::TraceEnabled()) {
        profiling::Record({.begin_ns = since_, .end_ns = now, .id = state_, .kind = profiling::EventKind::kIdle});
      }
    }
    parks_ += state == kParked;
    state_ = state;
    since_ = now;
  }

  /// The lane took a task from the lane `victim`.
  void Stole(int victim) {
    if (!on_) return;
    ++steals_;
    if (profiling::TraceEnabled()) {
      const std::int64_t now = profiling::Now();
      profiling::Record({.begin_ns = now, .end_ns = now, .id = victim, .kind = profiling::EventKind::kSteal});
    }
  }

  /// The lane has put tasks into its deque.
  void Queued(std::int64_t tasks) {
    if (!on_ || !profiling::TraceEnabled()) return;
    const std::int64_t now = profiling::Now();
    profiling::Record(
        {.begin_ns = now, .end_ns = now, .id = static_cast<std::int32_t>(tasks), .kind = profiling::EventKind::kQueue});
  }

  std::int64_t ns(State state) const { return ns_[state]; }
  std::int64_t steals() const { return steals_; }
  std::int64_t parks() const { return parks_; }

 private:
  static constexpr std::int64_t kShortestIdleNs = 1000;

  bool on_ = false;
  State state_ = kAway;
  std::int64_t since_ = 0;
  std::array<std::int64_t, kAway> ns_{};
  std::int64_t steals_ = 0;
  std::int64_t parks_ = 0;
};

}  // namespace moesaic::threadpool
