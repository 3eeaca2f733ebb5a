// Graphs: order, exactly one execution of each task, exceptions, cycles.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

/// A graph whose tasks check that their predecessors have ended and that nobody else runs as the same worker. The plain ints
/// are the point: under ThreadSanitizer a missing ordering between two tasks is a reported race.
class CheckedGraph {
 public:
  explicit CheckedGraph(int tasks, bool some_in_turn = false) : ended_(tasks), predecessors_(tasks), worker_of_(tasks, -1) {
    for (int i = 0; i < tasks; ++i) {
      graph_.Add(&CheckedGraph::Task, this, i,
                 some_in_turn && i % 5 == 3 ? TaskGraph::Start::kInTurn : TaskGraph::Start::kNext);
    }
  }

  void Edge(int before, int after) {
    graph_.AddEdge(before, after);
    predecessors_[after].push_back(before);
  }

  void Run(Pool& pool) {
    busy_ = std::vector<std::atomic<bool>>(pool.num_threads());
    ++round_;
    executed_ = 0;
    pool.Run(graph_);
    EXPECT_EQ(executed_, graph_.size());
    for (std::size_t i = 0; i < ended_.size(); ++i) ASSERT_EQ(ended_[i], round_) << "task " << i;
    EXPECT_EQ(mistakes_, 0);
  }

  int worker_of(int task) const { return worker_of_[task]; }

 private:
  static void Task(void* context, std::int64_t index, int worker) {
    auto& self = *static_cast<CheckedGraph*>(context);
    if (worker < 0 || worker >= static_cast<int>(self.busy_.size()) || self.busy_[worker].exchange(true)) {
      ++self.mistakes_;
      return;
    }
    if (self.ended_[index] != self.round_ - 1) ++self.mistakes_;
    for (const int before : self.predecessors_[index]) {
      if (self.ended_[before] != self.round_) ++self.mistakes_;
    }
    self.ended_[index] = self.round_;
    self.worker_of_[index] = worker;
    ++self.executed_;
    self.busy_[worker] = false;
  }

  TaskGraph graph_;
  std::vector<int> ended_;  // round in which the task ran last
  std::vector<std::vector<int>> predecessors_;
  std::vector<int> worker_of_;
  std::vector<std::atomic<bool>> busy_;
  int round_ = 0;
  std::atomic<int> executed_{0};
  std::atomic<int> mistakes_{0};
};

/// Random edges along a random order of the tasks, so that ids go up and down.
void AddRandomEdges(CheckedGraph& graph, int tasks, int edges, std::mt19937& random) {
  std::vector<int> order(tasks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int i = 0; i < edges && tasks > 1; ++i) {
    const int a = static_cast<int>(random() % tasks), b = static_cast<int>(random() % tasks);
    if (a != b) graph.Edge(order[std::min(a, b)], order[std::max(a, b)]);
  }
}

class Graph : public BothSources {};
MOESAIC_BOTH_SOURCES(Graph);

TEST_P(Graph, RandomGraphsOnManyThreadCounts) {
  std::mt19937 random(7);
  for (const int threads : {1, 2, 3, 5, 16}) {
    Pool pool(threads, GetParam());
    for (int round = 0; round < 60; ++round) {
      const int tasks = 1 + static_cast<int>(random() % 300);
      CheckedGraph graph(tasks, round % 2 == 1);
      AddRandomEdges(graph, tasks, static_cast<int>(random() % (3 * tasks)), random);
      for (int again = 0; again < 3; ++again) graph.Run(pool);
    }
  }
}

TEST_P(Graph, FanOutBeyondTheDeque) {
  for (const int threads : {1, 4}) {
    Pool pool(threads, GetParam());
    constexpr int kWide = 3000;
    CheckedGraph graph(2 * kWide + 3, threads == 4);
    // first -> kWide -> middle -> kWide -> last
    for (int i = 0; i < kWide; ++i) {
      graph.Edge(0, 3 + i);
      graph.Edge(3 + i, 1);
      graph.Edge(1, 3 + kWide + i);
      graph.Edge(3 + kWide + i, 2);
    }
    for (int again = 0; again < 5; ++again) graph.Run(pool);
    CheckedGraph small(10);
    small.Run(pool);
    graph.Run(pool);
  }
}

TEST_P(Graph, AChainStaysOnItsWorker) {
  Pool pool(3, GetParam());
  constexpr int kChains = 40, kLength = 50;
  CheckedGraph graph(kChains * kLength);
  for (int chain = 0; chain < kChains; ++chain) {
    for (int i = 1; i < kLength; ++i) graph.Edge(chain * kLength + i - 1, chain * kLength + i);
  }
  graph.Run(pool);
  for (int chain = 0; chain < kChains; ++chain) {
    for (int i = 1; i < kLength; ++i) {
      ASSERT_EQ(graph.worker_of(chain * kLength + i), graph.worker_of(chain * kLength)) << chain << " " << i;
    }
  }
}

TEST_P(Graph, TasksWithoutPredecessorsStartInOrder) {
  for (const int threads : {1, 4}) {
    Pool pool(threads, GetParam());
    std::vector<std::vector<std::int64_t>> started(threads);
    TaskGraph graph;
    for (int i = 0; i < 2000; ++i) {
      graph.Add([](void* context, std::int64_t index,
                   int worker) { (*static_cast<std::vector<std::vector<std::int64_t>>*>(context))[worker].push_back(index); },
                &started, i);
    }
    pool.Run(graph);
    std::size_t total = 0;
    for (const auto& mine : started) {
      total += mine.size();
      EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    }
    EXPECT_EQ(total, 2000u);
  }
}

