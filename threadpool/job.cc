#include "threadpool/job.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace moesaic::threadpool {

void Job::Prepare(const TaskGraph& graph) {
  nodes_ = graph.nodes_.data();
  size_ = graph.size();
  any_in_turn_ = graph.any_in_turn_;
  any_node_ = graph.any_node_;
  keeps_nodes_ = graph.keeps_nodes_;
  every_task_is_root_ = graph.edges_.empty() && !any_node_;
  node_roots_.clear();
  num_roots_ = size_;
  if (every_task_is_root_) return;

  if (waiting_capacity_ < size_) {
    const std::int64_t capacity = std::max(size_, 2 * waiting_capacity_);
    waiting_ = std::make_unique<std::atomic<std::int32_t>[]>(capacity);
    waiting_capacity_ = capacity;
  }
  roots_.clear();
  for (std::int64_t i = 0; i < size_; ++i) {
    waiting_[i].store(nodes_[i].predecessors, std::memory_order_relaxed);
    if (nodes_[i].predecessors == 0) (nodes_[i].node < 0 ? roots_ : node_roots_).push_back(static_cast<TaskId>(i));
  }
  num_roots_ = static_cast<std::int64_t>(roots_.size());

  // Counting sort of the edges by `before`: first_successor_[t + 1] walks from the start of t's successors to their end.
  bool every_edge_goes_up = true;
  first_successor_.assign(size_ + 2, 0);
  for (const TaskGraph::Edge& edge : graph.edges_) {
    ++first_successor_[edge.before + 2];
    every_edge_goes_up &= edge.before < edge.after;
  }
  for (std::int64_t i = 2; i < size_ + 2; ++i) first_successor_[i] += first_successor_[i - 1];
  successors_.resize(graph.edges_.size());
  for (const TaskGraph::Edge& edge : graph.edges_) successors_[first_successor_[edge.before + 1]++] = edge.after;

  // A graph that was built in the order of its dependencies, the usual case, cannot have a cycle.
  if (!every_edge_goes_up) CheckAcyclic();
}

void Job::Prepare(std::int64_t count, TaskFunction function, void* context) {
  nodes_ = nullptr;
  function_ = function;
  context_ = context;
  size_ = num_roots_ = count;
  every_task_is_root_ = true;
  any_in_turn_ = any_node_ = keeps_nodes_ = false;
  node_roots_.clear();
}

void Job::CheckAcyclic() {
  unvisited_.resize(size_);
  for (std::int64_t i = 0; i < size_; ++i) unvisited_[i] = nodes_[i].predecessors;
  order_ = roots_;
  order_.insert(order_.end(), node_roots_.begin(), node_roots_.end());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const TaskId task = order_[i];
    for (std::int32_t k = first_successor_[task]; k < first_successor_[task + 1]; ++k) {
      if (--unvisited_[successors_[k]] == 0) order_.push_back(successors_[k]);
    }
  }
  if (static_cast<std::int64_t>(order_.size()) == size_) return;
  const auto task = std::find_if(unvisited_.begin(), unvisited_.end(), [](std::int32_t left) { return left > 0; });
  throw std::invalid_argument("graph: a cycle of dependencies holds back " + std::to_string(size_ - order_.size()) + " of " +
                              std::to_string(size_) + " tasks, the first of them task " +
                              std::to_string(task - unvisited_.begin()) + "; expected none");
}

void Job::Call(TaskId task, int worker) noexcept {
  if (failed_.load(std::memory_order_relaxed)) return;
  const TaskGraph::Node& node = nodes_[task];
  try {
    node.function(node.context, node.index, worker);
  } catch (...) {
    Fail();
  }
}

void Job::CallRange(std::int64_t begin, std::int64_t end, int worker) noexcept {
  try {
    for (std::int64_t i = begin; i < end && !failed_.load(std::memory_order_relaxed); ++i) function_(context_, i, worker);
  } catch (...) {
    Fail();
  }
}

void Job::Fail() noexcept {
  if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
}

void Job::RethrowFailure() {
  if (!failed_.load(std::memory_order_relaxed)) return;
  failed_.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace moesaic::threadpool
