#include "threadpool/own_threads.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "threadpool/affinity.h"

namespace moesaic::threadpool {

OwnThreads::OwnThreads(Executor& executor, const Topology& topology) : executor_(executor), topology_(topology) {
  const int lanes = executor.lanes();
  if (topology.is_host) {
    if (lanes <= static_cast<int>(topology.affinity.size())) places_ = topology.Places(lanes);
  }
  const std::vector<Topology::Pu> nodes = topology.is_host ? places_ : topology.Places(lanes);
  for (std::size_t lane = 0; lane < nodes.size(); ++lane) executor_.SetNode(static_cast<int>(lane), nodes[lane].node);
  starts_.reserve(lanes - 1);
  threads_.reserve(lanes - 1);

  // Signals are for the application's threads: a new thread inherits the mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  for (int lane = 1; lane < lanes && error == 0; ++lane) {
    starts_.push_back({&executor, lane});
    pthread_t thread;
    error = pthread_create(&thread, nullptr, &OwnThreads::Main, &starts_.back());
    if (error != 0) break;
    threads_.push_back(thread);
    pthread_setname_np(thread, ("moesaic-" + std::to_string(lane)).c_str());
    Pin(lane);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0) return;
  const std::size_t started = threads_.size();
  End();  // first: making the message may throw too
  throw std::system_error(
      error, std::generic_category(),
      "cannot start thread " + std::to_string(started + 1) + " of " + std::to_string(lanes - 1) + " of the pool");
}

OwnThreads::~OwnThreads() { End(); }

void OwnThreads::End() {
  executor_.Stop();
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
  threads_.clear();
}

void* OwnThreads::Main(void* argument) {
  const Start start = *static_cast<const Start*>(argument);
  while (start.executor->WaitForWork(start.lane)) start.executor->Help(start.lane);
  return nullptr;
}

// A thread that is not pinned may run wherever the process may: it must not inherit the binding of the thread that happened to
// start it. A refusal (a container may forbid it), or no memory for the set, costs speed only.
void OwnThreads::Pin(int lane) noexcept try {
  if (!topology_.is_host) return;
  const CpuSet cpus(places_.empty() ? topology_.affinity : std::vector<int>{places_[lane].os_index});
  pthread_setaffinity_np(threads_[lane - 1], cpus.bytes(), cpus.get());
} catch (const std::bad_alloc&) {
}

void OwnThreads::MakeRoomForCaller() {
  if (places_.empty()) return;
  const int cpu = sched_getcpu();
  if (cpu == caller_cpu_ || cpu < 0) return;
  caller_cpu_ = cpu;
  const auto here =
      std::find_if(topology_.pus.begin(), topology_.pus.end(), [cpu](const Topology::Pu& pu) { return pu.os_index == cpu; });
  if (here == topology_.pus.end()) return;
  auto taken = std::find_if(places_.begin(), places_.end(), [cpu](const Topology::Pu& pu) { return pu.os_index == cpu; });
  if (taken == places_.end()) {
    taken = std::find_if(places_.begin(), places_.end(), [&](const Topology::Pu& pu) { return pu.core == here->core; });
  }
  if (taken == places_.end() || taken == places_.begin()) return;
  std::swap(places_.front(), *taken);
  const int lane = static_cast<int>(taken - places_.begin());
  Pin(lane);
  executor_.SetNode(0, places_.front().node);
  executor_.SetNode(lane, places_[lane].node);
}

}  // namespace moesaic::threadpool
