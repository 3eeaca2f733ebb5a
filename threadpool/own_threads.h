// Threads of the pool's own.
#pragma once

#include <pthread.h>

#include <vector>

#include "threadpool/executor.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {

/// The threads of lanes 1 .. n-1; lane 0 is the caller of Pool::Run, which is never pinned. Where the topology is that of this
/// host and there are enough processing units, each thread is pinned to one: one a core before SMT siblings.
class OwnThreads {
 public:
  /// Starts the threads. Throws std::system_error where one cannot be had; those started before it are ended then.
  OwnThreads(Executor& executor, const Topology& topology);
  /// Ends the threads and waits for them.
  ~OwnThreads();
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;

  /// Keeps the threads off the caller's core: if one is pinned to the core on which the calling thread runs now, it moves to
  /// the place reserved for the caller, which becomes this one. Otherwise two threads would share a core until the kernel's
  /// balancer moves the caller away, milliseconds later. Costs a call of getcpu while the caller stays where it is.
  void MakeRoomForCaller();

 private:
  struct Start {
    Executor* executor;
    int lane;
  };
  static void* Main(void* start);
  void End();
  void Pin(int lane) noexcept;

  Executor& executor_;
  const Topology& topology_;
  std::vector<Topology::Pu> places_;  // [lane]; [0] is kept free for the caller; empty: nothing is pinned
  std::vector<Start> starts_;         // [lane - 1]
  std::vector<pthread_t> threads_;    // [lane - 1]
  int caller_cpu_ = -1;
};

}  // namespace moesaic::threadpool
