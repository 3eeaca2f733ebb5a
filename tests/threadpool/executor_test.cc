// What only shows below the pool: from whom a lane steals.
#include "threadpool/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace moesaic::threadpool {
namespace {

// Lane 0 on node 0 and lane 1 on node 1 each hold ready tasks and are busy; lane 2 on `thief_node` has to take the tasks of its
// own node first.
class StealOrder {
 public:
  explicit StealOrder(int thief_node) : executor_(this, 3, true) {
    executor_.SetNode(0, 0);
    executor_.SetNode(1, 1);
    executor_.SetNode(2, thief_node);
    for (int node = 0; node < 2; ++node) {
      // The first successor stays on the lane and holds it until the thief has taken all the others.
      const TaskId root = Add([](StealOrder&, int, int) {}, node);
      graph_.AddEdge(root, Add([](StealOrder& self, int, int) { self.Hold(); }, node));
      for (int i = 0; i < kTasks; ++i) {
        graph_.AddEdge(root, Add([](StealOrder& self, int node, int worker) { self.Take(node, worker); }, node));
      }
    }
  }

  /// The nodes from which the thief took its tasks, in that order.
  std::vector<int> Run() {
    executor_.job().Prepare(graph_);
    executor_.Start(true);
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 3; ++lane) {
      lanes.emplace_back([this, lane] { executor_.RunUntilDone(lane, lane); });
      while (lane < 2 && held_ != lane + 1) std::this_thread::yield();
    }
    for (std::thread& lane : lanes) lane.join();
    executor_.job().RethrowFailure();
    return taken_from_;
  }

 private:
  static constexpr int kTasks = 5;
  using Body = void (*)(StealOrder&, int node, int worker);

  TaskId Add(Body body, int node) {
    bodies_.push_back(body);
    return graph_.Add(
        [](void* context, std::int64_t index, int worker) {
          auto& self = *static_cast<StealOrder*>(context);
          const auto task = static_cast<std::size_t>(index / 2);
          self.bodies_[task](self, static_cast<int>(index % 2), worker);
        },
        this, 2 * static_cast<std::int64_t>(bodies_.size() - 1) + node);
  }

  void Hold() {
    ++held_;
    while (taken_ < 2 * kTasks) std::this_thread::yield();
  }

  void Take(int node, int worker) {
    EXPECT_EQ(worker, 2);
    taken_from_.push_back(node);
    ++taken_;
  }

  Executor executor_;
  TaskGraph graph_;
  std::vector<Body> bodies_;
  std::atomic<int> held_{0}, taken_{0};
  std::vector<int> taken_from_;  // only lane 2 writes
};

TEST(Executor, StealsOnItsOwnNodeFirst) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_EQ(StealOrder(0).Run(), (std::vector<int>{0, 0, 0, 0, 0, 1, 1, 1, 1, 1}));
    EXPECT_EQ(StealOrder(1).Run(), (std::vector<int>{1, 1, 1, 1, 1, 0, 0, 0, 0, 0}));
  }
}

}  // namespace
}  // namespace moesaic::threadpool
