// Who executes a job: the lanes (one for each worker), how they share the tasks, and how they wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "threadpool/deque.h"
#include "threadpool/futex.h"
#include "threadpool/job.h"
#include "threadpool/lane_clock.h"

namespace moesaic::threadpool {

/// Marks the calling thread as executing tasks of a pool, so that a Run() inside a task is recognised. Frames nest: a task of
/// one pool may call another pool.
class WorkerFrame {
 public:
  WorkerFrame(const void* pool, int worker) : pool_(pool), worker_(worker), outer_(innermost) { innermost = this; }
  ~WorkerFrame() { innermost = outer_; }
  WorkerFrame(const WorkerFrame&) = delete;
  WorkerFrame& operator=(const WorkerFrame&) = delete;

  /// The worker of `pool` that this thread is, or -1.
  static int WorkerOf(const void* pool);

 private:
  const void* pool_;
  int worker_;
  const WorkerFrame* outer_;
  static thread_local const WorkerFrame* innermost;
};

/// A lane looks for work in this order: the successor that its last task made ready, its own deque (newest first), the tasks
/// without predecessors (in order of addition), the queue of its NUMA node, the shared queue (tasks that start in turn, and the
/// overflow of full deques), the deques of lanes on its node; and after some looks in vain the queues of other nodes and all
/// other deques.
///
/// Two ways to take part in a run:
/// - RunUntilDone(): the caller (lane 0), and every thread of an OpenMP region. Returns when all tasks have ended.
/// - WaitForWork() and Help(): own threads, which come and go. A run does not wait for a helper that sleeps: one that comes
///   late finds the run closed. So a small job costs no wake-up.
class Executor {
 public:
  /// @param pool   whose workers these are: the identity in WorkerFrame
  /// @param lanes  how many workers, at least 1
  /// @param yield  there are more lanes than cores: waiting lanes give their core away
  /// @param nodes  NUMA nodes that have a queue of their own; tasks of others go to the shared one
  Executor(const void* pool, int lanes, bool yield, int nodes = 1);

  int lanes() const { return static_cast<int>(lanes_.size()); }
  Job& job() { return job_; }

  /// Around a run from outside, while timers are on: where the time of every lane goes (profiling/calls.h).
  void StartClock();
  void StopClock();

  /// Makes the prepared job visible. `helpers_stay`: every lane calls RunUntilDone() and must be woken at the end.
  void Start(bool helpers_stay);
  /// Lets helpers in, and wakes the first of them.
  void OpenToHelpers();
  /// Keeps helpers out and waits until the last one has left. After it, the next job may be prepared.
  void CloseToHelpers();

  /// Executes tasks until all have ended. `worker` is what the tasks are told, normally `lane`.
  void RunUntilDone(int lane, int worker);

  /// Spins for a moment, while a run is open as long as RunUntilDone(), then sleeps, until there may be work; false once Stop()
  /// was called.
  bool WaitForWork(int lane);
  /// Executes tasks of the open run until none can be found.
  void Help(int lane);
  /// Ends WaitForWork() on every lane.
  void Stop();

  /// Tells on which NUMA node a lane runs; kAnyNode: it takes no part in the next run. Any thread; only speed and the placement
  /// of memory depend on it.
  void SetNode(int lane, int node) { nodes_[lane].store(node, std::memory_order_relaxed); }

 private:
  struct alignas(64) Lane {
    Deque deque;
    // Read and written by others: 1 while the lane sleeps; 1 while a helper is inside the run (2: and the closer sleeps).
    alignas(64) std::atomic<std::uint32_t> parked{0};
    std::atomic<std::uint32_t> inside{0};
    // The lane's own.
    alignas(64) std::int64_t ended = 0;
    std::uint32_t victim = 0;
    int looks = 0;  ///< in vain, on its own node
    LaneClock clock;
  };
  /// Its places are in places_, and each task of it has one, so that it is never full.
  struct alignas(64) Queue {
    std::int64_t first = 0;
    std::atomic<std::int64_t> begin{0};
    alignas(64) std::atomic<std::int64_t> end{0};

    std::int64_t size() const { return end.load(std::memory_order_seq_cst) - begin.load(std::memory_order_seq_cst); }
    bool empty() const { return size() <= 0; }
  };

  void Work(int lane, int worker);
  TaskId NextTask(int lane);
  TaskId TakeFromOtherNodes(int lane);
  TaskId Steal(int lane, bool near);
  TaskId Execute(int lane, TaskId task, int worker);
  void Push(Lane& lane, TaskId task);
  /// The queue of a node (kAnyNode: the shared one).
  Queue& QueueOf(int node) { return queues_[node < 0 || node >= nodes_with_queue() ? 0 : node + 1]; }
  int nodes_with_queue() const { return static_cast<int>(queues_.size()) - 1; }
  bool MayTake(int lane, int node) const;
  void LayOutQueues();
  void PushQueue(Queue& queue, TaskId task);
  TaskId PopQueue(Queue& queue);
  void ReportEnded(Lane& lane);
  bool Done() const { return remaining_.load(std::memory_order_seq_cst) == 0; }
  bool HasWork(int lane) const;

  template <typename Ready>
  void Park(int lane, Ready ready);
  bool Unpark(int lane);
  void WakeFor(int lane, std::int64_t tasks);
  void WakeNode(int lane, std::int64_t tasks, int node);

  const void* const pool_;
  const bool yield_;
  std::vector<Lane> lanes_;
  std::vector<std::atomic<int>> nodes_;
  std::vector<Queue> queues_;  // the shared one, then one for each node
  // Written between runs only.
  Job job_;
  std::int64_t chunk_ = 1;
  bool helpers_stay_ = false;
  bool timed_ = false;
  std::int32_t group_ = 0;  ///< of profiling::GroupScope: the caller's
  std::int64_t clock_start_ns_ = 0;
  std::unique_ptr<std::atomic<TaskId>[]> places_;
  std::int64_t num_places_ = 0;

  alignas(64) std::atomic<std::int64_t> next_root_{0};
  alignas(64) std::atomic<std::int64_t> end_root_{0};
  std::atomic<std::uint32_t> open_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<std::int64_t> remaining_{0};
  std::atomic<bool> keeps_nodes_{false};
  alignas(64) std::atomic<int> num_parked_{0};
  std::atomic<int> num_searching_{0};
};

}  // namespace moesaic::threadpool
