// How matrices lie in memory: tiles of 16 rows and 32 columns of bf16, 1 KB each.
//
// One packed copy of a weight serves two forms of GEMM (kernels.h). A tile row is one 64-byte cache line, which is what AMX and
// AVX-512 load. Inside a *stored* tile the 32 columns are permuted: 128-bit lane L holds columns 4L..4L+3, then 16+4L..16+4L+3.
// Interleaving two rows lane by lane (vpunpcklwd, vpunpckhwd) then yields columns 0..15 and 16..31 in order, and the pairs of
// columns that a dot product consumes stay pairs.
//
// Tiles of weights are grouped in superblocks of 8 x 8, so that walking along a row and walking down a column both read runs of
// at least 8 KB. Tiles of activations are ordered column after column.
#pragma once

#include <cstdint>

#include "cpu_kernels/bfloat16.h"

namespace moesaic {

inline constexpr std::int64_t kPanelRows = 16;    ///< rows of a tile; a panel is a row of tiles
inline constexpr std::int64_t kTileColumns = 32;  ///< columns of a tile
inline constexpr std::int64_t kTileElements = 512;
inline constexpr std::int64_t kSuperblock = 8;  ///< panels and tile columns of a superblock of weights

/// Rows of activations that any direct form takes as stored tiles, at most (KernelTier::most_stored_rows): their sums of two
/// panels, 48 KB, stay in L2.
inline constexpr std::int64_t kMostStoredRows = 384;

/// These functions are inlined into code compiled for several instruction sets: an out-of-line copy of one of them must never
/// be shared, hence always_inline.
#define MOESAIC_INLINE [[gnu::always_inline]] inline

MOESAIC_INLINE constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
MOESAIC_INLINE constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) { return CeilDiv(a, b) * b; }

/// Whether the direct form takes so many rows as stored tiles: few, or up to `most_stored` but for four to eight whole panels,
/// which fill cells. (Three panels, which cells meet in a single pass, do not hide the weights' way from memory: 660 to 930
/// GFLOP/s on two Zen 5 cores, where others reach 880. Of more the activations do not stay in L2: 192 and 352 rows x 2,048 0.79
/// to 0.93 of two Zen 4 cores' ceiling, 190 and 350 0.86 to 0.94.)
MOESAIC_INLINE bool AreStoredRows(std::int64_t rows, std::int64_t most_few, std::int64_t most_stored) {
  const bool fill_cells = rows % kPanelRows == 0 && rows >= 4 * kPanelRows && rows <= 8 * kPanelRows;
  return rows <= most_few || (rows <= most_stored && !fill_cells);
}

/// Elements from one row of fp32 sums to the next: `columns`, a multiple of 16, and a cache line more where rows would
/// otherwise lie a multiple of 256 bytes apart and a tile's rows share a few sets of L1.
MOESAIC_INLINE constexpr std::int64_t SumsPitch(std::int64_t columns) { return columns % 64 == 0 ? columns + 16 : columns; }

/// Position inside a stored tile's row of column 0 <= column < 32.
MOESAIC_INLINE constexpr std::int64_t StoredPosition(std::int64_t column) {
  return (column % 16) / 4 * 8 + column % 4 + column / 16 * 4;
}

/// Tiles that follow each other at a constant distance.
struct TileRun {
  BFloat16* data;
  std::int64_t stride;  ///< elements from one tile to the next
  std::int64_t length;  ///< tiles
};

struct TileMatrix;

/// How compressed weights become bf16 tiles. bf16 itself needs none.
struct TileCodec {
  /// Writes `count` stored tiles of a panel, from tile column `column` on, one after the other.
  void (*decode)(const TileMatrix& matrix, std::int64_t panel, std::int64_t column, std::int64_t count, BFloat16* tiles);
};

