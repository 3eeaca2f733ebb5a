// Recycling memory for outputs, saved tensors and gradients.
//
// Fresh memory is slow: the kernel clears each page on first touch (100 MB on 4 KB pages: 18 ms, reused: 2 ms). A training step
// asks for the same sizes again and again, so blocks that are given back are kept and handed out again.
//
// Size classes: eight per power of two, so that at most one eighth of a block above 512 bytes is waste, and a block serves only
// requests of its own class. What is kept is bounded in two ways:
//  - Blocks in use and blocks kept together take at most 1.25 x the most that was in use at once in the recent past, plus
//    64 MiB; before a fresh block would pass that, the blocks unused for longest are returned to the system.
//  - A block that was not used again within kWindow allocations is returned to the system.
// "Recent past": the present and the previous window of kWindow allocations, a few training steps of a large model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace moesaic::bindings {

/// All byte counts are of whole blocks, the waste of size classes included.
struct ArenaStats {
  std::int64_t in_use_bytes = 0;       ///< handed out and not given back
  std::int64_t cached_bytes = 0;       ///< given back and kept for reuse
  std::int64_t peak_in_use_bytes = 0;  ///< the most in use at once, ever
  std::int64_t blocks_in_use = 0;
  std::int64_t allocations = 0;  ///< calls of Allocate
  std::int64_t reused = 0;       ///< of them, served from kept blocks
};

/// Threads: every member function may be called from any thread. A fork while another thread is inside is safe.
class Arena {
 public:
  static constexpr std::int64_t kWindow = 4096;
  static constexpr std::int64_t kSlackBytes = std::int64_t{64} << 20;
  /// Blocks from this size on are mapped by themselves, aligned to 2 MiB, and ask for huge pages.
  static constexpr std::int64_t kLargeBytes = std::int64_t{2} << 20;

  /// The process's arena. Never destroyed: tensors may outlive the end of main().
  static Arena& Default();

  /// Memory for `bytes` bytes (0 gives a block too), aligned to 64 bytes, contents undefined.
  /// Throws std::bad_alloc where the system has no more, after having returned everything that was kept.
  void* Allocate(std::int64_t bytes);

  /// Gives back what Allocate(bytes) returned.
  void Release(void* data, std::int64_t bytes) noexcept;

  /// Returns every kept block to the system.
  /// @return bytes returned
  std::int64_t Trim();

  ArenaStats Stats();

  /// Bytes of the block that serves a request of `bytes`.
  static std::int64_t BlockBytes(std::int64_t bytes);

 private:
  struct Kept {
    void* data;
    std::int64_t released_at;  ///< value of stats_.allocations then
  };
  struct SizeClass {
    std::int64_t block_bytes = 0;
    std::deque<Kept> kept;  ///< in the order of release: reused from the back, returned to the system from the front
  };
  /// Blocks on their way back to the system. Declared before the lock, so that they are returned after it is released.
  struct Victims {
    struct Block {
      void* data;
      std::int64_t bytes;
    };
    std::vector<Block> blocks;
    ~Victims();
  };

  Arena() = default;
  // Those below expect mutex_ to be held, TakeKept excepted.
  SizeClass& ClassOf(std::int64_t block_bytes);
  void CountInUse(std::int64_t block_bytes);
  bool EvictOldest(std::int64_t released_before, Victims* victims);
  /// A kept block, or null after having made room for a fresh one.
  void* TakeKept(std::int64_t block_bytes);

  std::mutex mutex_;
  std::vector<SizeClass> classes_;  ///< sorted by block_bytes
  ArenaStats stats_;
  std::int64_t window_peak_ = 0;           ///< most in use at once in the present window
  std::int64_t previous_window_peak_ = 0;  ///< and in the previous one
};

}  // namespace moesaic::bindings
