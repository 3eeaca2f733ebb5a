// Both forms of GEMM over tiles, for any cell.
//
// A cell is what an instruction set brings: it multiplies kMaxA panels of left tiles with kMaxB panels of right tiles along the
// whole contraction, with the accumulators in registers:
//
//   template <int NA, int NB>
//   static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Prefetcher&);
//   static void InterleavePanels(const BFloat16* even, const BFloat16* odd, BFloat16* low, BFloat16* high);
//
// with C[16 a + i][16 b + j] (+)= sum over runs, tiles, pairs p: left_a[i][p] . right_b[p][j].
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
    if (range.weights.data == nullptr || steps <= 0) return;
    const std::int64_t lines = range.panels * range.columns * (kTileElements / 32);
    lines_per_step_ = static_cast<int>(CeilDiv(lines, steps));
  }

  MOESAIC_INLINE void Step() {
    for (int i = 0; i < lines_per_step_; ++i) {
      if (line_ == end_ && !NextRun()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ += 32;
    }
  }

 private:
  [[gnu::noinline]] bool NextRun() {
    if (panel_ == range_.panels) {
      lines_per_step_ = 0;
      return false;
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
  const BFloat16* line_;
  const BFloat16* end_;
};

template <class Cell, int NA>
void ComputeNb(int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Prefetcher& prefetcher) {
  if (nb == 1) return Cell::template Compute<NA, 1>(runs, count, c, ldc, accumulate, prefetcher);
  if constexpr (Cell::kMaxB >= 3) {
    if (nb == 3) return Cell::template Compute<NA, 3>(runs, count, c, ldc, accumulate, prefetcher);
  }
  Cell::template Compute<NA, 2>(runs, count, c, ldc, accumulate, prefetcher);
}

template <class Cell>
void Compute(int na, int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate,
             Prefetcher& prefetcher) {
  if constexpr (Cell::kMaxA >= 2) {
    if (na == 2) return ComputeNb<Cell, 2>(nb, runs, count, c, ldc, accumulate, prefetcher);
  }
  ComputeNb<Cell, 1>(nb, runs, count, c, ldc, accumulate, prefetcher);
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
  for (std::int64_t t = 0; t < args.activation_panels; t += Cell::kMaxB) {
    const int nb = Least(Cell::kMaxB, args.activation_panels - t);
    for (int r = 0; r < group.count; ++r) {
      for (int b = 0; b < nb; ++b) group.runs[r].b[b] = group.activations[r]->Tile(t + b, group.column[r]);
    }
    Compute<Cell>(na, nb, group.runs, group.count, c + t * kPanelRows, args.ldc, accumulate, prefetcher);
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

/// Rows of a cell's result, rounded to bf16, to where the caller wants them.
inline void StoreRows(const float* c, std::int64_t ldc, int rows, int columns, BFloat16* const* out, std::int64_t first) {
  for (int i = 0; i < rows; ++i) {
    if (out[i] == nullptr) continue;
    BFloat16* destination = out[i] + first;
    for (int j = 0; j < columns; j += 16) StoreBf16(destination + j, LoadF32(c + i * ldc + j));
  }
}

inline const BFloat16* WeightTile(const TileMatrix& weights, std::int64_t panel, std::int64_t column, BFloat16* scratch) {
  if (weights.codec == nullptr) return weights.Tile(panel, column);
  weights.codec->decode(weights, panel, column, 1, scratch);
  return scratch;
}

template <class Cell>
void UnpackColumns(const UnpackGemmArgs& args, std::int64_t column, std::int64_t columns, std::int64_t depth) {
  alignas(64) static constexpr BFloat16 kZeros[kTileElements] = {};
  std::int64_t first = 0;
  for (const GemmSegment& segment : args.segments) {
    const std::int64_t panels = segment.weights.panels;
    for (std::int64_t q = 0; q < CeilDiv(panels, 2); ++q) {
      for (std::int64_t n = 0; n < columns; ++n) {
        alignas(64) BFloat16 decoded[2 * kTileElements];
        const BFloat16* even = WeightTile(segment.weights, 2 * q, column + n, decoded);
        const BFloat16* odd =
            2 * q + 1 < panels ? WeightTile(segment.weights, 2 * q + 1, column + n, decoded + kTileElements) : kZeros;
        BFloat16* low = args.scratch + (2 * n * depth + first + q) * kTileElements;
        Cell::InterleavePanels(even, odd, low, low + depth * kTileElements);
      }
    }
    first += CeilDiv(panels, 2);
  }
}

template <class Cell>
void UnpackGemm(const UnpackGemmArgs& args) {
  std::int64_t depth = 0;
  for (const GemmSegment& segment : args.segments) depth += CeilDiv(segment.weights.panels, 2);
  Prefetcher prefetcher(args.prefetch, depth * CeilDiv(args.panels, Cell::kMaxA) * CeilDiv(2 * args.columns, Cell::kMaxB));
  [[maybe_unused]] const typename Cell::Scope scope;
  for (std::int64_t n0 = 0; n0 < args.columns; n0 += args.columns_per_group) {
    const std::int64_t columns = Least(args.columns_per_group, args.columns - n0);
    UnpackColumns<Cell>(args, args.first_column + n0, columns, depth);
    for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
      const int na = Least(Cell::kMaxA, args.panels - p);
      for (std::int64_t b0 = 0; b0 < 2 * columns; b0 += Cell::kMaxB) {
        const int nb = Least(Cell::kMaxB, 2 * columns - b0);
        CellRun runs[8];
        int count = 0;
        std::int64_t first = 0;
        for (const GemmSegment& segment : args.segments) {
          CellRun& run = runs[count++];
          run.length = CeilDiv(segment.weights.panels, 2);
          run.a_stride = segment.activations.column_stride * kTileElements;
          run.b_stride = kTileElements;
          for (int a = 0; a < na; ++a) run.a[a] = segment.activations.Tile(args.first_panel + p + a, 0);
          for (int b = 0; b < nb; ++b) run.b[b] = args.scratch + ((b0 + b) * depth + first) * kTileElements;
          first += run.length;
        }
        const std::int64_t column = 2 * n0 + b0;
        if (args.rows == nullptr) {
          float* c = args.c + p * kPanelRows * args.ldc + column * kPanelRows;
          Compute<Cell>(na, nb, runs, count, c, args.ldc, args.accumulate, prefetcher);
        } else {
          alignas(64) float c[2 * kPanelRows * kMaxCellPanels * kPanelRows];
          constexpr std::int64_t kLd = kMaxCellPanels * kPanelRows;
          Compute<Cell>(na, nb, runs, count, c, kLd, false, prefetcher);
          StoreRows(c, kLd, na * 16, nb * 16, args.rows + p * kPanelRows,
                    2 * kPanelRows * args.first_column + column * kPanelRows);
        }
      }
    }
  }
}

}  // namespace
