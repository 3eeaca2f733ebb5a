// TransposePairs: pairs of a matrix become operand tiles of its transpose (kernels.h has the contract).
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// A line of pairs holds two neighbouring columns of 16 rows, which become halves of two rows.
inline void TransposePairs(const TransposePairsArgs& args) {
  for (std::int64_t panel = 0; panel < args.transposed.columns * 2; ++panel) {
    BFloat16* low = args.transposed.Tile(0, panel / 2) + panel % 2 * kPanelRows;
    BFloat16* high = args.transposed.Tile(1, panel / 2) + panel % 2 * kPanelRows;
    if (panel >= args.pairs.panels) {
      for (std::int64_t i = 0; i < kPanelRows; ++i) {
        std::memset(low + i * kTileColumns, 0, kPanelRows * sizeof(BFloat16));
        std::memset(high + i * kTileColumns, 0, kPanelRows * sizeof(BFloat16));
      }
      continue;
    }
    const BFloat16* from = args.pairs.Tile(panel, args.column);
    alignas(64) BFloat16 pairs[kTileElements];
    if (args.stored) {
      Transpose16x16(from, pairs);
      from = pairs;
    }
    for (std::int64_t p = 0; p < kPanelRows; ++p) {
      // The columns of pair p, by the permutation of a stored tile: 4L + 2q and the next one, in the other half for q >= 2.
      BFloat16* to = (p % 4 < 2 ? low : high) + (p / 4 * 4 + p % 2 * 2) * kTileColumns;
      const auto pairs_of_columns = LoadVector<U32x16>(from + p * kTileColumns);
      StoreVector(to, LowWords(pairs_of_columns));
      StoreVector(to + kTileColumns, HighWords(pairs_of_columns));
    }
  }
}

}  // namespace
