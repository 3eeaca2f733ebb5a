// What only a machine with several NUMA nodes shows: where packed weights really lie, and where the threads that read them run.
// Run by scripts/test_numa in a guest; on any other machine it checks the nodes that are there.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "moe/packed_weights.h"
#include "tests/moe/expect.h"
#include "tests/threadpool/sources.h"
#include "threadpool/node_memory.h"
#include "threadpool/topology.h"

namespace moesaic::moe {
namespace {

using threadpool::NodeOfPage;
using threadpool::Pool;
using threadpool::SourceName;
using threadpool::TaskGraph;
using threadpool::ThreadSource;
using threadpool::Topology;

/// What the guest was started with; absent: not checked.
int Expected(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : static_cast<int>(std::strtol(value, nullptr, 10));
}

bool BindingIsDenied() { return std::getenv("MOESAIC_TEST_DENY_MBIND") != nullptr; }

/// Answers EPERM to mbind, as a container's filter does, for the rest of the process.
void DenyMbind() {
  std::array<sock_filter, 4> code = {{{BPF_LD | BPF_W | BPF_ABS, 0, 0, 0},
                                      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_mbind},
                                      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | 1},
                                      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}}};
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

ProblemSpec Spec() {
  ProblemSpec spec;
  spec.tokens = 12;  // few: emulation is slow
  spec.experts = 3;
  spec.top_k = 2;
  spec.hidden = 128;
  spec.intermediate = 256;
  spec.adapters = {{.gate_up = 8, .down = 4, .peft_strides = true}};
  return spec;
}

class Numa : public threadpool::BothSources {
 protected:
  static void SetUpTestSuite() {
    if (BindingIsDenied()) DenyMbind();
  }
};

TEST(Machine, IsTheOneThatWasStarted) {
  const Topology& machine = Topology::Host();
  for (const Topology::NumaNode& node : machine.nodes) {
    std::printf("node %d: %" PRId64 " MiB, %d units\n", node.os_index, node.memory_bytes >> 20, node.pus);
  }
  EXPECT_EQ(static_cast<int>(machine.nodes.size()), Expected("MOESAIC_TEST_NODES", static_cast<int>(machine.nodes.size())));
  const auto shards = static_cast<int>(ShardIntermediate(256, machine).size());
  EXPECT_EQ(shards, Expected("MOESAIC_TEST_SHARDS", shards));
}

/// Pages of a matrix by node.
std::map<int, std::int64_t> PagesByNode(const TileMatrix& matrix) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  const auto begin = reinterpret_cast<std::uintptr_t>(matrix.data);
  const std::uintptr_t end = begin + static_cast<std::uintptr_t>(matrix.size()) * sizeof(BFloat16);
  std::map<int, std::int64_t> pages;
  for (std::uintptr_t at = begin; at < end; at += page) ++pages[NodeOfPage(reinterpret_cast<void*>(at))];
  return pages;
}

/// The line of /proc/self/numa_maps for the mapping that holds an address: the last one that begins at or before it.
std::string NumaMaps(const void* address) {
  std::ifstream maps("/proc/self/numa_maps");
  std::string line, found;
  while (std::getline(maps, line)) {
    if (std::stoull(line, nullptr, 16) <= reinterpret_cast<std::uintptr_t>(address)) found = line;
  }
  return found;
}

TEST_P(Numa, WeightsLieOnTheNodesThatComputeWithThem) {
  const Problem problem(Spec());
  Pool pool(0, GetParam());
  const Topology& machine = pool.topology();
  const PackedWeights weights(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  std::int64_t s = 0;
  for (const Shard& shard : weights.shards()) {
    const int node = machine.nodes[static_cast<std::size_t>(shard.node)].os_index;
    std::map<int, std::int64_t> pages;
    for (std::int64_t e = 0; e < problem.spec.experts; ++e) {
      for (const TileMatrix& matrix : {weights.gate(e, s), weights.up(e, s), weights.down_transposed(e, s)}) {
        for (const auto& [where, count] : PagesByNode(matrix)) pages[where] += count;
      }
    }
    const std::string maps = NumaMaps(weights.gate(0, s).data);
    std::printf("rows %" PRId64 " to %" PRId64 " of I, for node %d: %s\n", shard.begin, shard.begin + shard.size, node,
                maps.c_str());
    if (weights.shards().size() > 1) {
      ASSERT_EQ(pages.size(), 1u) << "on several nodes";
      EXPECT_EQ(pages.begin()->first, node);
      // The kernel's own account: the policy, and pages of no other node. (Mappings without a policy are one where they meet.)
      const bool bound = maps.find("prefer:" + std::to_string(node)) != std::string::npos;
      EXPECT_EQ(bound, threadpool::WhyNotBound(node).empty());
      for (const Topology::NumaNode& other : machine.nodes) {
        const bool has = maps.find(" N" + std::to_string(other.os_index) + "=") != std::string::npos;
        if (other.os_index == node || bound) {
          EXPECT_EQ(has, other.os_index == node) << maps;
        }
      }
    }
    ++s;
  }
}

TEST_P(Numa, BindingIsAsItWasSetUp) {
  for (const Topology::NumaNode& node : Topology::Host().nodes) {
    EXPECT_EQ(threadpool::WhyNotBound(node.os_index), BindingIsDenied() ? "Operation not permitted" : "");
  }
}

TEST_P(Numa, TasksOfANodeRunThere) {
  Pool pool(0, GetParam());
  const Topology& machine = pool.topology();
  std::set<int> served;
  for (const Topology::ComputeNode& node : machine.ComputeNodes()) served.insert(node.node);
  // Each task touches a fresh page: where it comes to lie is where the task ran then.
  constexpr std::int64_t kPage = 4096;
  const threadpool::NodeMemory memory(60 * kPage, -1);
  struct State {
    const Topology& machine;
    char* pages;
    std::array<int, 60> ran_on, worker;
  } state{machine, static_cast<char*>(memory.data()), {}, {}};
  TaskGraph graph;
  graph.KeepOnNodes();
  const auto run = [](void* context, std::int64_t index, int worker) {
    State& s = *static_cast<State*>(context);
    s.pages[index * kPage] = 1;
    s.worker[static_cast<std::size_t>(index)] = worker;
    s.ran_on[static_cast<std::size_t>(index)] = s.machine.NodeOfCallingThread();
  };
  std::vector<int> nodes(served.begin(), served.end());
  for (int i = 0; i < 60; ++i) graph.AddOnNode(run, &state, i, nodes[i % nodes.size()]);
  pool.Run(graph);
  for (int i = 0; i < 60; ++i) {
    const int node = nodes[i % nodes.size()];
    EXPECT_EQ(state.ran_on[i], node) << "task " << i << ", worker " << state.worker[i];
    EXPECT_EQ(NodeOfPage(state.pages + i * kPage), machine.nodes[static_cast<std::size_t>(node)].os_index)
        << "task " << i << ", worker " << state.worker[i];
  }
}

TEST_P(Numa, LayerMatchesReferenceWithTheSameBitsForAnyThreads) {
  Pool pool(0, GetParam());
  ExpectMatchesReference(Spec(), pool);
  const Problem problem(Spec());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  for (const int threads : {1, 2, 3}) {
    pool.SetNumThreads(threads);
    EXPECT_TRUE(RunForward(layer, problem, pool) == out);
    EXPECT_TRUE(Equal(RunBackward(layer, problem, pool, saved), gradients));
  }
}

MOESAIC_BOTH_SOURCES(Numa);

}  // namespace
}  // namespace moesaic::moe