// Ten pieces of work of two steps each, that all wait for one task: one worker takes them in order, each to its end.
TEST_P(Graph, NewWorkStartsInTurn) {
  Pool pool(1, GetParam());
  std::vector<std::int64_t> order;
  const auto note = [](void* context, std::int64_t index, int) {
    static_cast<std::vector<std::int64_t>*>(context)->push_back(index);
  };
  TaskGraph graph;
  const TaskId first = graph.Add(note, &order, -1);
  std::vector<std::int64_t> expected = {-1};
  for (int i = 0; i < 10; ++i) {
    const TaskId begin = graph.Add(note, &order, 2 * i, TaskGraph::Start::kInTurn);
    graph.AddEdge(first, begin);
    graph.AddEdge(begin, graph.Add(note, &order, 2 * i + 1));
    expected.insert(expected.end(), {2 * i, 2 * i + 1});
  }
  for (int again = 0; again < 2; ++again) {
    order.clear();
    pool.Run(graph);
    EXPECT_EQ(order, expected);
  }
}

TEST_P(Graph, EmptyAndClearedGraphs) {
  Pool pool(2, GetParam());
  TaskGraph graph;
  pool.Run(graph);
  std::atomic<int> calls{0};
  const TaskFunction count = [](void* context, std::int64_t, int) { ++*static_cast<std::atomic<int>*>(context); };
  graph.AddEdge(graph.Add(count, &calls, 0), graph.Add(count, &calls, 1));
  pool.Run(graph);
  EXPECT_EQ(calls, 2);
  graph.Clear();
  EXPECT_EQ(graph.size(), 0);
  pool.Run(graph);
  graph.Add(count, &calls, 0);
  pool.Run(graph);
  EXPECT_EQ(calls, 3);
}

TEST_P(Graph, TheSameEdgeTwice) {
  Pool pool(2, GetParam());
  CheckedGraph graph(2);
  graph.Edge(1, 0);
  graph.Edge(1, 0);
  graph.Run(pool);
}

TEST_P(Graph, ACycleIsReportedBeforeAnyTaskStarts) {
  Pool pool(2, GetParam());
  std::atomic<int> calls{0};
  const TaskFunction count = [](void* context, std::int64_t, int) { ++*static_cast<std::atomic<int>*>(context); };
  TaskGraph graph;
  for (int i = 0; i < 5; ++i) graph.Add(count, &calls, i);
  graph.AddEdge(0, 1);
  graph.AddEdge(1, 2);
  graph.AddEdge(2, 3);
  graph.AddEdge(3, 1);
  try {
    pool.Run(graph);
    FAIL() << "nothing thrown";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("cycle"), std::string::npos) << error.what();
  }
  EXPECT_EQ(calls, 0);
  TaskGraph all;  // without any root
  all.Add(count, &calls, 0);
  all.Add(count, &calls, 1);
  all.AddEdge(0, 1);
  all.AddEdge(1, 0);
  EXPECT_THROW(pool.Run(all), std::invalid_argument);
  EXPECT_EQ(calls, 0);
  pool.ParallelFor(10, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 10);
}

TEST(TaskGraph, RefusesBadArguments) {
  TaskGraph graph;
  const TaskFunction nothing = [](void*, std::int64_t, int) {};
  EXPECT_THROW(graph.Add(nullptr, nullptr, 0), std::invalid_argument);
  EXPECT_EQ(graph.Add(nothing, nullptr, 0), 0);
  EXPECT_EQ(graph.Add(nothing, nullptr, 0), 1);
  EXPECT_THROW(graph.AddEdge(0, 2), std::invalid_argument);
  EXPECT_THROW(graph.AddEdge(-1, 1), std::invalid_argument);
  EXPECT_THROW(graph.AddEdge(1, 1), std::invalid_argument);
  EXPECT_EQ(graph.size(), 2);
}

TEST_P(Graph, AnExceptionReachesTheCallerAndThePoolLivesOn) {
  for (const int threads : {1, 2, 4}) {
    Pool pool(threads, GetParam());
    for (int round = 0; round < 20; ++round) {
      struct State {
        std::atomic<int> executed{0}, running{0};
        std::atomic<bool> after_failure{false};
      } state;
      TaskGraph graph;
      const TaskFunction task = [](void* context, std::int64_t index, int) {
        auto& s = *static_cast<State*>(context);
        if (index == 300) throw std::runtime_error("task 300");
        if (index == -1) s.after_failure = true;
        ++s.running;
        ++s.executed;
        --s.running;
      };
      for (int i = 0; i < 5000; ++i) graph.Add(task, &state, i);
      graph.AddEdge(300, graph.Add(task, &state, -1));
      try {
        pool.Run(graph);
        FAIL() << "nothing thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "task 300");
      }
      EXPECT_EQ(state.running, 0);
      EXPECT_FALSE(state.after_failure);
      if (threads == 1) {
        EXPECT_EQ(state.executed, 300);
      }
      const int executed = state.executed;
      std::atomic<int> calls{0};
      pool.ParallelFor(100, [&](std::int64_t, int) { ++calls; });
      EXPECT_EQ(calls, 100);
      EXPECT_EQ(state.executed, executed) << "a dropped task ran after all";
    }
  }
}

TEST_P(Graph, EveryTaskThrows) {
  Pool pool(4, GetParam());
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(pool.ParallelFor(1000, [](std::int64_t i, int) { throw std::out_of_range(std::to_string(i)); }),
                 std::out_of_range);
    EXPECT_THROW(pool.ParallelFor(100, [](std::int64_t, int) { throw 42; }), int);
  }
  std::atomic<int> calls{0};
  pool.ParallelFor(100, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 100);
}

}  // namespace
}  // namespace moesaic::threadpool
