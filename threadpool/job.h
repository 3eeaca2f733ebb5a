// What is being run: a graph, or a function over a range, made ready for many workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "threadpool/pool.h"

namespace moesaic::threadpool {

/// The state of one run that does not depend on who executes it. Its buffers are kept from run to run.
class Job {
 public:
  /// Takes the graph, which must stay as it is until the run ends. Throws std::invalid_argument if it has a cycle.
  void Prepare(const TaskGraph& graph);

  /// function(context, i, worker) for i in [0, count).
  void Prepare(std::int64_t count, TaskFunction function, void* context);

  /// Tasks that queue up when they become ready (TaskGraph::Start::kInTurn).
  bool any_in_turn() const { return any_in_turn_; }
  bool in_turn(TaskId task) const { return nodes_[task].start == TaskGraph::Start::kInTurn; }

  /// Tasks that queue up at a NUMA node, and the node of a task.
  bool any_node() const { return any_node_; }
  bool keeps_nodes() const { return keeps_nodes_; }
  int node(TaskId task) const { return nodes_[task].node; }

  bool is_range() const { return nodes_ == nullptr; }
  std::int64_t size() const { return size_; }

  /// Tasks without predecessors in the order of addition, but those of a node; of a range, its indices.
  std::int64_t num_roots() const { return num_roots_; }
  TaskId root(std::int64_t i) const { return every_task_is_root_ ? static_cast<TaskId>(i) : roots_[i]; }
  std::span<const TaskId> node_roots() const { return node_roots_; }

  /// Calls the task's function unless the job has failed; keeps the first exception.
  void Call(TaskId task, int worker) noexcept;
  void CallRange(std::int64_t begin, std::int64_t end, int worker) noexcept;

  /// Ends `task`: ready(successor) for each successor for which this was the last one to wait for.
  template <typename Ready>
  void End(TaskId task, Ready ready) {
    if (every_task_is_root_) return;
    for (std::int32_t i = first_successor_[task]; i < first_successor_[task + 1]; ++i) {
      std::atomic<std::int32_t>& waiting = waiting_[successors_[i]];
      // One left can only be this one, and then no atomic decrement is needed.
      if (waiting.load(std::memory_order_acquire) == 1 || waiting.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ready(successors_[i]);
      }
    }
  }

  /// Rethrows the first exception, if any. Only after the run.
  void RethrowFailure();

 private:
  void CheckAcyclic();
  void Fail() noexcept;

  const TaskGraph::Node* nodes_ = nullptr;  // null: a range
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t num_roots_ = 0;
  bool every_task_is_root_ = true;
  bool any_in_turn_ = false;
  bool any_node_ = false;
  bool keeps_nodes_ = false;

  std::vector<TaskId> roots_;
  std::vector<TaskId> node_roots_;
  std::vector<std::int32_t> first_successor_;  // [size + 1], into successors_
  std::vector<TaskId> successors_;
  std::unique_ptr<std::atomic<std::int32_t>[]> waiting_;  // [size]: predecessors that have not ended
  std::int64_t waiting_capacity_ = 0;
  std::vector<TaskId> order_;            // scratch of CheckAcyclic
  std::vector<std::int32_t> unvisited_;  // scratch of CheckAcyclic

  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace moesaic::threadpool
