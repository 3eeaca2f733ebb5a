// One object that is a timer and an NVTX range.
//
//   const RangeId kId = RegisterRange("D3_gemm", "backward");
//   { Range range(kId); ... }
//
// Times are added up per thread, without locks; Snapshot() gathers them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::profiling {

using RangeId = std::int32_t;

/// Registers a range by name; the same name and category give the same id. Names stay for the life of the process. Thread safe.
RangeId RegisterRange(const std::string& name, const std::string& category);

/// What one range cost since the last Reset(). Ranges of different threads overlap: thread times may be added up, spans not.
struct RangeStats {
  std::string name;
  std::string category;
  std::int64_t calls = 0;          ///< ranges closed
  std::int64_t thread_ns = 0;      ///< time inside, summed over threads
  std::int64_t min_thread_ns = 0;  ///< least over the threads that entered it
  std::int64_t max_thread_ns = 0;  ///< most over the threads that entered it
  std::int64_t span_ns = 0;        ///< from the first opening to the last closing
  int threads = 0;                 ///< threads that entered it
  double flops = 0;                ///< as given by AddWork, summed
  double bytes = 0;
  bool apportioned = false;  ///< part of its time was measured together with other work and divided by flops (Range::Share)
};

/// Timers are off until switched on; NVTX ranges are always emitted and cost a predicted branch without a tool.
void SetTimersEnabled(bool enabled);
bool TimersEnabled();
/// Everything to zero, what calls.h counts too; a trace goes on.
void Reset();
std::vector<RangeStats> Snapshot();  ///< every registered range, in the order of registration

/// Counts one range that something else timed, such as a copy by a device, as if the calling thread had opened and closed it.
/// Nothing while timers are off, or if it began before the last Reset(). Throws std::bad_alloc.
/// @param begin_ns  of the steady clock
/// @param ns        how long it took
void AddTimed(RangeId id, std::int64_t begin_ns, std::int64_t ns, double bytes);

/// Opens a range on the calling thread and closes it at the end of the scope. Nests.
class Range {
 public:
  explicit Range(RangeId id);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  /// Adds to the work counted for this range (only read while timers are on).
  void AddWork(double flops, double bytes);

  /// Says that this much of the work done inside belongs to another range, fused with this one: when this range closes, the
  /// time is divided by flops between the two. At most three others; the tool's view (NVTX) shows this range alone.
  void Share(RangeId other, double flops, double bytes);

 private:
  struct Shared {
    RangeId id;
    double flops;
    double bytes;
  };
  void Count(RangeId id, std::int64_t end_ns, std::int64_t thread_ns);
  static void Trace(RangeId id, std::int64_t begin_ns, std::int64_t end_ns, double flops, double bytes);

  RangeId id_;
  std::int64_t start_ns_;
  double flops_ = 0;
  double bytes_ = 0;
  int shares_ = 0;
  Shared shared_[3];
};

}  // namespace moesaic::profiling
