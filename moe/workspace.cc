#include "moe/workspace.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

namespace moesaic::moe {
namespace {

/// Calls of one process are served in turn, so one workspace is enough for nearly all of them.
constexpr std::size_t kMostStored = 2;

struct Store {
  std::mutex mutex;
  std::array<std::unique_ptr<Workspace>, kMostStored> free;  // null: a place
};

Store& GetStore() {
  static Store* const store = [] {
    // A child of fork() must not find the mutex held by a thread that it does not have.
    pthread_atfork([] { GetStore().mutex.lock(); }, [] { GetStore().mutex.unlock(); }, [] { GetStore().mutex.unlock(); });
    return new Store;  // never destroyed: threads may outlive static objects
  }();
  return *store;
}

std::atomic<std::int64_t> g_thread_scratch{0};

struct CountedScratch {
  AlignedBuffer buffer;

  ~CountedScratch() { g_thread_scratch -= buffer.bytes(); }
  void Ensure(std::int64_t bytes) {
    if (bytes <= buffer.bytes()) return;
    g_thread_scratch -= buffer.bytes();
    buffer.Ensure(bytes);
    g_thread_scratch += bytes;
  }
};

std::int64_t Bytes(const Workspace& w) {
  return w.rows.bytes() + w.jobs.bytes() + w.lora.bytes() + w.in_place.bytes() + w.tokens.bytes() + w.dense.bytes() +
         w.dense_hidden.bytes();
}

/// Freed when the thread ends. By a key and not as a thread_local object: where memory cannot be had, the C++ runtime ends the
/// process when it registers the destructor of one.
CountedScratch* NewThreadScratch() {
  static const pthread_key_t key = [] {
    pthread_key_t made;
    if (pthread_key_create(&made, [](void* scratch) { delete static_cast<CountedScratch*>(scratch); }) != 0) {
      throw std::bad_alloc();
    }
    return made;
  }();
  auto scratch = std::make_unique<CountedScratch>();
  if (pthread_setspecific(key, scratch.get()) != 0) throw std::bad_alloc();
  return scratch.release();
}

}  // namespace

WorkspaceLease::WorkspaceLease() {
  Store& store = GetStore();
  {
    const std::lock_guard lock(store.mutex);
    for (auto& stored : store.free) {
      if (workspace_ == nullptr) workspace_ = std::move(stored);
    }
  }
  if (workspace_ == nullptr) workspace_ = std::make_unique<Workspace>();
  workspace_->graph.Clear();
}

WorkspaceLease::~WorkspaceLease() {
  Store& store = GetStore();
  const std::lock_guard lock(store.mutex);
  for (auto& place : store.free) {
    if (place == nullptr) place = std::move(workspace_);
  }
}

SlotPool::SlotPool(std::int64_t slots, int workers) : last_(static_cast<std::size_t>(workers), -1) {
  for (std::int64_t slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

std::int64_t SlotPool::Take(int worker) {
  const std::lock_guard lock(mutex_);
  std::int64_t slot = std::exchange(last_[static_cast<std::size_t>(worker)], -1);
  if (slot >= 0) return slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
    return slot;
  }
  return std::exchange(*std::find_if(last_.begin(), last_.end(), [](std::int64_t other) { return other >= 0; }), -1);
}

void SlotPool::Free(std::int64_t slot, int worker) {
  const std::lock_guard lock(mutex_);
  const std::int64_t before = std::exchange(last_[static_cast<std::size_t>(worker)], slot);
  if (before >= 0) free_.push_back(before);
}

void* ThreadScratch(std::int64_t bytes) {
  thread_local CountedScratch* scratch = nullptr;
  if (scratch == nullptr) scratch = NewThreadScratch();
  scratch->Ensure(bytes);
  return scratch->buffer.data();
}

std::int64_t ThreadScratchBytes() { return g_thread_scratch; }

std::int64_t StoredWorkspaceBytes() {
  Store& store = GetStore();
  const std::lock_guard lock(store.mutex);
  std::int64_t bytes = 0;
  for (const auto& workspace : store.free) bytes += workspace != nullptr ? Bytes(*workspace) : 0;
  return bytes;
}

void ReleaseWorkspaces() {
  Store& store = GetStore();
  std::array<std::unique_ptr<Workspace>, kMostStored> released;
  const std::lock_guard lock(store.mutex);
  released.swap(store.free);
}

std::int64_t ScratchBudget(int threads) { return (std::int64_t{64} << 20) + (std::int64_t{8} << 20) * threads; }

std::int64_t JobBudget(int threads) { return (std::int64_t{20} << 20) + (std::int64_t{5} << 20) * threads; }

std::int64_t LoraBudget(int threads) { return (std::int64_t{36} << 20) + (std::int64_t{2} << 20) * threads; }

}  // namespace moesaic::moe
