// The gradient form (kernels.h, GradientGemmArgs): both factors are activations.
#pragma once

#include <cstdint>

#include "cpu_kernels/gemm/cell.h"

namespace {

/// On a matrix unit two left panels meet one right panel at a time, and a single one two: on 16 AMX threads products of 2 x 2
/// take 1.3 to 2 times as long (docs/experiments/amx.md).
template <class Cell>
void GradientGemm(const GradientGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  NothingAside nothing;
  const std::int64_t right_panels = args.segments[0].right.panels;
  for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
    const int na = Least(Cell::kMaxA, args.panels - p), nb_most = Cell::kVectorsIdle && na > 1 ? 1 : Cell::kMaxB;
    for (std::int64_t n = 0; n < right_panels; n += nb_most) {
      const int nb = Least(nb_most, right_panels - n);
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
