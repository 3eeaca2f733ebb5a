// Tasks that begin on a NUMA node, on pretended machines: who takes what, and in which order.
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/executor.h"
#include "threadpool/node_memory.h"
#include "threadpool/pool.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {
namespace {

std::vector<int> NodesOf(const Topology& machine, int threads) {
  std::vector<int> nodes;
  for (const Topology::Pu& pu : machine.Places(threads)) nodes.push_back(pu.node);
  return nodes;
}

using Nodes = std::vector<int>;

TEST(Places, FewThreadsAreSpreadOverTheNodes) {
  const Topology machine = Topology::FromSynthetic("pack:2 [numa] core:4 pu:2");
  EXPECT_EQ(NodesOf(machine, 1), (Nodes{0}));
  EXPECT_EQ(NodesOf(machine, 2), (Nodes{0, 1}));
  EXPECT_EQ(NodesOf(machine, 5), (Nodes{0, 0, 0, 1, 1}));
  EXPECT_EQ(NodesOf(machine, 8), (Nodes{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(NodesOf(machine, 10), (Nodes{0, 0, 0, 0, 1, 1, 1, 1, 0, 1}));  // the last two on siblings
  EXPECT_EQ(NodesOf(machine, 18).size(), 18u);                             // more threads than units
  EXPECT_EQ(NodesOf(machine, 18)[17], 1);
}

TEST(Places, OnOneNodeTheyAreThePlacementOrder) {
  Topology machine = Topology::FromSynthetic("pack:1 [numa] core:3 pu:2");
  machine.Restrict({1, 2, 3, 5});
  const std::vector<Topology::Pu> order = machine.PlacementOrder();
  for (int threads = 1; threads <= 4; ++threads) {
    const std::vector<Topology::Pu> places = machine.Places(threads);
    ASSERT_EQ(places.size(), static_cast<std::size_t>(threads));
    for (int i = 0; i < threads; ++i) EXPECT_EQ(places[i].os_index, order[i].os_index);
  }
}

TEST(Places, ByTheCoresThatAreLeft) {
  Topology machine = Topology::FromSynthetic("pack:3 [numa] core:4 pu:1");
  machine.Restrict({0, 1, 2, 4, 8, 9});  // three cores, one, two
  EXPECT_EQ(NodesOf(machine, 6), (Nodes{0, 0, 0, 1, 2, 2}));
  EXPECT_EQ(NodesOf(machine, 3), (Nodes{0, 0, 2}));
  const std::vector<Topology::ComputeNode> nodes = machine.ComputeNodes();
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].cores, 3);
  EXPECT_EQ(nodes[1].cores, 1);
  EXPECT_EQ(nodes[2].cores, 2);
}

/// Which worker ran each task of a graph.
class Record {
 public:
  void Add(TaskGraph& graph, int node) {
    workers_.emplace_back(-1);
    const auto index = static_cast<std::int64_t>(workers_.size()) - 1;
    tasks_.push_back(graph.AddOnNode(&Record::Run, this, index, node));
  }
  const std::vector<TaskId>& tasks() const { return tasks_; }
  int worker(std::size_t task) const { return workers_[task]; }

 private:
  static void Run(void* context, std::int64_t index, int worker) {
    static_cast<Record*>(context)->workers_[static_cast<std::size_t>(index)] = worker;
  }
  std::vector<int> workers_;
  std::vector<TaskId> tasks_;
};

class Nodes2 : public BothSources {};

TEST_P(Nodes2, KeptTasksRunOnTheirNodeOnly) {
  const Topology machine = Topology::FromSynthetic("pack:2 [numa] core:2 pu:1");
  const Nodes nodes = NodesOf(machine, 4);
  Pool pool(4, GetParam(), machine);
  for (int round = 0; round < 20; ++round) {
    TaskGraph graph;
    graph.KeepOnNodes();
    Record record;
    for (int i = 0; i < 100; ++i) record.Add(graph, i % 3 == 0 ? 0 : 1);
    if (round % 2 == 1) {  // made ready by others instead of at the start
      const TaskId root = graph.Add([](void*, std::int64_t, int) {}, nullptr, 0);
      for (const TaskId task : record.tasks()) graph.AddEdge(root, task);
    }
    pool.Run(graph);
    for (std::size_t i = 0; i < 100; ++i) {
      ASSERT_GE(record.worker(i), 0) << "task " << i << " did not run";
      EXPECT_EQ(nodes[record.worker(i)], i % 3 == 0 ? 0 : 1) << "task " << i;
    }
  }
}

TEST_P(Nodes2, OneKeptTask) {
  const Topology machine = Topology::FromSynthetic("pack:2 [numa] core:1 pu:1");
  Pool pool(2, GetParam(), machine);
  TaskGraph graph;
  graph.KeepOnNodes();
  Record record;
  record.Add(graph, 1);
  pool.Run(graph);
  EXPECT_EQ(record.worker(0), 1);
}

TEST_P(Nodes2, ANodeWithoutWorkersIsServedByOthers) {
  Pool pool(2, GetParam(), Topology::FromSynthetic("pack:2 [numa] core:2 pu:1"));
  for (const bool keep : {false, true}) {
    TaskGraph graph;
    if (keep) graph.KeepOnNodes();
    Record record;
    for (int i = 0; i < 50; ++i) record.Add(graph, i % 7);  // nodes that the machine does not have, too
    pool.Run(graph);
    for (std::size_t i = 0; i < 50; ++i) EXPECT_GE(record.worker(i), 0);
  }
}

TEST_P(Nodes2, AnExceptionEndsTheRun) {
  Pool pool(3, GetParam(), Topology::FromSynthetic("pack:2 [numa] core:2 pu:1"));
  TaskGraph graph;
  for (int i = 0; i < 20; ++i) {
    graph.AddOnNode(
        [](void*, std::int64_t index, int) {
          if (index == 7) throw std::runtime_error("seven");
        },
        nullptr, i, i % 2);
  }
  EXPECT_THROW(pool.Run(graph), std::runtime_error);
}

TEST_P(Nodes2, InsideATask) {
  Pool pool(2, GetParam(), Topology::FromSynthetic("pack:2 [numa] core:1 pu:1"));
  std::atomic<int> ran{0};
  pool.ParallelFor(4, [&](std::int64_t, int) {
    TaskGraph graph;
    graph.KeepOnNodes();
    for (int node = 0; node < 2; ++node) {
      graph.AddOnNode([](void* count, std::int64_t, int) { ++*static_cast<std::atomic<int>*>(count); }, &ran, 0, node);
    }
    pool.Run(graph);
  });
  EXPECT_EQ(ran, 8);
}

TEST_P(Nodes2, RandomGraphs) {
  std::mt19937 random(3);
  Pool pool(4, GetParam(), Topology::FromSynthetic("pack:3 [numa] core:1 pu:2"));
  for (int round = 0; round < 150; ++round) {
    struct State {
      std::vector<std::atomic<int>> ran;
      std::vector<std::vector<int>> before;
      std::atomic<int> wrong{0};
    };
    const int size = 1 + static_cast<int>(random() % 200);
    State state{std::vector<std::atomic<int>>(size), std::vector<std::vector<int>>(size)};
    TaskGraph graph;
    if (random() % 3 == 0) graph.KeepOnNodes();
    const auto run = [](void* context, std::int64_t index, int) {
      State& s = *static_cast<State*>(context);
      for (const int earlier : s.before[index]) {
        if (s.ran[earlier] != 1) ++s.wrong;
      }
      ++s.ran[index];
    };
    for (int i = 0; i < size; ++i) {
      if (random() % 2 == 0) {
        graph.AddOnNode(run, &state, i, static_cast<int>(random() % 4));
      } else {
        graph.Add(run, &state, i, random() % 2 == 0 ? TaskGraph::Start::kNext : TaskGraph::Start::kInTurn);
      }
      for (int k = static_cast<int>(random() % 3); k > 0 && i > 0; --k) {
        state.before[i].push_back(static_cast<int>(random() % i));
        graph.AddEdge(state.before[i].back(), i);
      }
    }
    pool.Run(graph);
    EXPECT_EQ(state.wrong, 0);
    for (const std::atomic<int>& count : state.ran) ASSERT_EQ(count, 1);
  }
}

MOESAIC_BOTH_SOURCES(Nodes2);

TEST(Nodes, ALaneTakesItsOwnNodesTasksFirst) {
  // Lane 1 is held until lane 0 has taken all: first those of node 0, in order, then those of node 1.
  for (int round = 0; round < 20; ++round) {
    struct State {
      std::vector<std::int64_t> taken;
      std::atomic<bool> held{false}, done{false};
    } state;
    TaskGraph graph;
    graph.AddOnNode(
        [](void* context, std::int64_t, int) {
          State& s = *static_cast<State*>(context);
          s.held = true;
          while (!s.done) std::this_thread::yield();
        },
        &state, -1, 1);
    for (int i = 0; i < 20; ++i) {
      graph.AddOnNode(
          [](void* context, std::int64_t index, int) {
            State& s = *static_cast<State*>(context);
            s.taken.push_back(index);
            s.done = s.taken.size() == 20;
          },
          &state, i, 1 - i / 10);
    }
    Executor executor(&state, 2, true, 2);
    executor.SetNode(1, 1);
    executor.job().Prepare(graph);
    executor.Start(true);
    std::thread one([&] { executor.RunUntilDone(1, 1); });
    while (!state.held) std::this_thread::yield();
    executor.RunUntilDone(0, 0);
    one.join();
    executor.job().RethrowFailure();
    std::vector<std::int64_t> expected;
    for (int i = 0; i < 20; ++i) expected.push_back((i + 10) % 20);
    EXPECT_EQ(state.taken, expected);
  }
}

TEST(Nodes, RefusesANodeThatIsNone) {
  TaskGraph graph;
  EXPECT_THROW(graph.AddOnNode([](void*, std::int64_t, int) {}, nullptr, 0, -1), std::invalid_argument);
}

TEST(NodeMemory, IsZeroedAlignedAndMovable) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{3} << 20}) {
    NodeMemory memory(bytes, -1);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    EXPECT_EQ(address % (bytes >= 2 << 20 ? 2 << 20 : 64), 0u);
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_FALSE(memory.bound());
    const char* data = static_cast<const char*>(memory.data());
    for (std::int64_t i = 0; i < bytes; i += 512) EXPECT_EQ(data[i], 0);
    std::memset(memory.data(), 1, static_cast<std::size_t>(bytes));
    NodeMemory other(std::move(memory));
    EXPECT_EQ(other.data(), data);
    NodeMemory third;
    third = std::move(other);
    EXPECT_EQ(static_cast<const char*>(third.data())[bytes - 1], 1);
  }
  EXPECT_EQ(NodeMemory(0, 0).data(), nullptr);
  EXPECT_THROW(NodeMemory(std::int64_t{1} << 60, -1), std::bad_alloc);
}

