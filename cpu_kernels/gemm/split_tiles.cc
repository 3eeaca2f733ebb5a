#include "cpu_kernels/gemm/split_tiles.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moesaic {
namespace {

/// What rounding to bf16 leaves of a value; nothing of one that it makes infinite, or that is.
float Rest(float value) {
  const float rounded = ToFloat(ToBFloat16(value));
  return std::isfinite(rounded) ? value - rounded : 0.0f;
}

}  // namespace

SplitTiles SplitTiles::Take(Carver& carver, std::int64_t rows, std::int64_t rank) {
  SplitTiles split;
  if (rank == 0) return split;
  split.hi = TileMatrix::Activations(nullptr, rows, rank);
  split.hi.data = carver.Take<BFloat16>(split.hi.size());
  if (IsRankTwice(rank)) return split;
  split.lo = split.hi;
  split.lo.data = carver.Take<BFloat16>(split.lo.size());
  return split;
}

void PackSplit(const KernelTier& kernels, float* values, std::int64_t rows, std::int64_t columns, std::int64_t ld,
               TileKind kind, const SplitTiles& tiles) {
  std::vector<const void*> pointers(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) pointers[static_cast<std::size_t>(i)] = values + i * ld;
  PackRowsArgs pack;
  pack.rows = pointers.data();
  pack.count = rows;
  pack.columns = columns;
  const bool row_pairs = kind == TileKind::kRowPairs;
  pack.panels = row_pairs ? 2 * tiles.hi.columns : tiles.hi.panels;
  pack.tile_columns = row_pairs ? CeilDiv(tiles.hi.panels, 2) : tiles.hi.columns;
  TileMatrix& out = row_pairs                   ? pack.row_pairs
                    : kind == TileKind::kPairs  ? pack.pairs
                    : kind == TileKind::kStored ? pack.stored
                                                : pack.operand;
  out = tiles.hi;
  if (tiles.lo.data == nullptr) {
    for (std::int64_t i = 0; i < rows; ++i) {
      float* row = values + i * ld;
      std::fill(row + columns, row + kPanelRows, 0.0f);
      for (std::int64_t k = 0; k < kPanelRows; ++k) row[kPanelRows + k] = Rest(row[k]);
    }
    pack.columns = kTileColumns;
    kernels.pack_rows(pack);
    return;
  }
  kernels.pack_rows(pack);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < columns; ++k) values[i * ld + k] = Rest(values[i * ld + k]);
  }
  out = tiles.lo;
  kernels.pack_rows(pack);
}

void TransposeSmall(const float* in, std::int64_t ld_in, std::int64_t rows, std::int64_t columns, float* out,
                    std::int64_t ld_out) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) out[j * ld_out + i] = in[i * ld_in + j];
  }
}

}  // namespace moesaic
