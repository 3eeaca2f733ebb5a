// One object that is a timer and an NVTX range.
//
//   const RangeId kId = RegisterRange("D3_gemm", "backward");
//   { Range range(kId); ... }
//
// Times are added up per thread, without locks; Snapshot() gathers them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moesaic::profiling {

using RangeId = std::int32_t;

enum class RangeKind : std::int8_t {
  kTimed,
  /// Holds the ranges whose category is its name, and its times are theirs, added up. Nobody opens it: tools see it around each
  /// of them, so that it nests rightly wherever they run.
  kSum,
};

/// Registers a range by name; the same name and category give the same id, and the kind of the first time. A kSum range comes
/// before those that it holds. Names stay for the life of the process. Thread safe.
RangeId RegisterRange(const std::string& name, const std::string& category, RangeKind kind = RangeKind::kTimed);

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
  double flops = 0;                ///< as given when they opened, summed
  double bytes = 0;
  bool apportioned = false;  ///< part of its time was measured together with other work and divided by flops (Share)
};

/// Timers are off until switched on; NVTX ranges are always emitted and cost a predicted branch without a tool.
/// Throws std::invalid_argument where MOESAIC_CLOCK is not known.
void SetTimersEnabled(bool enabled);
bool TimersEnabled();
/// Everything to zero, what calls.h counts too; a trace goes on.
void Reset();
std::vector<RangeStats> Snapshot();  ///< every registered range, in the order of registration: entry i has the id i

/// Whom the work of a thread is for; 0: nobody in particular. What a group means is up to whoever opens it (calls.h: layers).
using GroupId = std::int32_t;

/// Until the end of the scope, ranges of the calling thread count for this group as well. A pool's workers take over the group
/// of the thread that runs a job. Nests.
class GroupScope {
 public:
  explicit GroupScope(GroupId group) : outer_(current) { current = group; }
  ~GroupScope() { current = outer_; }
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

  static GroupId Current() { return current; }

 private:
  GroupId outer_;
  inline static thread_local constinit GroupId current = 0;
};

/// What one range cost for one group, summed over threads.
struct GroupStats {
  GroupId group = 0;
  RangeId id = 0;
  std::int64_t calls = 0;
  std::int64_t thread_ns = 0;
  double flops = 0;
  double bytes = 0;
};
/// Since the last Reset(), in the order of groups and ids; without group 0, kSum ranges and what was never entered. A group
/// costs each thread that works for it about 5 KB, which are kept.
std::vector<GroupStats> GroupSnapshot();

/// Counts one range that something else timed, such as a copy by a device, as if the calling thread had opened and closed it.
/// Nothing while timers are off, or if it began before the last Reset(). Throws std::bad_alloc.
/// @param begin_ns  of the steady clock
/// @param ns        how long it took
void AddTimed(RangeId id, std::int64_t begin_ns, std::int64_t ns, double bytes);

struct Work {
  double flops = 0;
  double bytes = 0;
};

/// Work of another range that is fused with the one that opens: its time is divided by flops between the two.
struct Share {
  RangeId id = 0;
  Work work;
};

/// Opens a range on the calling thread and closes it at the end of the scope. Nests.
class Range {
 public:
  static constexpr std::size_t kMostShares = 3;

  /// @param work    what it is about to do itself
  /// @param shares  what else is done inside, at most kMostShares; those without flops do not count. A tool (NVTX) sees one
  ///                range with all of the work
  explicit Range(RangeId id, Work work = {}, std::span<const Share> shares = {});
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  RangeId id_;
  int pushed_ = 0;  ///< ranges that a tool was shown
  std::int64_t start_ns_ = 0;
  Work work_;
  std::size_t num_shares_ = 0;
  Share shares_[kMostShares];
};

}  // namespace moesaic::profiling
