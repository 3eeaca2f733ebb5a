// Single events on a time line: which phase ran where and when, for whom, and what the workers did in between.
//
// The sums of range.h say how much; a trace says in which order. It is bounded: every thread has a buffer of fixed capacity,
// and what no longer fits is counted and dropped.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::profiling {

enum class EventKind : std::uint8_t {
  kRange,  ///< a Range; id: RangeId
  kIdle,   ///< a worker without a task; id: Idle
  kSteal,  ///< a task changes its worker; id: the lane it came from
  kQueue,  ///< id: tasks that wait in the lane's deque
};

/// What a worker does inside a run while it executes no task.
enum class Idle : std::int32_t {
  kStealing,  ///< looks through the queues for a task
  kWaiting,   ///< spins: tasks are left, but each waits for another one
  kParked,    ///< sleeps
};

struct Event {
  std::int64_t begin_ns = 0;  ///< of the steady clock
  std::int64_t end_ns = 0;    ///< begin_ns for kSteal and kQueue
  double flops = 0;           ///< kRange: its work, or what fused work it stands for
  double bytes = 0;
  std::int32_t id = 0;
  std::int32_t expert = -1;  ///< kRange: of the task around it (TaskScope); -1: none
  std::int32_t rows = 0;
  EventKind kind = EventKind::kRange;
};

/// The events of one thread, in the order in which they ended.
struct ThreadTrace {
  int os_id = 0;             ///< gettid()
  int lane = -1;             ///< worker of a pool that it last was; -1: none
  std::string name;          ///< as the system knows it
  std::int64_t dropped = 0;  ///< events that did not fit
  std::vector<Event> events;
};

inline constexpr std::int64_t kDefaultTraceCapacity = 1 << 16;  ///< 3 MB a thread

/// Starts an empty trace. `capacity`: events a thread, at least 1. Throws std::invalid_argument. Any thread.
void StartTrace(std::int64_t capacity = kDefaultTraceCapacity);
/// Events are kept until the next StartTrace().
void StopTrace();
/// What has been recorded since StartTrace(), also of threads that have ended (the last 256 of them). Any thread, at any time.
std::vector<ThreadTrace> ReadTrace();

namespace internal {
extern std::atomic<bool> trace_enabled;
}
inline bool TraceEnabled() { return internal::trace_enabled.load(std::memory_order_relaxed); }

/// Adds an event of the calling thread; nothing while no trace is on, or when memory for the buffer cannot be had.
void Record(const Event& event) noexcept;

/// Says which worker of a pool the calling thread is; also names it to an NVTX tool.
void SetThreadLane(int lane) noexcept;

struct TaskSubject {
  std::int32_t expert = -1;  ///< -1: outside any task
  std::int32_t rows = 0;
};

/// What a task works on. Until the end of the scope, events and NVTX ranges of the calling thread carry it. Nests.
class TaskScope {
 public:
  TaskScope(std::int64_t expert, std::int64_t rows) : outer_(current) {
    current = {static_cast<std::int32_t>(expert), static_cast<std::int32_t>(rows)};
  }
  ~TaskScope() { current = outer_; }
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

  static TaskSubject Current() { return current; }

 private:
  TaskSubject outer_;
  inline static thread_local constinit TaskSubject current{};
};

}  // namespace moesaic::profiling