TEST(Nodes, ARunThatKeepsThemLeavesTheAffinityAsItWas) {
  // A machine that says it is the host, with this machine's first CPU on one node and the others on another.
  Topology machine = Topology::Discover();
  machine.nodes.resize(2, machine.nodes[0]);
  for (Topology::Pu& pu : machine.pus) pu.node = pu.os_index == machine.affinity.front() ? 0 : 1;
  const auto affinity = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  };
  const cpu_set_t before = affinity();
  for (const ThreadSource source : {ThreadSource::kOwn, ThreadSource::kOpenMp}) {
    if (MOESAIC_TSAN && source == ThreadSource::kOpenMp) continue;
    Pool pool(static_cast<int>(machine.affinity.size()), source, machine);
    TaskGraph graph;
    graph.KeepOnNodes();
    struct State {
      const Topology& machine;
      std::vector<std::atomic<int>> ran_on;
    } state{machine, std::vector<std::atomic<int>>(40)};
    const auto run = [](void* context, std::int64_t index, int) {
      State& s = *static_cast<State*>(context);
      s.ran_on[static_cast<std::size_t>(index)] = s.machine.NodeOfCallingThread();
    };
    for (int i = 0; i < 40; ++i) graph.AddOnNode(run, &state, i, i % 2);
    pool.Run(graph);
    // OpenMP's threads may all have been on one node; own ones are pinned, one to each CPU.
    for (int i = 0; i < 40 && source == ThreadSource::kOwn && machine.affinity.size() > 1; ++i) {
      EXPECT_EQ(state.ran_on[i], i % 2) << "task " << i;
    }
    const cpu_set_t after = affinity();
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
  }
}

TEST(NodeMemory, LiesOnTheNodeItIsMeantFor) {
  const Topology machine = Topology::Discover();
  for (const Topology::NumaNode& node : machine.nodes) {
    if (const std::string why = WhyNotBound(node.os_index); !why.empty()) GTEST_SKIP() << "mbind: " << why;
    NodeMemory memory(100000, node.os_index);
    EXPECT_TRUE(memory.bound());
    EXPECT_LT(NodeOfPage(memory.data()), 0) << "not yet touched";
    std::memset(memory.data(), 1, 100000);
    if (NodeOfPage(memory.data()) < 0) GTEST_SKIP() << "move_pages: " << std::strerror(-NodeOfPage(memory.data()));
    EXPECT_EQ(NodeOfPage(memory.data()), node.os_index);
  }
  EXPECT_NE(WhyNotBound(1000), "");
  EXPECT_NE(WhyNotBound(-1), "");
}

}  // namespace
}  // namespace moesaic::threadpool
