// A set of CPUs of any size, as sched_setaffinity() and its kin take it.
#pragma once

#include <sched.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

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

}  // namespace moesaic::threadpool
