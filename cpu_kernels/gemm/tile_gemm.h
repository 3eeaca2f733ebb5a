// Both forms of GEMM over tiles, for any cell.
//
// A cell is what an instruction set brings: it multiplies kMaxA panels of left tiles with kMaxB panels of right tiles along the
// whole contraction, with the accumulators in registers:
//
//   template <int NA, int NB, class Aside>
//   static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside);
//   static constexpr bool kVectorsIdle;
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

/// The stored tiles of a panel from `column` on: where they lie, or decoded to `scratch`.
inline TileRun WeightRun(const TileMatrix& weights, std::int64_t panel, std::int64_t column, BFloat16* scratch) {
  if (weights.codec == nullptr) return weights.RunAlongPanel(panel, column);
  weights.codec->decode(weights, panel, column, weights.columns - column, scratch);
  return {scratch, kTileElements, weights.columns - column};
}

/// The left panels of one group as runs; where they started (segment and tile column) tells where the right tiles are.
struct DirectRuns {
  CellRun runs[kMaxRuns];
  const TileMatrix* activations[kMaxRuns];
  std::int64_t column[kMaxRuns];
  int count = 0;
};

template <class Cell>
void DirectGroup(const DirectGemmArgs& args, DirectRuns& group, int na, float* c, bool accumulate, Prefetcher& prefetcher) {
  for (int r = 0; r < group.count; ++r) {
    for (int b = 0; b < Cell::kMaxB; ++b) group.runs[r].b[b] = group.activations[r]->Tile(b, group.column[r]);
  }
  for (std::int64_t t = 0; t < args.activation_panels; t += Cell::kMaxB) {
    const int nb = Least(Cell::kMaxB, args.activation_panels - t);
    Compute<Cell>(na, nb, group.runs, group.count, c + t * kPanelRows, args.ldc, accumulate, prefetcher);
    // The panels of a column of activations follow each other.
    for (int r = 0; r < group.count; ++r) {
      for (int b = 0; b < Cell::kMaxB; ++b) group.runs[r].b[b] += Cell::kMaxB * kTileElements;
    }
  }
}

template <class Cell>
void DirectGemm(const DirectGemmArgs& args) {
  std::int64_t steps = 0;
  for (const GemmSegment& segment : args.segments) steps += segment.weights.columns;
  steps *= CeilDiv(args.panels, Cell::kMaxA) * CeilDiv(args.activation_panels, Cell::kMaxB);
  Prefetcher prefetcher(args.prefetch, steps);
  [[maybe_unused]] const typename Cell::Scope scope;
  DirectRuns group;
  for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
    const int na = Least(Cell::kMaxA, args.panels - p);
    float* c = args.c + p * kPanelRows * args.ldc;
    bool accumulate = args.accumulate;
    BFloat16* decoded = args.scratch;
    group.count = 0;
    for (const GemmSegment& segment : args.segments) {
      for (std::int64_t k = 0; k < segment.weights.columns;) {
        if (group.count == kMaxRuns) {
          DirectGroup<Cell>(args, group, na, c, accumulate, prefetcher);
          accumulate = true;
          group.count = 0;
        }
        CellRun& run = group.runs[group.count];
        for (int a = 0; a < na; ++a) {
          const TileRun tiles = WeightRun(segment.weights, args.first_panel + p + a, k, decoded);
          if (segment.weights.codec != nullptr) decoded += tiles.length * kTileElements;
          run.a[a] = tiles.data;
          run.a_stride = tiles.stride;
          run.length = tiles.length;
        }
        run.b_stride = segment.activations.column_stride * kTileElements;
        group.activations[group.count] = &segment.activations;
        group.column[group.count] = k;
        ++group.count;
        k += run.length;
      }
    }
    DirectGroup<Cell>(args, group, na, c, accumulate, prefetcher);
  }
}

inline const BFloat16* WeightTile(const TileMatrix& weights, std::int64_t panel, std::int64_t column, BFloat16* scratch) {
  if (weights.codec == nullptr) return weights.Tile(panel, column);
  weights.codec->decode(weights, panel, column, 1, scratch);
  return scratch;
}

struct NothingAside {
  MOESAIC_INLINE void Step() {}
};

/// Lays one tile column of the weights of all segments out as two panels of right tiles, `low` for its columns 0..15 and `high`
/// for 16..31, in units of a quarter of a tile, a few at each step, and prefetches the tile column after it. (A share of the
/// next two, four or eight columns instead, to read memory in longer runs, was no faster at any number of rows.)
class ColumnUnpacker {
 public:
  static constexpr int kUnits = 4;  ///< of a tile

  /// @param column  of the weights; at or beyond `end` there is nothing to do
  ColumnUnpacker(const UnpackGemmArgs& args, std::int64_t column, std::int64_t end, std::int64_t depth, std::int64_t steps,
                 BFloat16* right)
      : args_(args), column_(column), end_(end), low_(right), high_(right + depth * kTileElements) {
    units_left_ = column < end ? 2 * depth * kUnits : 0;
    units_per_1024_steps_ = CeilDiv(1024 * units_left_, steps > 0 ? steps : 1);
  }

  MOESAIC_INLINE void Step() {
    credit_ += units_per_1024_steps_;
    while (credit_ >= 1024 && units_left_ > 0) {
      credit_ -= 1024;
      Unit();
    }
  }

  void Finish() {
    while (units_left_ > 0) Unit();
  }

