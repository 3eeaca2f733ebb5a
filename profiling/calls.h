// What surrounds the phases: the runs of a thread pool with the idle time of its workers, and the calls from Python.
//
// In a call that lasts `wall`, `threads` workers have threads x wall of time. It divides without remainder into
//   python (before and after the engine) | serial (the caller alone; the others have nothing to do) | busy | idle, of three
//   kinds.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "profiling/range.h"

namespace moesaic::profiling {

/// Sums over runs of a pool. Times over lanes add up: busy + stealing + waiting + parked = lane_ns.
struct PoolTotals {
  std::int64_t runs = 0;  ///< joins: each run ends in one
  std::int64_t tasks = 0;
  std::int64_t steals = 0;
  std::int64_t parks = 0;          ///< times a worker went to sleep inside a run
  std::int64_t wall_ns = 0;        ///< from start to end of a run, summed over runs
  std::int64_t lane_ns = 0;        ///< the same, times the workers of the run
  std::int64_t busy_ns = 0;        ///< in tasks
  std::int64_t stealing_ns = 0;    ///< looking through the queues
  std::int64_t waiting_ns = 0;     ///< spinning, while tasks were left that waited for others
  std::int64_t parked_ns = 0;      ///< asleep, or not (yet) in the run
  std::int64_t least_busy_ns = 0;  ///< of the least busy worker of each run, summed over runs
  std::int64_t most_busy_ns = 0;   ///< of the busiest; with an even load both are busy_ns / workers

  PoolTotals& operator+=(const PoolTotals& other);
  PoolTotals operator-(const PoolTotals& other) const;
};

/// Adds a run that the calling thread waited for.
void AddPoolRun(const PoolTotals& run);
/// Of the whole process since the last Reset() of range.h.
PoolTotals PoolSnapshot();

enum class CallKind : std::int8_t { kForward, kBackward };

/// One call of a layer, from Python to Python. begin <= engine_begin <= engine_end <= end, of the steady clock.
struct CallRecord {
  CallKind kind = CallKind::kForward;
  bool first = false;  ///< the first of its kind and layer in this process
  int layer = 0;
  int threads = 0;
  std::int64_t tokens = 0;
  std::int64_t jobs = 0;       ///< pieces into which the experts' rows were cut
  std::int64_t job_slots = 0;  ///< of them, under way at a time at most
  std::int64_t job_tasks = 0;  ///< of all stages of all of them
  std::int64_t begin_ns = 0;
  std::int64_t engine_begin_ns = 0;
  std::int64_t engine_end_ns = 0;
  std::int64_t end_ns = 0;
  PoolTotals pool;
};

/// The group (range.h) of a layer's calls, its first ones apart; and back.
constexpr int GroupOfCalls(int layer, bool first) { return 2 * layer + (first ? 2 : 1); }
constexpr int LayerOfGroup(int group) { return (group - 1) / 2; }
constexpr bool IsFirstOfGroup(int group) { return group % 2 == 0; }

/// Records a call of the calling thread while timers are on. Begins at the last MarkEntry() of the thread, if there was one
/// since its last call, else now; ends with its scope, or later with MarkExit(). Inside the engine, ranges count for the
/// layer's group.
class CallTimer {
 public:
  CallTimer(CallKind kind, int layer);
  ~CallTimer();
  CallTimer(const CallTimer&) = delete;
  CallTimer& operator=(const CallTimer&) = delete;

  void EngineBegins();
  void EngineEnds(std::int64_t tokens, int threads);

 private:
  CallRecord record_;
  std::optional<GroupScope> group_;
  bool timed_;
  bool ended_ = false;
};

/// Python has been asked for a call; the next CallTimer of this thread begins here.
void MarkEntry();
/// Python returns from that call: the last one that this thread recorded ends now.
void MarkExit();
/// Says how the call under way on this thread is cut: the fields of its CallRecord.
void NoteJobs(std::int64_t jobs, std::int64_t slots, std::int64_t tasks);

struct CallSnapshot {
  std::vector<CallRecord> calls;  ///< in the order in which they ended
  std::int64_t dropped = 0;
};
/// Calls since the last Reset(), at most 65,536; what came after those is counted.
CallSnapshot Calls();

/// For range.h: what Reset() empties here.
void ResetCalls();

}  // namespace moesaic::profiling
