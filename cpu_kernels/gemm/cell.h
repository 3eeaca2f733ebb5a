// What the forms of GEMM over tiles (direct_gemm.h, unpack_gemm.h, unpack_stream.h, gradient_gemm.h) share, and what a cell is.
//
// A cell is what an instruction set brings: it multiplies kMaxA panels of left tiles with kMaxB panels of right tiles along the
// whole contraction, with the accumulators in registers:
//
//   template <int NA, int NB, class Aside>
//   static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside);
//   static constexpr bool kVectorsIdle;
//   static constexpr std::int64_t kSliceTiles;  // of contractions of many rows, see direct_gemm.h; 0: they are not cut
//   using Product = ...;  // for few_rows.h, register_direct.h and register_unpack.h; void where the cell does it all
//
// with C[16 a + i][16 b + j] (+)= sum over runs, tiles, pairs p: left_a[i][p] . right_b[p][j]. It makes an Aside::Steps of
// `aside` and calls its NextRun() before each run and its Next() once for each tile of the contraction: these do a little of
// something else meanwhile, prefetch what comes next or, where the vector units are idle, unpack it or write rows of results.
// What changes from step to step stays in registers as long as Steps lives: every store beside AMX's tile loads costs it two to
// four cycles. Aside::kPassing says which factor is not worth a place in L1.
//
// Included by the tier files only, inside their own namespace: everything here is compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

inline constexpr int kMaxCellPanels = 3;
/// Runs of a panel: K / 256 for weights in superblocks. Longer contractions continue from C in memory, which is exact.
inline constexpr int kMaxRuns = 128;

struct CellRun {
  const BFloat16* a[kMaxCellPanels];
  const BFloat16* b[kMaxCellPanels];
  std::int64_t a_stride;
  std::int64_t b_stride;  // > 0
  std::int64_t length;
};

inline int Least(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

/// Which factor of a product passes by once while the other one waits in L1: a hint for cells that can load past L1.
enum class Passing { kNone, kLeft, kRight };

/// Stands for a panel that is missing in a pair.
alignas(64) inline constexpr BFloat16 kZeroTile[kTileElements] = {};

/// Tiles of a page of 4 KB, side by side in a panel.
inline constexpr std::int64_t kPageTiles = 4;

/// Weights on their way to L2: `panels` from `first_panel` on, along `columns` from `first_column` on; at most kMaxCellPanels,
/// or kSuperblock of one page's columns.
struct WeightsAhead {
  const TileMatrix* weights = nullptr;  ///< null: none
  std::int64_t first_panel = 0, panels = 0;
  std::int64_t first_column = 0, columns = 0;
  /// Of a page's tiles so many are prefetched. Weights that are met at the memory's rate leave the others to the hardware,
  /// which has more lines under way than software.
  std::int64_t of_page = kPageTiles;

  std::int64_t tiles() const { return weights == nullptr || weights->data == nullptr ? 0 : panels * columns; }
  std::int64_t lines() const {
    const std::int64_t of_panel = columns / kPageTiles * of_page + Least(columns % kPageTiles, of_page);
    return tiles() == 0 ? 0 : panels * of_panel * (kTileElements / kTileColumns);
  }
};

/// Two runs of cache lines.
struct LinesAhead {
  const BFloat16* begin[2] = {};
  std::int64_t lines = 0;  ///< of each
};

/// Runs of cache lines that are prefetched to L2 in turns, one line of each after the other. While a run is read the hardware
/// fetches ahead of it, within its page of 4 KB: a fixed distance, which lasts longer where several runs advance together.
class LinesInTurn {
 public:
  static constexpr std::int64_t kLine = 32;  ///< elements
  static constexpr int kMost = 16;

  /// The way through the runs of a LinesInTurn that outlives it and is not added to meanwhile. It counts up to zero, which
  /// needs two registers less than from zero.
  class Walk {
   public:
    Walk() = default;
    explicit Walk(const LinesInTurn& lines)
        : ends_(lines.ends_ + lines.count_), offset_(-lines.length_ - kLine), count_(lines.count_) {}

    /// Prefetches the next line. False: none is left.
    MOESAIC_INLINE bool Prefetch() {
      if (next_ == 0) {
        next_ = -count_;
        offset_ += kLine;
      }
      if (offset_ >= 0) return false;
      __builtin_prefetch(ends_[next_++] + offset_, 0, 2);
      return true;
    }

   private:
    const BFloat16* const* ends_ = nullptr;
    std::int64_t offset_ = 0, next_ = 0, count_ = 0;
  };

  /// @param length  of each run, elements: whole lines
  void Begin(std::int64_t length) {
    count_ = 0;
    length_ = length;
  }
  void Add(const BFloat16* run) { ends_[count_++] = run + length_; }
  int count() const { return count_; }

 private:
  int count_ = 0;
  std::int64_t length_ = 0;
  const BFloat16* ends_[kMost];
};

/// Prefetches weights and other lines, a few at each step of the contraction, so that they arrive in L2 while the cell
/// computes: eight pages or more of the weights at a time, if there are so many.
class Prefetcher {
 public:
  static constexpr Passing kPassing = Passing::kRight;

  Prefetcher() = default;
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// What the next `steps` bring: `first`, `then`, and other lines, which all outlive them.
  void Aim(const WeightsAhead& first, const WeightsAhead& then, const LinesAhead& others, std::int64_t steps) {
    first_ = &first;
    then_ = &then;
    others_ = &others;
    stage_ = 0;
    column_ = 0;
    walk_ = {};
    const std::int64_t lines = first.lines() + then.lines() + 2 * others.lines;
    lines_per_step_ = static_cast<int>(CeilDiv(lines, steps > 0 ? steps : 1));
  }

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(Prefetcher& prefetcher)
        : prefetcher_(prefetcher), walk_(prefetcher.walk_), lines_(prefetcher.lines_per_step_) {}
    MOESAIC_INLINE ~Steps() { prefetcher_.walk_ = walk_; }
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void NextRun() {}
    MOESAIC_INLINE void Next() {
      for (int i = lines_; i > 0; --i) {
        while (!walk_.Prefetch()) [[unlikely]] {
          if (!prefetcher_.NextRuns()) {
            lines_ = 0;
            return;
          }
          walk_ = prefetcher_.walk_;
        }
      }
    }

   private:
    Prefetcher& prefetcher_;
    LinesInTurn::Walk walk_;
    int lines_;
  };

 private:
  static constexpr int kEnough = 8;
  static_assert(kEnough - 1 + kMaxCellPanels * kSuperblock / kPageTiles <= LinesInTurn::kMost);  // a cell's panels
  static_assert(kSuperblock <= LinesInTurn::kMost);                                              // a superblock's

  /// Cold, or the walk would leave its registers for this call.
  [[gnu::noinline, gnu::cold]] bool NextRuns() {
    for (; stage_ < 2; ++stage_, column_ = 0) {
      const WeightsAhead& ahead = stage_ == 0 ? *first_ : *then_;
      if (ahead.tiles() == 0 || column_ >= ahead.columns) continue;
      lines_.Begin(Least(ahead.columns - column_, ahead.of_page) * kTileElements);
      while (column_ < ahead.columns && lines_.count() < kEnough) column_ += AddPages(ahead);
      walk_ = LinesInTurn::Walk(lines_);
      return true;
    }
    if (stage_++ > 2 || others_->lines == 0) {
      lines_per_step_ = 0;
      return false;
    }
    lines_.Begin(others_->lines * LinesInTurn::kLine);
    for (const BFloat16* other : others_->begin) lines_.Add(other);
    walk_ = LinesInTurn::Walk(lines_);
    return true;
  }

  /// Of a superblock's columns from column_ on; returns how many.
  std::int64_t AddPages(const WeightsAhead& ahead) {
    std::int64_t tiles = 0;
    for (std::int64_t panel = 0; panel < ahead.panels; ++panel) {
      const TileRun run = ahead.weights->RunAlongPanel(ahead.first_panel + panel, ahead.first_column + column_);
      tiles = run.stride == kTileElements ? Least(run.length, ahead.columns - column_) : 1;
      for (std::int64_t t = 0; t < tiles; t += kPageTiles) lines_.Add(run.data + t * kTileElements);
    }
    return tiles;
  }

  const WeightsAhead *first_ = nullptr, *then_ = nullptr;
  const LinesAhead* others_ = nullptr;
  int stage_ = 0;  // first_, then_, others_, nothing
  int lines_per_step_ = 0;
  std::int64_t column_ = 0;
  LinesInTurn lines_;
  LinesInTurn::Walk walk_;
};

