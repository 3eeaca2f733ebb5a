#include "threadpool/topology.h"

#include <hwloc.h>
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <type_traits>

#include "threadpool/affinity.h"
#include "threadpool/cgroup.h"
#include "threadpool/fork_guard.h"

namespace moesaic::threadpool {
namespace {

using Handle = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, decltype(&hwloc_topology_destroy)>;

Handle MakeHandle() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) throw std::bad_alloc();
  Handle handle(raw, &hwloc_topology_destroy);
  // Without this, hwloc's x86 discovery walks the calling thread over all CPUs.
  hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING);
  return handle;
}

int Weight(hwloc_const_cpuset_t set) { return set == nullptr ? 0 : std::max(0, hwloc_bitmap_weight(set)); }

Topology::Cache LargestCache(hwloc_topology_t raw, hwloc_obj_type_t type) {
  Topology::Cache largest;
  for (hwloc_obj_t obj = nullptr; (obj = hwloc_get_next_obj_by_type(raw, type, obj)) != nullptr;) {
    const auto bytes = static_cast<std::int64_t>(obj->attr->cache.size);
    if (bytes > largest.bytes) largest = {bytes, Weight(obj->cpuset)};
  }
  return largest;
}

int LogicalIndexOfAncestor(hwloc_topology_t raw, hwloc_obj_t obj, hwloc_obj_type_t type, int otherwise) {
  hwloc_obj_t ancestor = hwloc_get_ancestor_obj_by_type(raw, type, obj);
  return ancestor == nullptr ? otherwise : static_cast<int>(ancestor->logical_index);
}

Topology Read(hwloc_topology_t raw) {
  Topology topology;
  topology.is_host = hwloc_topology_is_thissystem(raw) != 0;
  for (hwloc_obj_t obj = nullptr; (obj = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, obj)) != nullptr;) {
    Topology::NumaNode node;
    node.os_index = static_cast<int>(obj->os_index);
    node.package = LogicalIndexOfAncestor(raw, obj, HWLOC_OBJ_PACKAGE, -1);
    node.memory_bytes = static_cast<std::int64_t>(obj->attr->numanode.local_memory);
    node.pus = Weight(obj->cpuset);
    topology.nodes.push_back(node);
  }
  std::vector<int> siblings;
  for (hwloc_obj_t obj = nullptr; (obj = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_PU, obj)) != nullptr;) {
    Topology::Pu pu;
    pu.os_index = static_cast<int>(obj->os_index);
    pu.core = LogicalIndexOfAncestor(raw, obj, HWLOC_OBJ_CORE, static_cast<int>(obj->logical_index));
    pu.package = LogicalIndexOfAncestor(raw, obj, HWLOC_OBJ_PACKAGE, 0);
    for (std::size_t n = 0; n < topology.nodes.size(); ++n) {
      // Where two nodes are near (DRAM and HBM), the first, hwloc's default, counts.
      if (hwloc_bitmap_isset(obj->nodeset, static_cast<unsigned>(topology.nodes[n].os_index))) {
        pu.node = static_cast<int>(n);
        break;
      }
    }
    siblings.resize(std::max<std::size_t>(siblings.size(), pu.core + 1));
    pu.sibling = siblings[pu.core]++;
    pu.allowed = true;
    topology.affinity.push_back(pu.os_index);
    topology.pus.push_back(pu);
  }
  std::sort(topology.affinity.begin(), topology.affinity.end());
  topology.cores = static_cast<int>(siblings.size());
  topology.packages = std::max(1, hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_PACKAGE));
  topology.l1d = LargestCache(raw, HWLOC_OBJ_L1CACHE);
  topology.l2 = LargestCache(raw, HWLOC_OBJ_L2CACHE);
  topology.l3 = LargestCache(raw, HWLOC_OBJ_L3CACHE);
  return topology;
}

/// The CPUs that the process may use: those of its first thread. Not the calling thread's, which may be pinned to one of them.
/// OMP_PROC_BIND makes libgomp pin the first thread too, before main(); the places of its team tell what it was allowed before.
std::vector<int> ProcessAffinity() {
  std::vector<int> cpus;
  for (int capacity = 1024; cpus.empty() && capacity <= 1 << 20; capacity *= 4) {
    CpuSet set(capacity);
    if (sched_getaffinity(getpid(), set.bytes(), set.get()) == 0) {
      cpus = set.cpus();
    } else if (errno != EINVAL) {
      break;
    }
  }
  for (int place = 0; place < omp_get_num_places(); ++place) {
    std::vector<int> procs(omp_get_place_num_procs(place));
    omp_get_place_proc_ids(place, procs.data());
    cpus.insert(cpus.end(), procs.begin(), procs.end());
  }
  return cpus;
}

}  // namespace

const Topology& Topology::Host() {
  // Not a function-local static alone: its guard would stay locked for ever in a child forked while it is being made.
  static std::atomic<const Topology*> host{nullptr};
  if (const Topology* made = host.load(std::memory_order_acquire)) return *made;
  const std::lock_guard lock(ProcessMutex());
  if (host.load(std::memory_order_relaxed) == nullptr) host.store(new Topology(Discover()), std::memory_order_release);
  return *host.load(std::memory_order_relaxed);
}

