// Work-stealing execution of task graphs.
//
// A graph is built, run once or many times by Pool::Run, and reused by Clear(), which keeps its memory. The calling thread is
// worker 0 of the run.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace moesaic::threadpool {

/// The function of a task. `context` and `index` are what Add() was given; `worker` is in [0, Pool::num_threads()) and no two
/// tasks run with the same `worker` at the same time: it may index scratch memory.
using TaskFunction = void (*)(void* context, std::int64_t index, int worker);

using TaskId = std::int32_t;

struct Topology;

/// A task for whoever has nothing to do.
inline constexpr int kAnyNode = -1;

/// Tasks and the order between them. Not thread safe. Tasks without predecessors start in the order in which they were added,
/// as far as threads are free; when a task ends, one successor that it made ready runs next on the same worker (its data is
/// still in that core's cache), the others can be stolen.
class TaskGraph {
 public:
  enum class Start : std::uint8_t {
    kNext,    ///< on the worker that made it ready, before anything else, unless it is stolen
    kInTurn,  ///< new work: once it is ready it queues up, and workers that have nothing to go on with take the oldest first
  };

  TaskId Add(TaskFunction function, void* context, std::int64_t index, Start start = Start::kNext);

  /// New work for a NUMA node (its place in Topology::nodes): once it is ready it queues up there. Workers on other nodes take
  /// it only when they have found nothing of their own for some microseconds. What follows on it stays with the worker that
  /// took it.
  TaskId AddOnNode(TaskFunction function, void* context, std::int64_t index, int node);

  /// Makes those tasks run on their node without exception, unless it has no worker: for memory that is placed by first touch.
  void KeepOnNodes() { keeps_nodes_ = true; }

  /// `after` starts once `before` has ended, and sees all that it wrote. Throws std::invalid_argument on an unknown id or
  /// before == after. A cycle is reported by Pool::Run (std::invalid_argument), before any task starts.
  void AddEdge(TaskId before, TaskId after);

  void Clear();
  std::int64_t size() const;

 private:
  friend class Job;
  struct Node {
    TaskFunction function;
    void* context;
    std::int64_t index;
    std::int32_t predecessors;
    std::int16_t node;
    Start start;
  };
  struct Edge {
    TaskId before;
    TaskId after;
  };
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  bool any_in_turn_ = false;
  bool any_node_ = false;
  bool keeps_nodes_ = false;
};

/// Where the threads of a pool come from.
enum class ThreadSource {
  kOwn,     ///< threads of the pool's own, pinned to the cores this process may use (C++ programs)
  kOpenMp,  ///< the process's OpenMP team, in whose one region the workers steal (beside PyTorch)
};

/// Whether the OpenMP runtime keeps the threads of its team on places (OMP_PROC_BIND, GOMP_CPU_AFFINITY). Where it does not,
/// the system may move a thread away from the NUMA node whose work it does.
bool OpenMpThreadsAreBound();

/// Threads: every member function may be called from any thread; concurrent Run() calls are served one after the other, in the
/// order in which they came. Run() inside a task of the same pool executes the inner graph on the calling thread alone, with
/// the `worker` of the task around it: scratch memory indexed by it must not be in use across the inner Run(). A task may call
/// another pool like any caller, as long as two pools do not call each other.
///
/// fork(): the child's pools work, with own threads, even if other threads of the parent were in Run(). A child forked inside a
/// task must not return from that task.
class Pool {
 public:
  /// @param num_threads  workers, the caller of Run() among them; 0: MOESAIC_NUM_THREADS, else the cores this process may use
  ///                     (affinity and cgroup quota). May exceed the number of cores.
  /// Threads are started by the first Run() that needs them. Throws std::invalid_argument naming num_threads or
  /// MOESAIC_NUM_THREADS (an empty one counts as not set) unless 0 or 1 <= n <= 4096.
  explicit Pool(int num_threads = 0, ThreadSource source = ThreadSource::kOwn);
  /// A pool that takes this process to be on `machine`: where it is not the host's topology, the threads have places there in
  /// name only. (Tests, planning.)
  Pool(int num_threads, ThreadSource source, const Topology& machine);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// The process's pool; made on first use.
  static Pool& Default();

  int num_threads() const;
  /// Waits for running graphs. Throws std::invalid_argument unless 1 <= n <= 4096, std::logic_error inside a task of this pool.
  void SetNumThreads(int n);

  /// The machine that the pool runs on: Topology::Host(), unless it was made for another.
  const Topology& topology() const;

  ThreadSource source() const;
  /// Waits for running graphs. After fork(), a child always uses its own threads, whatever is set here: libgomp's team does not
  /// survive a fork. Throws std::logic_error inside a task of this pool.
  void SetSource(ThreadSource source);

  /// Runs every task of the graph and returns when the last has ended. The first exception that a task throws is rethrown
  /// here after all running tasks have ended; tasks not yet started are dropped, and the pool stays usable. The graph must not
  /// change meanwhile. Throws std::invalid_argument if it has a cycle, std::system_error if a thread cannot be started; then no
  /// task has run.
  void Run(const TaskGraph& graph);

  /// function(context, i, worker) for every i in [0, count), as tasks without order. Throws std::invalid_argument for a
  /// negative count or no function, otherwise as Run().
  void ParallelFor(std::int64_t count, TaskFunction function, void* context);

  /// The same for a callable: body(std::int64_t i, int worker).
  template <typename Body>
  void ParallelFor(std::int64_t count, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    ParallelFor(
        count, [](void* context, std::int64_t i, int worker) { (*static_cast<Callable*>(context))(i, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  /// While it lives, only the calling thread runs on the pool: its Run() calls go ahead, others wait. For memory that the
  /// callers of a pool share. Turns nest; inside a task of the pool, which has its caller's turn already, one changes nothing.
  /// Ends on the thread on which it began.
  class Turn;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

class Pool::Turn {
 public:
  explicit Turn(Pool& pool);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  friend class Pool::Impl;
  explicit Turn(Impl& pool);
  static bool Holds(const Impl& pool);

  Impl& pool_;
  const bool locks_;  // false: this thread holds the turn already
  const Turn* const outer_;
  static thread_local const Turn* innermost;
};

}  // namespace moesaic::threadpool
