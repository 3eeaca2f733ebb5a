#include "profiling/range.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "profiling/calls.h"
#include "profiling/clock.h"
#include "profiling/nvtx.h"
#include "profiling/trace.h"

namespace moesaic::profiling {
namespace {

// Ranges are phases and their steps: dozens. The limit lets every table be an array of fixed size that readers need no lock
// for.
constexpr RangeId kMaxRanges = 4096;
constexpr RangeId kChunk = 64;

// What one thread spent in one range. Written by its thread alone, read by Snapshot() at any time: hence atomics, and plain
// loads and stores instead of locked additions.
struct Slot {
  std::atomic<std::int64_t> epoch{0};  // the Reset() since which the rest counts
  std::atomic<std::int64_t> calls{0};
  std::atomic<std::int64_t> thread_ns{0};
  std::atomic<std::int64_t> first_ns{0};
  std::atomic<std::int64_t> last_ns{0};
  std::atomic<double> flops{0};
  std::atomic<double> bytes{0};
  std::atomic<bool> apportioned{false};
};

template <typename T>
void Add(std::atomic<T>& sum, T value) {
  sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// The slots of one thread, in chunks that come into being when one of their ranges is first entered.
class ThreadSlots {
 public:
  ThreadSlots() = default;
  ThreadSlots(const ThreadSlots&) = delete;
  ThreadSlots& operator=(const ThreadSlots&) = delete;
  ~ThreadSlots() {
    for (std::atomic<Chunk*>& chunk : chunks_) {
      delete chunk.load(std::memory_order_relaxed);
    }
  }

  // Owner only.
  Slot& At(RangeId id) {
    std::atomic<Chunk*>& place = chunks_[id / kChunk];
    Chunk* chunk = place.load(std::memory_order_relaxed);
    if (chunk == nullptr) {
      chunk = new Chunk;
      place.store(chunk, std::memory_order_release);
    }
    return (*chunk)[id % kChunk];
  }

  // Any thread. Null: never entered.
  const Slot* Find(RangeId id) const {
    const Chunk* chunk = chunks_[id / kChunk].load(std::memory_order_acquire);
    return chunk == nullptr ? nullptr : &(*chunk)[id % kChunk];
  }

 private:
  using Chunk = std::array<Slot, kChunk>;
  std::array<std::atomic<Chunk*>, kMaxRanges / kChunk> chunks_{};
};

// Sums of one range over threads.
struct Sums {
  std::int64_t calls = 0;
  std::int64_t thread_ns = 0;
  std::int64_t min_thread_ns = std::numeric_limits<std::int64_t>::max();
  std::int64_t max_thread_ns = 0;
  std::int64_t first_ns = std::numeric_limits<std::int64_t>::max();
  std::int64_t last_ns = 0;
  int threads = 0;
  double flops = 0;
  double bytes = 0;
  bool apportioned = false;

  void Merge(const Slot& slot, std::int64_t epoch) {
    if (slot.epoch.load(std::memory_order_acquire) != epoch) {
      return;
    }
    const std::int64_t ns = slot.thread_ns.load(std::memory_order_relaxed);
    calls += slot.calls.load(std::memory_order_relaxed);
    thread_ns += ns;
    min_thread_ns = std::min(min_thread_ns, ns);
    max_thread_ns = std::max(max_thread_ns, ns);
    first_ns = std::min(first_ns, slot.first_ns.load(std::memory_order_relaxed));
    last_ns = std::max(last_ns, slot.last_ns.load(std::memory_order_relaxed));
    threads += 1;
    flops += slot.flops.load(std::memory_order_relaxed);
    bytes += slot.bytes.load(std::memory_order_relaxed);
    apportioned |= slot.apportioned.load(std::memory_order_relaxed);
  }
};

struct Entry {
  std::string name;
  std::string category;
  Sums ended_threads;                              // of threads that are gone
  std::atomic<const nvtx::Event*> event{nullptr};  // made when a tool is there and the range first opens
};

std::atomic<bool> timers_enabled{false};
std::atomic<std::int64_t> current_epoch{1};  // time of the last Reset()

// Lives until the process ends: threads may outlive static objects.
struct Registry {
  std::mutex mutex;  // guards everything but the atomics
  std::map<std::pair<std::string, std::string>, RangeId> ids;
  std::array<std::unique_ptr<Entry>, kMaxRanges> entries;
  std::vector<std::unique_ptr<ThreadSlots>> threads;

  RangeId size() const { return static_cast<RangeId>(ids.size()); }

  static Registry& Get() {
    static Registry& registry = *[] {
      // A child of fork() must not find the mutex held by a thread that it does not have.
      pthread_atfork([] { Get().mutex.lock(); }, [] { Get().mutex.unlock(); }, [] { Get().mutex.unlock(); });
      return new Registry;
    }();
    return registry;
  }

  ThreadSlots* AddThread() {
    const std::lock_guard lock(mutex);
    return threads.emplace_back(std::make_unique<ThreadSlots>()).get();
  }

  void EndThread(const ThreadSlots* ended) {
    const std::lock_guard lock(mutex);
    for (RangeId id = 0; id < size(); ++id) {
      if (const Slot* slot = ended->Find(id)) {
        entries[id]->ended_threads.Merge(*slot, current_epoch.load(std::memory_order_relaxed));
      }
    }
    std::erase_if(threads, [&](const auto& thread) { return thread.get() == ended; });
  }
};

// The calling thread's slots; null before its first timed range and after its thread-local objects are gone.
thread_local ThreadSlots* own_slots = nullptr;
thread_local bool thread_ended = false;

struct ThreadExit {
  ~ThreadExit() {
    thread_ended = true;
    Registry::Get().EndThread(std::exchange(own_slots, nullptr));
  }
};

ThreadSlots* OwnSlots() {
  if (own_slots == nullptr && !thread_ended) {
    own_slots = Registry::Get().AddThread();
    static thread_local ThreadExit at_exit;
    (void)at_exit;
  }
  return own_slots;
}

// The calling thread's slot of a range, emptied if it dates from before the last Reset(). Null: the thread is ending.
Slot* OwnSlot(RangeId id, std::int64_t start_ns) {
  ThreadSlots* slots = OwnSlots();
  if (slots == nullptr) {
    return nullptr;
  }
  Slot& slot = slots->At(id);
  const std::int64_t epoch = current_epoch.load(std::memory_order_relaxed);
  if (slot.epoch.load(std::memory_order_relaxed) != epoch) {
    slot.calls.store(0, std::memory_order_relaxed);
    slot.thread_ns.store(0, std::memory_order_relaxed);
    slot.first_ns.store(start_ns, std::memory_order_relaxed);
    slot.last_ns.store(start_ns, std::memory_order_relaxed);
    slot.flops.store(0, std::memory_order_relaxed);
    slot.bytes.store(0, std::memory_order_relaxed);
    slot.apportioned.store(false, std::memory_order_relaxed);
    slot.epoch.store(epoch, std::memory_order_release);
  }
  return &slot;
}

void CountTime(Slot& slot, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t thread_ns) {
  Add(slot.calls, std::int64_t{1});
  Add(slot.thread_ns, thread_ns);
  // Nested in itself, a range closes before the one that opened first.
  slot.first_ns.store(std::min(slot.first_ns.load(std::memory_order_relaxed), begin_ns), std::memory_order_relaxed);
  slot.last_ns.store(std::max(slot.last_ns.load(std::memory_order_relaxed), end_ns), std::memory_order_relaxed);
}

void PushEvent(RangeId id) {
  Entry& entry = *Registry::Get().entries[id];
  const nvtx::Event* event = entry.event.load(std::memory_order_acquire);
  if (event == nullptr) {
    const std::lock_guard lock(Registry::Get().mutex);
    event = entry.event.load(std::memory_order_relaxed);
    if (event == nullptr) {
      event = nvtx::MakeEvent(entry.name, entry.category);
      entry.event.store(event, std::memory_order_release);
    }
  }
  nvtx::Push(*event, TaskScope::Current());
}

}  // namespace

RangeId RegisterRange(const std::string& name, const std::string& category) {
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  const std::pair key(name, category);
  if (const auto known = registry.ids.find(key); known != registry.ids.end()) {
    return known->second;
  }
  const RangeId id = registry.size();
  if (id == kMaxRanges) {
    throw std::length_error("RegisterRange: \"" + name + "\" would be one more than " + std::to_string(kMaxRanges) + " ranges");
  }
  registry.entries[id] = std::make_unique<Entry>();
  registry.entries[id]->name = name;
  registry.entries[id]->category = category;
  registry.ids.emplace(key, id);
  return id;
}

void SetTimersEnabled(bool enabled) { timers_enabled.store(enabled, std::memory_order_relaxed); }

bool TimersEnabled() { return timers_enabled.load(std::memory_order_relaxed); }

void Reset() {
  ResetCalls();
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  // Slots of an earlier epoch count for nothing; their threads empty them when they next use them.
  current_epoch.store(std::max(Now(), current_epoch.load(std::memory_order_relaxed) + 1), std::memory_order_relaxed);
  for (RangeId id = 0; id < registry.size(); ++id) {
    registry.entries[id]->ended_threads = {};
  }
}

std::vector<RangeStats> Snapshot() {
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  const std::int64_t epoch = current_epoch.load(std::memory_order_relaxed);
  std::vector<RangeStats> result;
  result.reserve(registry.size());
  for (RangeId id = 0; id < registry.size(); ++id) {
    const Entry& entry = *registry.entries[id];
    Sums sums = entry.ended_threads;
    for (const auto& thread : registry.threads) {
      if (const Slot* slot = thread->Find(id)) {
        sums.Merge(*slot, epoch);
      }
    }
    RangeStats& stats = result.emplace_back();
    stats.name = entry.name;
    stats.category = entry.category;
    if (sums.threads != 0) {
      stats.calls = sums.calls;
      stats.thread_ns = sums.thread_ns;
      stats.min_thread_ns = sums.min_thread_ns;
      stats.max_thread_ns = sums.max_thread_ns;
      stats.span_ns = sums.last_ns - sums.first_ns;
      stats.threads = sums.threads;
      stats.flops = sums.flops;
      stats.bytes = sums.bytes;
      stats.apportioned = sums.apportioned;
    }
  }
  return result;
}

void AddTimed(RangeId id, std::int64_t begin_ns, std::int64_t ns, double bytes) {
  assert(id >= 0 && id < kMaxRanges);
  if (!TimersEnabled() || begin_ns < current_epoch.load(std::memory_order_relaxed)) return;
  if (Slot* slot = OwnSlot(id, begin_ns)) {
    CountTime(*slot, begin_ns, begin_ns + ns, ns);
    Add(slot->bytes, bytes);
  }
}

Range::Range(RangeId id) : id_(id), start_ns_(0) {
  assert(id >= 0 && id < kMaxRanges);
  const bool timed = TimersEnabled();
  if (timed) {
    // Takes the memory here, where an exception may leave, and not in the destructor.
    if (ThreadSlots* slots = OwnSlots()) {
      slots->At(id);
    }
  }
  if (nvtx::Active()) {
    PushEvent(id);
  }
  if (timed) {
    start_ns_ = Now();
  }
}

Range::~Range() {
  if (start_ns_ != 0) {
    const std::int64_t end_ns = Now();
    // A range that was open at a Reset() belongs to neither side.
    if (start_ns_ >= current_epoch.load(std::memory_order_relaxed)) {
      double total = flops_;
      for (int i = 0; i < shares_; ++i) total += shared_[i].flops;
      // On the time line, shares follow the range's own part, so that a trace adds up to what the timers say.
      std::int64_t left = end_ns - start_ns_;
      for (int i = 0; i < shares_ && total > 0; ++i) {
        const auto part = static_cast<std::int64_t>(static_cast<double>(end_ns - start_ns_) * (shared_[i].flops / total));
        Count(shared_[i].id, end_ns, part);
        Trace(shared_[i].id, start_ns_ + left - part, start_ns_ + left, shared_[i].flops, shared_[i].bytes);
        left -= part;
      }
      Count(id_, end_ns, left);
      Trace(id_, start_ns_, start_ns_ + left, flops_, bytes_);
    }
  }
  if (nvtx::Active()) {
    const nvtx::Event* event = Registry::Get().entries[id_]->event.load(std::memory_order_acquire);
    if (flops_ > 0 && event != nullptr) nvtx::MarkFlops(*event, flops_);
    nvtx::Pop();
  }
}

void Range::Trace(RangeId id, std::int64_t begin_ns, std::int64_t end_ns, double flops, double bytes) {
  if (!TraceEnabled()) return;
  const TaskScope::Subject subject = TaskScope::Current();
  Record({.begin_ns = begin_ns,
          .end_ns = end_ns,
          .flops = flops,
          .bytes = bytes,
          .id = id,
          .expert = subject.expert,
          .rows = subject.rows,
          .kind = EventKind::kRange});
}

void Range::Count(RangeId id, std::int64_t end_ns, std::int64_t thread_ns) {
  Slot* slot = OwnSlot(id, start_ns_);
  if (slot == nullptr) {
    return;
  }
  CountTime(*slot, start_ns_, end_ns, thread_ns);
  if (shares_ > 0) {
    slot->apportioned.store(true, std::memory_order_relaxed);
  }
}

void Range::AddWork(double flops, double bytes) {
  flops_ += flops;  // for a tool in any case
  bytes_ += bytes;
  if (start_ns_ == 0 || start_ns_ < current_epoch.load(std::memory_order_relaxed)) {
    return;
  }
  if (Slot* slot = OwnSlot(id_, start_ns_)) {
    Add(slot->flops, flops);
    Add(slot->bytes, bytes);
  }
}

void Range::Share(RangeId other, double flops, double bytes) {
  if (start_ns_ == 0 || start_ns_ < current_epoch.load(std::memory_order_relaxed)) {
    return;
  }
  assert(shares_ < 3);
  shared_[shares_++] = {other, flops, bytes};
  if (Slot* slot = OwnSlot(other, start_ns_)) {
    Add(slot->flops, flops);
    Add(slot->bytes, bytes);
  }
}

}  // namespace moesaic::profiling