Topology Topology::Discover() {
  const char* xml = std::getenv("MOESAIC_HWLOC_XML");
  if (xml != nullptr && *xml != '\0') {
    try {
      return FromXml(xml);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string("MOESAIC_HWLOC_XML: ") + error.what());
    }
  }
  const Handle handle = MakeHandle();
  if (hwloc_topology_load(handle.get()) != 0) throw std::runtime_error("hwloc cannot describe this machine");
  Topology topology = Read(handle.get());
  if (!topology.is_host) return topology;  // hwloc's own variables (HWLOC_XMLFILE, ...) name another machine
  const std::vector<int> affinity = ProcessAffinity();
  if (!affinity.empty()) topology.Restrict(affinity);
  topology.cpu_quota = CgroupCpuQuota();
  return topology;
}

Topology Topology::FromXml(const std::string& path) {
  const Handle handle = MakeHandle();
  if (hwloc_topology_set_xml(handle.get(), path.c_str()) != 0 || hwloc_topology_load(handle.get()) != 0) {
    throw std::invalid_argument("'" + path + "': expected an XML file that hwloc can read");
  }
  return Read(handle.get());
}

Topology Topology::FromSynthetic(const std::string& description) {
  const Handle handle = MakeHandle();
  if (hwloc_topology_set_synthetic(handle.get(), description.c_str()) != 0 || hwloc_topology_load(handle.get()) != 0) {
    throw std::invalid_argument("description: '" + description + "', expected hwloc's synthetic notation");
  }
  return Read(handle.get());
}

void Topology::Restrict(const std::vector<int>& os_indices) {
  affinity.clear();
  for (Pu& pu : pus) {
    pu.allowed = std::find(os_indices.begin(), os_indices.end(), pu.os_index) != os_indices.end();
    if (pu.allowed) affinity.push_back(pu.os_index);
  }
  std::sort(affinity.begin(), affinity.end());
}

int Topology::UsableCores() const {
  std::set<int> usable;
  for (const Pu& pu : pus) {
    if (pu.allowed) usable.insert(pu.core);
  }
  // Rounded, not cut: with 1.5 CPUs two threads do 1.5 threads' work, with 2.1 a third would mostly wait for its share.
  const int granted = cpu_quota > 0 ? static_cast<int>(std::lround(cpu_quota)) : static_cast<int>(usable.size());
  return std::max(1, std::min(static_cast<int>(usable.size()), granted));
}

int Topology::UsablePus() const {
  const int granted = cpu_quota > 0 ? static_cast<int>(std::ceil(cpu_quota)) : static_cast<int>(affinity.size());
  return std::max(1, std::min(static_cast<int>(affinity.size()), granted));
}

std::vector<Topology::Pu> Topology::PlacementOrder() const {
  std::vector<Pu> order;
  std::vector<int> seen(cores);  // allowed units of each core so far
  for (const Pu& pu : pus) {
    if (!pu.allowed) continue;
    order.push_back(pu);
    order.back().sibling = seen[pu.core]++;  // counts allowed units only, for the sort
  }
  std::stable_sort(order.begin(), order.end(), [](const Pu& a, const Pu& b) { return a.sibling < b.sibling; });
  return order;
}

std::vector<Topology::Pu> Topology::Places(int threads) const {
  const std::vector<Pu> order = PlacementOrder();
  const std::vector<ComputeNode> shares = ComputeNodes();
  std::vector<Pu> places;
  for (int left = threads; left > 0 && !order.empty();) {
    // One thread after the other to the node with the most cores for each thread that it then has.
    std::vector<int> taken(nodes.size() + 1), units(nodes.size() + 1);
    for (const Pu& pu : order) ++units[pu.node];
    const int round = std::min(left, static_cast<int>(order.size()));
    for (int i = 0; i < round; ++i) {
      const ComputeNode* best = nullptr;
      for (const ComputeNode& share : shares) {
        if (taken[share.node] == units[share.node]) continue;
        if (best == nullptr || share.cores * (taken[best->node] + 1) > best->cores * (taken[share.node] + 1)) best = &share;
      }
      ++taken[best->node];
    }
    for (const Pu& pu : order) {
      if (taken[pu.node]-- > 0) places.push_back(pu);
    }
    left -= round;
  }
  return places;
}

std::vector<Topology::ComputeNode> Topology::ComputeNodes() const {
  std::map<int, std::set<int>> cores;
  for (const Pu& pu : pus) {
    if (pu.allowed) cores[pu.node].insert(pu.core);
  }
  std::vector<ComputeNode> result;
  for (const auto& [node, of_node] : cores) result.push_back({node, static_cast<int>(of_node.size())});
  if (result.empty()) result.push_back({0, 1});
  return result;
}

int Topology::NodeOfCallingThread() const {
  const int cpu = sched_getcpu();
  for (const Pu& pu : pus) {
    if (pu.os_index == cpu) return pu.node;
  }
  return 0;
}

}  // namespace moesaic::threadpool
