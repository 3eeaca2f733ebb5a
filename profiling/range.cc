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

// What one thread spent in one range for one group. Written by its thread alone, read by snapshots at any time: hence atomics,
// and plain loads and stores instead of locked additions. One cache line, and the only one that counting touches: between two
// ranges a task fills the caches with other things.
struct alignas(64) Slot {
  std::atomic<std::int64_t> epoch{0};  // the Reset() since which the rest counts
  std::atomic<std::int64_t> calls{0};
  std::atomic<std::int64_t> thread_ns{0};
  std::atomic<double> flops{0};
  std::atomic<double> bytes{0};
  std::atomic<std::int64_t> first_ns{0};
  std::atomic<std::int64_t> last_ns{0};
  std::atomic<bool> apportioned{false};
};
static_assert(sizeof(Slot) == 64);

template <typename T>
void Add(std::atomic<T>& sum, T value) {
  sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// A thread's slots for one group, in chunks that come into being when one of their ranges is first entered.
class SlotTable {
 public:
  SlotTable() = default;
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;
  ~SlotTable() {
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

struct ThreadSlots {
  std::map<GroupId, std::unique_ptr<SlotTable>> groups;  // changed by its thread with the registry's lock; read with either
  GroupId last_group = 0;
  SlotTable* last_table = nullptr;
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

  // The same thread's time in another range, or for another group.
  void Include(const Sums& other) {
    if (other.threads == 0) return;
    calls += other.calls;
    thread_ns += other.thread_ns;
    min_thread_ns = max_thread_ns = thread_ns;
    first_ns = std::min(first_ns, other.first_ns);
    last_ns = std::max(last_ns, other.last_ns);
    threads = 1;
    flops += other.flops;
    bytes += other.bytes;
    apportioned |= other.apportioned;
  }

  // Another thread's.
  void Merge(const Sums& other) {
    calls += other.calls;
    thread_ns += other.thread_ns;
    min_thread_ns = std::min(min_thread_ns, other.min_thread_ns);
    max_thread_ns = std::max(max_thread_ns, other.max_thread_ns);
    first_ns = std::min(first_ns, other.first_ns);
    last_ns = std::max(last_ns, other.last_ns);
    threads += other.threads;
    flops += other.flops;
    bytes += other.bytes;
    apportioned |= other.apportioned;
  }

  // What a slot counts of an epoch; null: nothing.
  static Sums Read(const Slot* slot, std::int64_t epoch) {
    Sums sums;
    if (slot == nullptr || slot->epoch.load(std::memory_order_acquire) != epoch) return sums;
    sums.calls = slot->calls.load(std::memory_order_relaxed);
    sums.min_thread_ns = sums.max_thread_ns = sums.thread_ns = slot->thread_ns.load(std::memory_order_relaxed);
    sums.first_ns = slot->first_ns.load(std::memory_order_relaxed);
    sums.last_ns = slot->last_ns.load(std::memory_order_relaxed);
    sums.threads = 1;
    sums.flops = slot->flops.load(std::memory_order_relaxed);
    sums.bytes = slot->bytes.load(std::memory_order_relaxed);
    sums.apportioned = slot->apportioned.load(std::memory_order_relaxed);
    return sums;
  }
};

using GroupRows = std::map<std::pair<GroupId, RangeId>, Sums>;

struct Entry {
  std::string name;
  std::string category;
  RangeKind kind = RangeKind::kTimed;
  RangeId parent = -1;                             // the kSum range that holds it; -1: none
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
  GroupRows ended_groups;  // of threads that are gone

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

  // One thread's sums, by range; those of a kSum range are those of the ranges that it holds.
  std::vector<Sums> Of(const ThreadSlots& thread) const {
    const std::int64_t epoch = current_epoch.load(std::memory_order_relaxed);
    std::vector<Sums> sums(static_cast<std::size_t>(size()));
    for (RangeId id = size() - 1; id >= 0; --id) {  // a kSum range comes before what it holds
      for (const auto& [group, table] : thread.groups) sums[id].Include(Sums::Read(table->Find(id), epoch));
      if (const RangeId parent = entries[id]->parent; parent >= 0) sums[parent].Include(sums[id]);
    }
    return sums;
  }

  void AddGroups(const ThreadSlots& thread, GroupRows& rows) const {
    const std::int64_t epoch = current_epoch.load(std::memory_order_relaxed);
    for (const auto& [group, table] : thread.groups) {
      if (group == 0) continue;
      for (RangeId id = 0; id < size(); ++id) {
        if (const Sums sums = Sums::Read(table->Find(id), epoch); sums.threads != 0) rows[{group, id}].Merge(sums);
      }
    }
  }

  void EndThread(const ThreadSlots* ended) {
    const std::lock_guard lock(mutex);
    if (ended == nullptr) return;
    const std::vector<Sums> sums = Of(*ended);
    for (RangeId id = 0; id < size(); ++id) entries[id]->ended_threads.Merge(sums[id]);
    AddGroups(*ended, ended_groups);
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

// The calling thread's slots for the group that it works for now. Takes memory where it is new.
SlotTable& OwnTable(ThreadSlots& own) {
  const GroupId group = GroupScope::Current();
  if (own.last_group != group || own.last_table == nullptr) {
    auto found = own.groups.find(group);
    if (found == own.groups.end()) {
      const std::lock_guard lock(Registry::Get().mutex);
      found = own.groups.emplace(group, std::make_unique<SlotTable>()).first;
    }
    own.last_group = group;
    own.last_table = found->second.get();
  }
  return *own.last_table;
}

// Where the calling thread counts. Finding thread-local objects costs about as much as counting does: once for a range and all
// of its shares.
class Counter {
 public:
  /// Not usable while the thread is ending. Takes the memory of slots: before a range runs, where an exception may leave.
  Counter() {
    if (ThreadSlots* own = OwnSlots(); own != nullptr) table_ = &OwnTable(*own);
  }

  void Prepare(RangeId id) {
    if (table_ != nullptr) table_->At(id);
  }

  void Count(RangeId id, std::int64_t begin_ns, std::int64_t end_ns, std::int64_t thread_ns, const Work& work,
             bool apportioned) {
    if (table_ == nullptr) return;
    Slot& slot = table_->At(id);
    if (slot.epoch.load(std::memory_order_relaxed) != epoch_) {  // dates from before the last Reset()
      slot.calls.store(0, std::memory_order_relaxed);
      slot.thread_ns.store(0, std::memory_order_relaxed);
      slot.flops.store(0, std::memory_order_relaxed);
      slot.bytes.store(0, std::memory_order_relaxed);
      slot.first_ns.store(begin_ns, std::memory_order_relaxed);
      slot.last_ns.store(end_ns, std::memory_order_relaxed);
      slot.apportioned.store(false, std::memory_order_relaxed);
      slot.epoch.store(epoch_, std::memory_order_release);
    }
    Add(slot.calls, std::int64_t{1});
    Add(slot.thread_ns, thread_ns);
    Add(slot.flops, work.flops);
    Add(slot.bytes, work.bytes);
    // Nested in itself, a range closes before the one that opened first.
    slot.first_ns.store(std::min(slot.first_ns.load(std::memory_order_relaxed), begin_ns), std::memory_order_relaxed);
    slot.last_ns.store(std::max(slot.last_ns.load(std::memory_order_relaxed), end_ns), std::memory_order_relaxed);
    if (apportioned) slot.apportioned.store(true, std::memory_order_relaxed);
  }

 private:
  SlotTable* table_ = nullptr;
  std::int64_t epoch_ = current_epoch.load(std::memory_order_relaxed);
};

void Trace(RangeId id, std::int64_t begin_ns, std::int64_t end_ns, const Work& work) {
  if (!TraceEnabled()) return;
  const TaskSubject subject = TaskScope::Current();
  Record({.begin_ns = begin_ns,
          .end_ns = end_ns,
          .flops = work.flops,
          .bytes = work.bytes,
          .id = id,
          .expert = subject.expert,
          .rows = subject.rows,
          .kind = EventKind::kRange});
}

const nvtx::Event& EventOf(Entry& entry) {
  const nvtx::Event* event = entry.event.load(std::memory_order_acquire);
  if (event == nullptr) {
    const std::lock_guard lock(Registry::Get().mutex);
    event = entry.event.load(std::memory_order_relaxed);
    if (event == nullptr) {
      event = nvtx::MakeEvent(entry.name, entry.category);
      entry.event.store(event, std::memory_order_release);
    }
  }
  return *event;
}

// Shows a range to the tool, inside those that hold it; how many that makes.
int PushEvents(RangeId id, const Work& work) {
  Entry& entry = *Registry::Get().entries[id];
  const nvtx::Event& event = EventOf(entry);  // all that may throw comes before the first push
  const int outer = entry.parent >= 0 ? PushEvents(entry.parent, {}) : 0;
  nvtx::Push(event, entry.kind == RangeKind::kSum ? TaskSubject{} : TaskScope::Current(), work.flops, work.bytes);
  return outer + 1;
}

}  // namespace

RangeId RegisterRange(const std::string& name, const std::string& category, RangeKind kind) {
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
  registry.entries[id]->kind = kind;
  for (RangeId other = 0; other < id; ++other) {
    const Entry& holds = *registry.entries[other];
    if (holds.kind == RangeKind::kSum && holds.name == category) registry.entries[id]->parent = other;
  }
  registry.ids.emplace(key, id);
  return id;
}

void SetTimersEnabled(bool enabled) {
  if (enabled) CheckClock();
  timers_enabled.store(enabled, std::memory_order_relaxed);
}

bool TimersEnabled() { return timers_enabled.load(std::memory_order_relaxed); }

void Reset() {
  ResetCalls();
  const std::int64_t now = Now();
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  // Slots of an earlier epoch count for nothing; their threads empty them when they next use them.
  current_epoch.store(std::max(now, current_epoch.load(std::memory_order_relaxed) + 1), std::memory_order_relaxed);
  for (RangeId id = 0; id < registry.size(); ++id) {
    registry.entries[id]->ended_threads = {};
  }
  registry.ended_groups.clear();
}

std::vector<RangeStats> Snapshot() {
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  std::vector<std::vector<Sums>> threads;
  threads.reserve(registry.threads.size());
  for (const auto& thread : registry.threads) threads.push_back(registry.Of(*thread));
  std::vector<RangeStats> result;
  result.reserve(registry.size());
  for (RangeId id = 0; id < registry.size(); ++id) {
    const Entry& entry = *registry.entries[id];
    Sums sums = entry.ended_threads;
    for (const std::vector<Sums>& thread : threads) sums.Merge(thread[id]);
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

std::vector<GroupStats> GroupSnapshot() {
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  GroupRows rows = registry.ended_groups;
  for (const auto& thread : registry.threads) registry.AddGroups(*thread, rows);
  std::vector<GroupStats> result;
  result.reserve(rows.size());
  for (const auto& [key, row] : rows) {
    result.push_back({key.first, key.second, row.calls, row.thread_ns, row.flops, row.bytes});
  }
  return result;
}

void AddTimed(RangeId id, std::int64_t begin_ns, std::int64_t ns, double bytes) {
  assert(id >= 0 && id < kMaxRanges);
  if (!TimersEnabled() || begin_ns < current_epoch.load(std::memory_order_relaxed)) return;
  Counter().Count(id, begin_ns, begin_ns + ns, ns, {0, bytes}, false);
}

Range::Range(RangeId id, Work work, std::span<const Share> shares) : id_(id), work_(work) {
  assert(id >= 0 && id < kMaxRanges && shares.size() <= kMostShares);
  for (const Share& share : shares) {
    if (share.work.flops > 0) shares_[num_shares_++] = share;
  }
  const bool timed = TimersEnabled();
  if (timed) {
    Counter counter;
    counter.Prepare(id);
    for (std::size_t i = 0; i < num_shares_; ++i) counter.Prepare(shares_[i].id);
  }
  if (nvtx::Active()) {
    Work all = work;
    for (std::size_t i = 0; i < num_shares_; ++i) {
      all.flops += shares_[i].work.flops;
      all.bytes += shares_[i].work.bytes;
    }
    pushed_ = PushEvents(id, all);
  }
  if (timed) start_ns_ = Now();
}

Range::~Range() {
  if (start_ns_ != 0) {
    const std::int64_t end_ns = Now();
    // A range that was open at a Reset() belongs to neither side.
    if (start_ns_ >= current_epoch.load(std::memory_order_relaxed)) {
      Counter counter;
      double total = work_.flops;
      for (std::size_t i = 0; i < num_shares_; ++i) total += shares_[i].work.flops;
      // On the time line, shares follow the range's own part, so that a trace adds up to what the timers say.
      std::int64_t left = end_ns - start_ns_;
      for (std::size_t i = 0; i < num_shares_; ++i) {
        const Share& share = shares_[i];
        const auto part = static_cast<std::int64_t>(static_cast<double>(end_ns - start_ns_) * (share.work.flops / total));
        counter.Count(share.id, start_ns_, end_ns, part, share.work, true);
        Trace(share.id, start_ns_ + left - part, start_ns_ + left, share.work);
        left -= part;
      }
      counter.Count(id_, start_ns_, end_ns, left, work_, num_shares_ > 0);
      Trace(id_, start_ns_, start_ns_ + left, work_);
    }
  }
  for (; pushed_ > 0; --pushed_) nvtx::Pop();
}

}  // namespace moesaic::profiling