template <class Cell, int NA, class Aside>
void ComputeNb(int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
  if (nb == 1) return Cell::template Compute<NA, 1>(runs, count, c, ldc, accumulate, aside);
  if constexpr (Cell::kMaxB >= 3) {
    if (nb == 3) return Cell::template Compute<NA, 3>(runs, count, c, ldc, accumulate, aside);
  }
  Cell::template Compute<NA, 2>(runs, count, c, ldc, accumulate, aside);
}

template <class Cell, class Aside>
void Compute(int na, int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
  if constexpr (Cell::kMaxA >= 2) {
    if (na == 2) return ComputeNb<Cell, 2>(nb, runs, count, c, ldc, accumulate, aside);
  }
  ComputeNb<Cell, 1>(nb, runs, count, c, ldc, accumulate, aside);
}

/// The stored tiles of a panel from `column` on, before `end`: where they lie, or decoded to `scratch`.
inline TileRun WeightRun(const TileMatrix& weights, std::int64_t panel, std::int64_t column, std::int64_t end,
                         BFloat16* scratch) {
  if (weights.codec == nullptr) {
    TileRun run = weights.RunAlongPanel(panel, column);
    if (run.length > end - column) run.length = end - column;
    return run;
  }
  weights.codec->decode(weights, panel, column, end - column, scratch);
  return {scratch, kTileElements, end - column};
}

inline const BFloat16* WeightTile(const TileMatrix& weights, std::int64_t panel, std::int64_t column, BFloat16* scratch) {
  if (weights.codec == nullptr) return weights.Tile(panel, column);
  weights.codec->decode(weights, panel, column, 1, scratch);
  return scratch;
}

struct NothingAside {
  static constexpr Passing kPassing = Passing::kNone;
  struct Steps {
    MOESAIC_INLINE explicit Steps(NothingAside&) {}
    MOESAIC_INLINE void NextRun() {}
    MOESAIC_INLINE void Next() {}
  };
};

/// 32 numbers of a row of the result, rounded to bf16. A whole line goes past the caches, where the rows of all experts do not
/// fit.
MOESAIC_INLINE void StoreRounded(BFloat16* to, F32x16 low, F32x16 high) {
  if (IsAligned(to)) {
    StreamLine(to, NarrowBoth(low, high));
  } else {
    StoreBf16(to, low);
    StoreBf16(to + 16, high);
  }
}

/// A tile column of a cell's result, rounded, to where the caller wants its rows.
inline void ScatterRows(const float* c, std::int64_t ldc, std::int64_t rows, BFloat16* const* out, std::int64_t first) {
  for (std::int64_t i = 0; i < rows; ++i, c += ldc) {
    if (out[i] != nullptr) StoreRounded(out[i] + first, LoadF32(c), LoadF32(c + 16));
  }
}

}  // namespace
