// A set of CPUs of any size, as sched_setaffinity() and its kin take it.
#pragma once

#include <sched.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "threadpool/topology.h"

namespace moesaic::threadpool {

class CpuSet {
 public:
  /// Room for CPUs 0 .. capacity - 1, all absent. Throws std::bad_alloc.
  explicit CpuSet(int capacity) : bytes_(CPU_ALLOC_SIZE(capacity)), set_(CPU_ALLOC(capacity)) {
    if (set_ == nullptr) throw std::bad_alloc();
    CPU_ZERO_S(bytes_, set_.get());
  }
  explicit CpuSet(const std::vector<int>& cpus) : CpuSet(cpus.empty() ? 1 : *std::max_element(cpus.begin(), cpus.end()) + 1) {
    for (const int cpu : cpus) CPU_SET_S(cpu, bytes_, set_.get());
  }

  cpu_set_t* get() const { return set_.get(); }
  std::size_t bytes() const { return bytes_; }

  std::vector<int> cpus() const {
    std::vector<int> cpus;
    for (int cpu = 0; cpu < static_cast<int>(bytes_ * 8); ++cpu) {
      if (CPU_ISSET_S(cpu, bytes_, set_.get())) cpus.push_back(cpu);
    }
    return cpus;
  }

 private:
  struct Free {
    void operator()(cpu_set_t* set) const { CPU_FREE(set); }
  };
  std::size_t bytes_;
  std::unique_ptr<cpu_set_t, Free> set_;
};

/// Keeps the calling thread on the CPUs of the NUMA node on which it runs, as far as it may use them, until the end of the
/// scope: what it touches first then lies there. A refusal, or no memory, costs placement only. For the short time of a run in
/// which this thread neither forks nor starts threads, so that nobody inherits it.
class StayOnNode {
 public:
  explicit StayOnNode(const Topology& machine) noexcept try {
    const int node = machine.NodeOfCallingThread();
    for (int capacity = 1024; capacity <= 1 << 20; capacity *= 4) {
      CpuSet before(capacity);
      if (sched_getaffinity(0, before.bytes(), before.get()) != 0) continue;
      CpuSet near(capacity);
      for (const Topology::Pu& pu : machine.pus) {
        if (pu.node == node && CPU_ISSET_S(pu.os_index, before.bytes(), before.get())) {
          CPU_SET_S(pu.os_index, near.bytes(), near.get());
        }
      }
      if (sched_setaffinity(0, near.bytes(), near.get()) == 0) before_.emplace(std::move(before));
      return;
    }
  } catch (const std::bad_alloc&) {
  }
  ~StayOnNode() {
    if (before_) sched_setaffinity(0, before_->bytes(), before_->get());
  }
  StayOnNode(const StayOnNode&) = delete;
  StayOnNode& operator=(const StayOnNode&) = delete;

 private:
  std::optional<CpuSet> before_;
};

}  // namespace moesaic::threadpool
