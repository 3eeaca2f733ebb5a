#include "bindings/arena.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <new>

namespace moesaic::bindings {
namespace {

constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
constexpr std::int64_t kSmallPage = 4096;
/// Allocations between two searches for blocks that were not used again.
constexpr std::int64_t kSearchEvery = 64;

std::int64_t RoundUp(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Maps more than is wanted and gives back both ends, because mmap promises no more than 4 KiB alignment.
void* MapLarge(std::int64_t bytes) {
  const std::int64_t mapped = bytes + kHugePage;
  void* raw = mmap(nullptr, static_cast<std::size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::intptr_t>(raw);
  const std::intptr_t aligned = RoundUp(begin, kHugePage);
  if (aligned != begin) munmap(raw, static_cast<std::size_t>(aligned - begin));
  const std::int64_t tail = begin + mapped - (aligned + bytes);
  if (tail != 0) munmap(reinterpret_cast<void*>(aligned + bytes), static_cast<std::size_t>(tail));
  void* data = reinterpret_cast<void*>(aligned);
  // A wish: without transparent huge pages the block works as well, only slower at first touch.
  madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  return data;
}

void* SystemAllocate(std::int64_t block_bytes) {
  if (block_bytes >= Arena::kLargeBytes) return MapLarge(block_bytes);
  return std::aligned_alloc(kAlignment, static_cast<std::size_t>(block_bytes));
}

void SystemFree(void* data, std::int64_t block_bytes) noexcept {
  if (block_bytes >= Arena::kLargeBytes) {
    munmap(data, static_cast<std::size_t>(block_bytes));
  } else {
    std::free(data);
  }
}

}  // namespace

Arena& Arena::Default() {
  // A child of fork() has only the thread that forked: without the handlers the mutex could stay locked by one that is gone.
  static Arena* const arena = [] {
    pthread_atfork([] { Default().mutex_.lock(); }, [] { Default().mutex_.unlock(); }, [] { Default().mutex_.unlock(); });
    return new Arena;
  }();
  return *arena;
}

std::int64_t Arena::BlockBytes(std::int64_t bytes) {
  if (bytes <= 8 * kAlignment) return RoundUp(std::max<std::int64_t>(bytes, 1), kAlignment);
  const std::int64_t power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(bytes)));
  const std::int64_t block = RoundUp(bytes, power / 8);
  return block >= kLargeBytes ? RoundUp(block, kSmallPage) : block;
}

Arena::SizeClass& Arena::ClassOf(std::int64_t block_bytes) {
  const auto place = std::lower_bound(classes_.begin(), classes_.end(), block_bytes,
                                      [](const SizeClass& c, std::int64_t bytes) { return c.block_bytes < bytes; });
  if (place != classes_.end() && place->block_bytes == block_bytes) return *place;
  return *classes_.insert(place, SizeClass{block_bytes, {}});
}

bool Arena::EvictOldest(std::int64_t released_before, Victims* victims) {
  SizeClass* oldest = nullptr;
  for (SizeClass& c : classes_) {
    if (c.kept.empty() || c.kept.front().released_at >= released_before) continue;
    if (oldest == nullptr || c.kept.front().released_at < oldest->kept.front().released_at) oldest = &c;
  }
  if (oldest == nullptr) return false;
  victims->blocks.push_back({oldest->kept.front().data, oldest->block_bytes});
  oldest->kept.pop_front();
  stats_.cached_bytes -= oldest->block_bytes;
  return true;
}

Arena::Victims::~Victims() {
  for (const auto& [data, bytes] : blocks) SystemFree(data, bytes);
}

void Arena::CountInUse(std::int64_t block_bytes) {
  stats_.in_use_bytes += block_bytes;
  stats_.blocks_in_use += 1;
  stats_.peak_in_use_bytes = std::max(stats_.peak_in_use_bytes, stats_.in_use_bytes);
  window_peak_ = std::max(window_peak_, stats_.in_use_bytes);
}

void* Arena::TakeKept(std::int64_t block_bytes) {
  Victims victims;
  const std::lock_guard lock(mutex_);
  if (++stats_.allocations % kWindow == 0) {
    previous_window_peak_ = window_peak_;
    window_peak_ = stats_.in_use_bytes;
  }
  if (stats_.allocations % kSearchEvery == 0) {
    while (EvictOldest(stats_.allocations - kWindow, &victims)) {
    }
  }
  SizeClass& size_class = ClassOf(block_bytes);
  if (!size_class.kept.empty()) {
    void* data = size_class.kept.back().data;
    size_class.kept.pop_back();
    stats_.cached_bytes -= block_bytes;
    stats_.reused += 1;
    CountInUse(block_bytes);
    return data;
  }
  const std::int64_t in_use = stats_.in_use_bytes + block_bytes;
  const std::int64_t recent_peak = std::max({window_peak_, previous_window_peak_, in_use});
  const std::int64_t limit = recent_peak + recent_peak / 4 + kSlackBytes;
  while (in_use + stats_.cached_bytes > limit && EvictOldest(stats_.allocations + 1, &victims)) {
  }
  return nullptr;
}

void* Arena::Allocate(std::int64_t bytes) {
  // Past this, sizes would overflow below; no host has such memory.
  if (bytes < 0 || bytes > std::numeric_limits<std::int64_t>::max() / 4) throw std::bad_alloc();
  const std::int64_t block_bytes = BlockBytes(bytes);
  if (void* data = TakeKept(block_bytes)) return data;
  void* data = SystemAllocate(block_bytes);
  if (data == nullptr && Trim() > 0) data = SystemAllocate(block_bytes);
  if (data == nullptr) throw std::bad_alloc();
  const std::lock_guard lock(mutex_);
  CountInUse(block_bytes);
  return data;
}

void Arena::Release(void* data, std::int64_t bytes) noexcept {
  const std::int64_t block_bytes = BlockBytes(bytes);
  {
    const std::lock_guard lock(mutex_);
    stats_.in_use_bytes -= block_bytes;
    stats_.blocks_in_use -= 1;
    try {
      ClassOf(block_bytes).kept.push_back({data, stats_.allocations});
      stats_.cached_bytes += block_bytes;
      return;
    } catch (const std::bad_alloc&) {
      // No memory to remember the block by: it goes back to the system.
    }
  }
  SystemFree(data, block_bytes);
}

std::int64_t Arena::Trim() {
  Victims victims;
  const std::lock_guard lock(mutex_);
  const std::int64_t returned = stats_.cached_bytes;
  while (EvictOldest(stats_.allocations + 1, &victims)) {
  }
  return returned;
}

ArenaStats Arena::Stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace moesaic::bindings
