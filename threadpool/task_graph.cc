#include <limits>
#include <stdexcept>
#include <string>

#include "threadpool/pool.h"

namespace moesaic::threadpool {

TaskId TaskGraph::Add(TaskFunction function, void* context, std::int64_t index, Start start) {
  if (function == nullptr) throw std::invalid_argument("function: null, expected a function");
  if (nodes_.size() >= static_cast<std::size_t>(std::numeric_limits<TaskId>::max())) {
    throw std::length_error("TaskGraph: more than 2^31 - 1 tasks");
  }
  nodes_.push_back({function, context, index, 0, kAnyNode, start});
  any_in_turn_ |= start == Start::kInTurn;
  return static_cast<TaskId>(nodes_.size() - 1);
}

TaskId TaskGraph::AddOnNode(TaskFunction function, void* context, std::int64_t index, int node) {
  if (node < 0 || node > std::numeric_limits<std::int16_t>::max()) {
    throw std::invalid_argument("node: " + std::to_string(node) + ", expected a place in Topology::nodes");
  }
  const TaskId task = Add(function, context, index, Start::kInTurn);
  nodes_[task].node = static_cast<std::int16_t>(node);
  any_node_ = true;
  return task;
}

void TaskGraph::AddEdge(TaskId before, TaskId after) {
  const auto count = static_cast<TaskId>(nodes_.size());
  const auto check = [count](const char* name, TaskId id) {
    if (id < 0 || id >= count) {
      throw std::invalid_argument(std::string(name) + ": task " + std::to_string(id) + ", expected 0 <= id < " +
                                  std::to_string(count));
    }
  };
  check("before", before);
  check("after", after);
  if (before == after) {
    throw std::invalid_argument("after: task " + std::to_string(after) + " cannot wait for itself, expected another task");
  }
  if (edges_.size() >= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::length_error("TaskGraph: more than 2^31 - 1 edges");
  }
  edges_.push_back({before, after});
  ++nodes_[after].predecessors;
}

void TaskGraph::Clear() {
  nodes_.clear();
  any_in_turn_ = any_node_ = keeps_nodes_ = false;
  edges_.clear();
}

std::int64_t TaskGraph::size() const { return static_cast<std::int64_t>(nodes_.size()); }

}  // namespace moesaic::threadpool