/// A non-owning matrix of tiles, 64-byte aligned. What its tiles hold is one of
///   stored   16 rows x 32 permuted columns: weights, in both forms
///   operand  16 rows x 32 columns in order: the left factor of the unpack form
///   pairs    16 pairs of permuted columns x 16 rows, a transposed stored tile: the right factor of the direct form
///   row pairs  16 pairs of rows x 16 columns: the right factor where the contraction runs along the rows
struct TileMatrix {
  BFloat16* data = nullptr;
  std::int64_t panels = 0;   ///< rows / 16, rounded up
  std::int64_t columns = 0;  ///< columns / 32, rounded up
  /// Activations: tiles from one column to the next. 0: weights, in superblocks.
  std::int64_t column_stride = 0;
  /// Weights only: not null where `compressed` holds them in another form, and data is null.
  const TileCodec* codec = nullptr;
  const void* compressed = nullptr;
  /// Weights only: the first panel stands for all, and there is no other in memory.
  bool repeats = false;

  static TileMatrix Weights(BFloat16* data, std::int64_t rows, std::int64_t columns) {
    return {data, CeilDiv(rows, kPanelRows), CeilDiv(columns, kTileColumns)};
  }
  /// Sixteen rows, so many times.
  static TileMatrix RepeatedPanel(BFloat16* data, std::int64_t times, std::int64_t columns) {
    TileMatrix tiles = Weights(data, times * kPanelRows, columns);
    tiles.repeats = true;
    return tiles;
  }
  /// With one panel more than needed where columns would otherwise lie a multiple of 4 KB apart and share cache sets.
  static TileMatrix Activations(BFloat16* data, std::int64_t rows, std::int64_t columns) {
    const std::int64_t panels = CeilDiv(rows, kPanelRows);
    return {data, panels, CeilDiv(columns, kTileColumns), panels % 4 == 0 ? panels + 1 : panels};
  }

  /// Row pairs of [rows][columns]: panels are 16 columns, columns are 32 rows.
  static TileMatrix RowPairs(BFloat16* data, std::int64_t rows, std::int64_t columns) {
    TileMatrix tiles = Activations(data, RoundUp(columns, kTileColumns), rows);
    tiles.panels = CeilDiv(columns, kPanelRows);
    return tiles;
  }

  MOESAIC_INLINE std::int64_t size() const {
    return (column_stride != 0 ? column_stride : repeats ? 1 : panels) * columns * kTileElements;
  }

  MOESAIC_INLINE BFloat16* Tile(std::int64_t panel, std::int64_t column) const {
    if (column_stride != 0) return data + (column * column_stride + panel) * kTileElements;
    if (repeats) return data + column * kTileElements;
    const std::int64_t p0 = panel / kSuperblock * kSuperblock, c0 = column / kSuperblock * kSuperblock;
    const std::int64_t p_count = p0 + kSuperblock <= panels ? kSuperblock : panels - p0;
    const std::int64_t c_count = c0 + kSuperblock <= columns ? kSuperblock : columns - c0;
    return data + (p0 * columns + c0 * p_count + (panel - p0) * c_count + (column - c0)) * kTileElements;
  }

  /// The tiles of a panel from `column` on, as far as their distance is constant.
  MOESAIC_INLINE TileRun RunAlongPanel(std::int64_t panel, std::int64_t column) const {
    if (column_stride != 0) return {Tile(panel, column), column_stride * kTileElements, columns - column};
    const std::int64_t left = kSuperblock - column % kSuperblock;
    return {Tile(panel, column), kTileElements, left < columns - column ? left : columns - column};
  }

  /// The same for the tiles of a column from `panel` on.
  MOESAIC_INLINE TileRun RunDownColumn(std::int64_t panel, std::int64_t column) const {
    if (column_stride != 0) return {Tile(panel, column), kTileElements, panels - panel};
    if (repeats) return {Tile(panel, column), 0, panels - panel};
    const std::int64_t left = kSuperblock - panel % kSuperblock, c0 = column / kSuperblock * kSuperblock;
    const std::int64_t stride = c0 + kSuperblock <= columns ? kSuperblock : columns - c0;
    return {Tile(panel, column), stride * kTileElements, left < panels - panel ? left : panels - panel};
  }
};

}  // namespace moesaic
