// Scratch memory of calls: recycled, because touching fresh pages costs more than using them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "threadpool/pool.h"

namespace moesaic::moe {

/// Buffers of one call in flight. Contents are undefined when it is acquired, but for the graph.
struct Workspace {
  AlignedBuffer rows;           ///< bf16 [shards][T * k][H]: a row of Y (forward) or dX (backward) for each slot
  AlignedBuffer jobs;           ///< activations of the jobs in flight
  AlignedBuffer lora;           ///< packed adapters of the groups in flight, and their gradients' fp32 sums; or the rank-wide
                                ///< intermediates of adapters in place
  AlignedBuffer in_place;       ///< what else adapters in place hold from stage to stage; grows with T
  AlignedBuffer tokens;         ///< tables of slots, a few bytes each
  AlignedBuffer dense;          ///< bf16 [T][H]: hidden (forward) or d_out (backward), where the caller's has no dense rows
  AlignedBuffer dense_hidden;   ///< the same for hidden in the backward
  threadpool::TaskGraph graph;  ///< empty, with the memory of the last one

  /// At least `bytes`, and no more than `most` left from an earlier call. Throws std::bad_alloc.
  static void Fit(AlignedBuffer& buffer, std::int64_t bytes, std::int64_t most) {
    if (buffer.bytes() > std::max(bytes, most)) buffer = AlignedBuffer();
    buffer.Ensure(bytes);
  }
};

/// Takes a workspace from the process's store, and returns it there at the end of the scope. Thread safe.
class WorkspaceLease {
 public:
  WorkspaceLease();
  ~WorkspaceLease();
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;
  Workspace* operator->() const { return workspace_.get(); }

 private:
  std::unique_ptr<Workspace> workspace_;
};

/// Which of some equal pieces of memory are free. A worker gets back the piece that it freed last. Thread safe.
class SlotPool {
 public:
  SlotPool(std::int64_t slots, int workers);
  /// One must be free.
  std::int64_t Take(int worker);
  void Free(std::int64_t slot, int worker);

 private:
  std::mutex mutex_;
  std::vector<std::int64_t> free_;
  std::vector<std::int64_t> last_;  ///< by worker; -1: none
};

/// At least `bytes` of memory of the calling thread's own, 64-byte aligned, valid until its next call. Throws std::bad_alloc.
void* ThreadScratch(std::int64_t bytes);

/// Bytes that the buffers of stored workspaces hold, and their release. Thread scratch stays with its threads.
std::int64_t StoredWorkspaceBytes();
void ReleaseWorkspaces();
/// Bytes of all threads' scratch.
std::int64_t ThreadScratchBytes();

/// Bound on everything here but what grows with T (`rows`, `in_place`, `tokens`, `dense`, `dense_hidden`, `graph`), and on the
/// threads' scratch: 64 MiB + 8 MiB a thread. It is kept for every layer of which one job, one expert's adapters with their
/// gradients' sums, and the threads' scratch fit; where they do not, as with rank 256 on the largest experts and few threads,
/// they take what they need. A thread keeps the most scratch that any layer has asked of it: after a wider layer, one that
/// nearly fills the bound may exceed it by the difference of the two layers' scratch.
std::int64_t ScratchBudget(int threads);
/// What of it activations of the jobs in flight, and packed adapters with their gradients' sums, may take.
std::int64_t JobBudget(int threads);
std::int64_t LoraBudget(int threads);

}  // namespace moesaic::moe
