// What the forms of GEMM over tiles (direct_gemm.h, unpack_gemm.h, gradient_gemm.h) share, and what a cell is.
//
// A cell is what an instruction set brings: it multiplies kMaxA panels of left tiles with kMaxB panels of right tiles along the
// whole contraction, with the accumulators in registers:
//
//   template <int NA, int NB, class Aside>
//   static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside);
//   static constexpr bool kVectorsIdle;
//   static constexpr std::int64_t kSliceTiles;  // see direct_gemm.h; 0: contractions are not cut
//   using Product = ...;  // for few_rows.h; void where the cell serves few rows as well
//
// with C[16 a + i][16 b + j] (+)= sum over runs, tiles, pairs p: left_a[i][p] . right_b[p][j]. Once for each tile of the
// contraction it calls aside.Step(), which does a little of something else meanwhile: prefetch what comes next or, where the
// vector units are idle, unpack it.
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
  std::int64_t b_stride;
  std::int64_t length;
};

/// Walks the lines of a PrefetchRange, a few at each step of the contraction, so that they arrive in L2 while the cell
/// computes.
class Prefetcher {
 public:
  Prefetcher(const PrefetchRange& range, std::int64_t steps)
      : range_(range), lines_per_step_(0), panel_(0), column_(0), line_(nullptr), end_(nullptr) {
    if (range.weights.data == nullptr) panel_ = range.panels;
    const std::int64_t lines = (range.panels - panel_) * range.columns * (kTileElements / kLine) + 2 * range.lines;
    if (steps > 0) lines_per_step_ = static_cast<int>(CeilDiv(lines, steps));
  }

  MOESAIC_INLINE void Step() {
    for (int i = 0; i < lines_per_step_; ++i) {
      if (line_ == end_ && !NextRun()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ += kLine;
    }
  }

 private:
  static constexpr std::int64_t kLine = 32;  // elements

  [[gnu::noinline]] bool NextRun() {
    if (panel_ == range_.panels) {
      if (other_ == 2 || range_.lines == 0) {
        lines_per_step_ = 0;
        return false;
      }
      line_ = range_.others[other_++];
      end_ = line_ + range_.lines * kLine;
      return true;
    }
    TileRun run = range_.weights.RunAlongPanel(range_.first_panel + panel_, range_.first_column + column_);
    if (run.stride != kTileElements) run.length = 1;
    if (run.length > range_.columns - column_) run.length = range_.columns - column_;
    line_ = run.data;
    end_ = run.data + run.length * kTileElements;
    column_ += run.length;
    if (column_ == range_.columns) {
      column_ = 0;
      ++panel_;
    }
    return true;
  }

  const PrefetchRange& range_;
  int lines_per_step_;
  std::int64_t panel_;
  std::int64_t column_;
  int other_ = 0;
  const BFloat16* line_;
  const BFloat16* end_;
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

inline int Least(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

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
  MOESAIC_INLINE void Step() {}
};

/// Rows of a cell's result, rounded to bf16, to where the caller wants them. A whole line goes past the caches, where the rows
/// of all experts do not fit.
inline void ScatterRows(const float* c, std::int64_t ldc, int rows, int columns, BFloat16* const* out, std::int64_t first) {
  for (int i = 0; i < rows; ++i, c += ldc) {
    if (out[i] == nullptr) continue;
    BFloat16* destination = out[i] + first;
    if (columns == 32 && IsAligned(destination)) {
      StreamLine(destination, NarrowBoth(LoadF32(c), LoadF32(c + 16)));
    } else {
      for (int j = 0; j < columns; j += 16) StoreBf16(destination + j, LoadF32(c + j));
    }
  }
}

}  // namespace