 private:
  MOESAIC_INLINE void Unit() {
    constexpr std::int64_t kElements = kTileElements / kUnits;
    if (unit_ % kUnits == 0) NextTile();
    const std::int64_t from = unit_ % kUnits * kElements;
    // Two stored tiles make one right tile: 8 row pairs each.
    const std::int64_t to = unit_ / 2 * kElements + unit_ % 2 * (kElements / 2);
    InterleaveRowPairs<kPanelRows / 2 / kUnits>(tile_ + from, low_ + to, high_ + to);
    if (ahead_ != nullptr) {
      for (std::int64_t line = 0; line < kElements; line += kTileColumns) __builtin_prefetch(ahead_ + from + line, 0, 2);
    }
    ++unit_;
    --units_left_;
  }

  [[gnu::noinline]] void NextTile() {
    alignas(64) static constexpr BFloat16 kZeros[kTileElements] = {};
    while (panel_ >= RoundUp(args_.segments[segment_].weights.panels, 2)) {
      ++segment_;
      panel_ = 0;
    }
    const TileMatrix& weights = args_.segments[segment_].weights;
    ahead_ = nullptr;
    tile_ = kZeros;
    if (panel_ < weights.panels) {
      tile_ = WeightTile(weights, panel_, column_, decoded_);
      if (column_ + 1 < end_ && weights.codec == nullptr) ahead_ = weights.Tile(panel_, column_ + 1);
    }
    ++panel_;
  }

  const UnpackGemmArgs& args_;
  std::int64_t column_, end_;
  BFloat16* low_;
  BFloat16* high_;
  std::int64_t units_left_, units_per_1024_steps_, credit_ = 0, unit_ = 0;
  std::size_t segment_ = 0;
  std::int64_t panel_ = 0;
  const BFloat16* tile_ = nullptr;
  const BFloat16* ahead_ = nullptr;
  alignas(64) BFloat16 decoded_[kTileElements];
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

/// One tile column of C from its unpacked right panels, all rows.
template <class Cell, class Aside>
void UnpackedColumn(const UnpackGemmArgs& args, std::int64_t column, std::int64_t depth, const BFloat16* right, Aside& aside) {
  static_assert(Cell::kMaxB >= 2);
  CellRun runs[8];
  for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
    const int na = Least(Cell::kMaxA, args.panels - p);
    int count = 0;
    std::int64_t first = 0;
    for (const GemmSegment& segment : args.segments) {
      CellRun& run = runs[count++];
      run.length = CeilDiv(segment.weights.panels, 2);
      run.a_stride = segment.activations.column_stride * kTileElements;
      run.b_stride = kTileElements;
      for (int a = 0; a < na; ++a) run.a[a] = segment.activations.Tile(args.first_panel + p + a, 0);
      for (int b = 0; b < 2; ++b) run.b[b] = right + (b * depth + first) * kTileElements;
      first += run.length;
    }
    if (args.rows == nullptr) {
      float* c = args.c + p * kPanelRows * args.ldc + column * kTileColumns;
      Compute<Cell>(na, 2, runs, count, c, args.ldc, args.accumulate, aside);
    } else {
      alignas(64) float c[Cell::kMaxA * kPanelRows * kTileColumns];
      Compute<Cell>(na, 2, runs, count, c, kTileColumns, false, aside);
      ScatterRows(c, kTileColumns, na * 16, 32, args.rows + p * kPanelRows, (args.first_column + column) * kTileColumns);
    }
  }
}

/// A column is unpacked while the one before it is multiplied, where that costs nothing, or else just before.
template <class Cell>
void UnpackGemm(const UnpackGemmArgs& args) {
  std::int64_t depth = 0;
  for (const GemmSegment& segment : args.segments) depth += CeilDiv(segment.weights.panels, 2);
  const std::int64_t steps = depth * CeilDiv(args.panels, Cell::kMaxA), end = args.first_column + args.columns;
  [[maybe_unused]] const typename Cell::Scope scope;
  ColumnUnpacker(args, args.first_column, end, depth, 1, args.scratch).Finish();
  for (std::int64_t n = 0; n < args.columns; ++n) {
    const BFloat16* right = args.scratch + n % 2 * 2 * depth * kTileElements;
    BFloat16* next_right = args.scratch + (n + 1) % 2 * 2 * depth * kTileElements;
    ColumnUnpacker next(args, args.first_column + n + 1, end, depth, steps, next_right);
    if constexpr (Cell::kVectorsIdle) {
      UnpackedColumn<Cell>(args, n, depth, right, next);
    } else {
      NothingAside nothing;
      UnpackedColumn<Cell>(args, n, depth, right, nothing);
    }
    next.Finish();
  }
  if (args.rows != nullptr) StreamFence();
}

template <class Cell>
void GradientGemm(const GradientGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  NothingAside nothing;
  const std::int64_t right_panels = args.segments[0].right.panels;
  for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
    const int na = Least(Cell::kMaxA, args.panels - p);
    for (std::int64_t n = 0; n < right_panels; n += Cell::kMaxB) {
      const int nb = Least(Cell::kMaxB, right_panels - n);
      CellRun runs[4];
      int count = 0;
      for (const GradientSegment& segment : args.segments) {
        CellRun& run = runs[count++];
        run.length = segment.left.columns;
        run.a_stride = segment.left.column_stride * kTileElements;
        run.b_stride = segment.right.column_stride * kTileElements;
        for (int a = 0; a < na; ++a) run.a[a] = segment.left.Tile(args.first_panel + p + a, 0);
        for (int b = 0; b < nb; ++b) run.b[b] = segment.right.Tile(n + b, 0);
      }
      float* c = args.c + p * kPanelRows * args.ldc + n * kPanelRows;
      Compute<Cell>(na, nb, runs, count, c, args.ldc, args.accumulate, nothing);
    }
  }
}

}  // namespace
