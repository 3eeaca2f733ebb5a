#include "threadpool/topology.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

const char kTwoPackages[] =
    "pack:2 [numa(memory=68719476736)] l3:1(size=33554432) l2:2(size=2097152) l1d:1(size=49152) core:1 pu:2";
const char kXml[] = MOESAIC_TEST_DATA "/two_packages.xml";

void ExpectTwoPackages(const Topology& topology) {
  EXPECT_FALSE(topology.is_host);
  EXPECT_EQ(topology.packages, 2);
  EXPECT_EQ(topology.cores, 4);
  ASSERT_EQ(topology.pus.size(), 8u);
  ASSERT_EQ(topology.nodes.size(), 2u);
  for (int n = 0; n < 2; ++n) {
    EXPECT_EQ(topology.nodes[n].os_index, n);
    EXPECT_EQ(topology.nodes[n].package, n);
    EXPECT_EQ(topology.nodes[n].memory_bytes, std::int64_t{64} << 30);
    EXPECT_EQ(topology.nodes[n].pus, 4);
  }
  EXPECT_EQ(topology.l1d.bytes, 48 << 10);
  EXPECT_EQ(topology.l1d.pus, 2);
  EXPECT_EQ(topology.l2.bytes, 2 << 20);
  EXPECT_EQ(topology.l2.pus, 2);
  EXPECT_EQ(topology.l3.bytes, 32 << 20);
  EXPECT_EQ(topology.l3.pus, 4);
  for (int i = 0; i < 8; ++i) {
    const Topology::Pu& pu = topology.pus[i];
    EXPECT_EQ(pu.core, i / 2);
    EXPECT_EQ(pu.node, i / 4);
    EXPECT_EQ(pu.package, i / 4);
    EXPECT_EQ(pu.sibling, i % 2);
    EXPECT_TRUE(pu.allowed);
  }
  EXPECT_EQ(topology.affinity.size(), 8u);
  EXPECT_EQ(topology.UsableCores(), 4);
  EXPECT_EQ(topology.UsablePus(), 8);
}

std::vector<int> Order(const Topology& topology) {
  std::vector<int> order;
  for (const Topology::Pu& pu : topology.PlacementOrder()) order.push_back(pu.os_index);
  return order;
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Topology, Synthetic) { ExpectTwoPackages(Topology::FromSynthetic(kTwoPackages)); }

TEST(Topology, Xml) { ExpectTwoPackages(Topology::FromXml(kXml)); }

TEST(Topology, OneCoreFirstThenSiblings) {
  Topology topology = Topology::FromSynthetic(kTwoPackages);
  EXPECT_EQ(Order(topology), (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7}));
  // A core of which only the sibling is allowed is a core like any other.
  topology.Restrict({1, 2, 3, 6});
  EXPECT_EQ(Order(topology), (std::vector<int>{1, 2, 6, 3}));
  EXPECT_EQ(topology.affinity, (std::vector<int>{1, 2, 3, 6}));
  EXPECT_EQ(topology.UsableCores(), 3);
  EXPECT_EQ(topology.UsablePus(), 4);
}

TEST(Topology, QuotaLimitsTheCores) {
  Topology topology = Topology::FromSynthetic("package:1 core:16 pu:2");
  const auto usable = [&topology](double quota) {
    topology.cpu_quota = quota;
    return topology.UsableCores();
  };
  EXPECT_EQ(usable(0), 16);
  EXPECT_EQ(usable(64), 16);
  EXPECT_EQ(usable(4), 4);
  EXPECT_EQ(usable(1.5), 2);
  EXPECT_EQ(usable(2.1), 2);
  EXPECT_EQ(usable(0.1), 1);
}

TEST(Topology, RefusesWhatItCannotRead) {
  EXPECT_THROW(Topology::FromXml("/no/such/file.xml"), std::invalid_argument);
  EXPECT_THROW(Topology::FromSynthetic("nonsense"), std::invalid_argument);
  const std::string path = testing::TempDir() + "/not_a_topology.xml";
  std::ofstream(path) << "<html></html>";
  EXPECT_THROW(Topology::FromXml(path), std::invalid_argument);
}

TEST(Topology, EnvironmentNamesAFile) {
  {
    const Environment set("MOESAIC_HWLOC_XML", kXml);
    ExpectTwoPackages(Topology::Discover());
  }
  const Environment set("MOESAIC_HWLOC_XML", "/no/such/file.xml");
  try {
    Topology::Discover();
    FAIL() << "nothing thrown";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("MOESAIC_HWLOC_XML"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("/no/such/file.xml"), std::string::npos) << error.what();
  }
}

TEST(Topology, ThisMachine) {
  const Topology topology = Topology::Discover();
  EXPECT_TRUE(topology.is_host);
  EXPECT_GE(topology.packages, 1);
  EXPECT_GE(topology.cores, 1);
  ASSERT_FALSE(topology.nodes.empty());
  EXPECT_GT(topology.nodes[0].memory_bytes, 0);
  ASSERT_FALSE(topology.affinity.empty());
  EXPECT_LE(topology.UsableCores(), topology.cores);
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  for (const int cpu : topology.affinity) EXPECT_TRUE(CPU_ISSET(cpu, &set)) << cpu;
  EXPECT_LT(topology.NodeOfCallingThread(), static_cast<int>(topology.nodes.size()));
}

TEST(Topology, ALookAtTheMachineLeavesTheAffinityAlone) {
  // Not even for a moment: a second thread watches the first while it looks.
  const pid_t looking = gettid();
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(looking, sizeof(before), &before), 0);
  std::atomic<bool> stop{false};
  std::atomic<int> changes{0};
  std::thread watcher([&] {
    while (!stop) {
      cpu_set_t now;
      if (sched_getaffinity(looking, sizeof(now), &now) != 0 || !CPU_EQUAL(&now, &before)) ++changes;
    }
  });
  for (int i = 0; i < 5; ++i) Topology::Discover();
  stop = true;
  watcher.join();
  EXPECT_EQ(changes, 0);
}

TEST(Topology, AThreadOfOneCpuDoesNotHideTheOthers) {
  const std::vector<int> process = Topology::Discover().affinity;
  if (process.size() < 2) GTEST_SKIP() << "this process may use one CPU only";
  std::thread([&process] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(process[0], &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(Topology::Discover().affinity, process);
  }).join();
}

TEST(Topology, HostIsFoundOutOnce) { EXPECT_EQ(&Topology::Host(), &Topology::Host()); }

// The first use of Host() in the process decides, so this needs a process of its own: ctest gives it one.
TEST(Topology, APoolOnAPlannedMachine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("MOESAIC_HWLOC_XML", kXml, 1);
        unsetenv("MOESAIC_NUM_THREADS");
        Pool pool;
        std::atomic<int> sum{0};
        pool.ParallelFor(100, [&](std::int64_t i, int) { sum += static_cast<int>(i); });
        std::_Exit(pool.num_threads() == 4 && sum == 4950 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace moesaic::threadpool
