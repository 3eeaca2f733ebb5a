// PackRows: rows of numbers become tiles (kernels.h has the contract).
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// 32 values in order, rounded.
MOESAIC_INLINE void NarrowTileRow(const float* from, BFloat16* out) {
  StoreVector(out, NarrowBoth(LoadF32(from), LoadF32(from + 16)));
}

/// 32 columns of one row, scaled and rounded, in order.
MOESAIC_INLINE void LoadTileRow(const PackRowsArgs& args, std::int64_t row, std::int64_t column, BFloat16* out) {
  const void* source = row < args.count ? args.rows[row] : nullptr;
  const std::int64_t n = args.columns - column < kTileColumns ? args.columns - column : kTileColumns;
  if (source == nullptr || n <= 0) {
    std::memset(out, 0, kTileColumns * sizeof(BFloat16));
    return;
  }
  const bool scaled = args.row_scale != nullptr;
  if (args.dtype == DType::kBFloat16 && !scaled) {
    std::memset(out, 0, kTileColumns * sizeof(BFloat16));
    std::memcpy(out, static_cast<const BFloat16*>(source) + column, static_cast<std::size_t>(n) * sizeof(BFloat16));
    return;
  }
  if (args.dtype == DType::kFloat32 && !scaled) {
    const float* from = static_cast<const float*>(source) + column;
    if (n == kTileColumns) return NarrowTileRow(from, out);
    StoreBf16(out, LoadF32Part(from, n < 16 ? n : 16));
    StoreBf16(out + 16, n > 16 ? LoadF32Part(from + 16, n - 16) : F32x16{});
    return;
  }
  float values[kTileColumns] = {};
  if (args.dtype == DType::kBFloat16) {
    const BFloat16* from = static_cast<const BFloat16*>(source) + column;
    for (std::int64_t i = 0; i < n; i += 16) {
      StoreF32(values + i, n - i >= 16 ? LoadBf16(from + i) : LoadBf16Part(from + i, n - i));
    }
  } else {
    std::memcpy(values, static_cast<const float*>(source) + column, static_cast<std::size_t>(n) * sizeof(float));
  }
  const float scale = args.row_scale[row];
  for (std::int64_t i = 0; i < n; ++i) values[i] *= scale;
  StoreBf16(out, LoadF32(values));
  StoreBf16(out + 16, LoadF32(values + 16));
}

/// The permutation of a stored tile's row: 8-byte groups 0..7 go to 0, 2, 4, 6, 1, 3, 5, 7.
#if defined(__AVX512F__)
MOESAIC_INLINE __m512i LoadPermuted(const BFloat16* row) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(row));
}
#endif
MOESAIC_INLINE void PermuteTileRow(const BFloat16* in, BFloat16* out) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(out, LoadPermuted(in));
#else
  using U64x4 = std::uint64_t __attribute__((vector_size(32)));
  U64x4 half[2], to[2];
  std::memcpy(half, in, sizeof(half));
  to[0] = __builtin_shufflevector(half[0], half[1], 0, 4, 1, 5);
  to[1] = __builtin_shufflevector(half[0], half[1], 2, 6, 3, 7);
  std::memcpy(out, to, sizeof(to));
#endif
}

/// Sixteen rows as a tile of pairs.
MOESAIC_INLINE void PairsOfRows(const BFloat16* const* rows, BFloat16* out) {
#if defined(__AVX512F__)
  // Lane by lane, with what its row group's four rows give to it side by side: half the shuffles of Transpose16x16, and none
  // for the permutation, which only says where a line goes. Row by row, so that each address is loaded once.
  __m512i four[4][4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
      const auto* row = reinterpret_cast<const __m128i*>(rows[4 * group + q]);
#pragma GCC unroll 4
      for (int lane = 0; lane < 4; ++lane) {
        const __m128i part = _mm_loadu_si128(row + lane);
        if (group == 0) four[lane][q] = _mm512_castsi128_si512(part);
        if (group == 1) four[lane][q] = _mm512_inserti32x4(four[lane][q], part, 1);
        if (group == 2) four[lane][q] = _mm512_inserti32x4(four[lane][q], part, 2);
        if (group == 3) four[lane][q] = _mm512_inserti32x4(four[lane][q], part, 3);
      }
    }
  }
#pragma GCC unroll 4
  for (int lane = 0; lane < 4; ++lane) {
    const __m512i* of = four[lane];
    const __m512i low[2] = {_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpacklo_epi32(of[2], of[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[2], of[3])};
    // Pairs 4 lane to 4 lane + 3 of the row in order.
    BFloat16* to = out + StoredPosition(8 * lane) / 2 * 32;
    BFloat16* next = out + StoredPosition(8 * lane + 4) / 2 * 32;
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low[0], low[1]));
    _mm512_store_si512(to + 32, _mm512_unpackhi_epi64(low[0], low[1]));
    _mm512_store_si512(next, _mm512_unpacklo_epi64(high[0], high[1]));
    _mm512_store_si512(next + 32, _mm512_unpackhi_epi64(high[0], high[1]));
  }
#else
  alignas(64) BFloat16 stored[kTileElements];
  for (int i = 0; i < kPanelRows; ++i) PermuteTileRow(rows[i], stored + i * kTileColumns);
  Transpose16x16(stored, out);
#endif
}

/// Sixteen rows as half of two tiles of row pairs.
MOESAIC_INLINE void RowPairsOfRows(const BFloat16* const* rows, BFloat16* low, BFloat16* high) {
#if defined(__AVX512BW__)
#pragma GCC unroll 8
  for (int p = 0; p < kPanelRows / 2; ++p) {
    const __m512i first = LoadPermuted(rows[2 * p]), second = LoadPermuted(rows[2 * p + 1]);
    _mm512_store_si512(low + 32 * p, _mm512_unpacklo_epi16(first, second));
    _mm512_store_si512(high + 32 * p, _mm512_unpackhi_epi16(first, second));
  }
#else
  alignas(64) BFloat16 stored[kTileElements];
  for (int i = 0; i < kPanelRows; ++i) PermuteTileRow(rows[i], stored + i * kTileColumns);
  InterleaveRowPairs<kPanelRows / 2>(stored, low, high);
#endif
}

/// Rows are gathered from all over the tensor, sixteen at a time: too many places for the hardware to run ahead in. This many
/// tiles, in the order in which they are filled. (To L2: 8 tiles ahead to L1 took a tenth longer.)
inline constexpr std::int64_t kPrefetchTiles = 16;

/// Where tiles of pairs go, 64 KB for sixteen rows of 2,048, has left the caches since it was last used: stores would wait for
/// line after line. This many tiles are fetched ahead. (12 instead of 4: 1 to 7% less.)
inline constexpr std::int64_t kTargetsAhead = 8;

/// Sixteen rows that need no scaling: zeros where there is none.
template <typename T>
class PlainRows {
 public:
  PlainRows(const PackRowsArgs& args, std::int64_t panel) {
    alignas(64) static constexpr T kZeros[kTileColumns] = {};
    for (std::int64_t i = 0; i < kPanelRows; ++i) {
      const std::int64_t row = panel * kPanelRows + i;
      const void* source = row < args.count ? args.rows[row] : nullptr;
      rows_[i] = source != nullptr ? static_cast<const T*>(source) : kZeros;
      follows_[i] = source != nullptr ? -1 : 0;
    }
  }

  /// Row i of the tile in a tile column.
  MOESAIC_INLINE const T* At(std::int64_t i, std::int64_t column) const {
    return rows_[i] + (column * kTileColumns & follows_[i]);
  }

  /// All rows of that tile as bf16: where they lie, or in `copies`.
  MOESAIC_INLINE void Load(std::int64_t column, BFloat16* copies, const BFloat16** rows) const {
    for (std::int64_t i = 0; i < kPanelRows; ++i) {
      if constexpr (sizeof(T) == sizeof(BFloat16)) {
        rows[i] = At(i, column);
      } else {
        rows[i] = copies + i * kTileColumns;
        NarrowTileRow(At(i, column), copies + i * kTileColumns);
      }
    }
  }

  /// To L2.
  MOESAIC_INLINE void Prefetch(std::int64_t column) const {
    for (std::int64_t i = 0; i < kPanelRows; ++i) {
      const char* line = reinterpret_cast<const char*>(At(i, column));
      __builtin_prefetch(line, 0, 2);
      if (sizeof(T) == sizeof(float)) __builtin_prefetch(line + 64, 0, 2);
    }
  }

 private:
  const T* rows_[kPanelRows];
  std::int64_t follows_[kPanelRows];  ///< all bits, or none: what follows a tile of zeros is that tile
};

/// @param rows  sixteen, each where its 32 columns lie in order
inline void PackTile(const PackRowsArgs& args, const BFloat16* const* rows, std::int64_t panel, std::int64_t column) {
  for (std::int64_t i = 0; i < kPanelRows; ++i) {
    if (args.operand.data != nullptr) std::memcpy(args.operand.Tile(panel, column) + i * kTileColumns, rows[i], 64);
    if (args.stored.data != nullptr) PermuteTileRow(rows[i], args.stored.Tile(panel, column) + i * kTileColumns);
  }
  if (args.pairs.data != nullptr) PairsOfRows(rows, args.pairs.Tile(panel, column));
  if (args.row_pairs.data != nullptr) {
    const std::int64_t half = panel % 2 * (kTileElements / 2);
    RowPairsOfRows(rows, args.row_pairs.Tile(2 * column, panel / 2) + half,
                   args.row_pairs.Tile(2 * column + 1, panel / 2) + half);
  }
}

/// A row of a stored tile: 32 values, rounded.
MOESAIC_INLINE void StoreTileRow(const BFloat16* from, BFloat16* out) { PermuteTileRow(from, out); }
MOESAIC_INLINE void StoreTileRow(const float* from, BFloat16* out) {
  alignas(64) BFloat16 row[kTileColumns];
  NarrowTileRow(from, row);
  PermuteTileRow(row, out);
}

/// The whole tiles of a panel of weights, one row after the other: in the order of memory, the next row fetched meanwhile.
/// Returns the tile column behind them. (An adapter's A of 128 experts, 16 rows of 2,048 each, one Zen 5 thread: 0.45 to 0.9
/// ms, and 0.7 to 1.3 tile after tile. Activations, whose tiles of a row may lie 4 KB apart, take a quarter longer this way.)
template <typename T>
inline std::int64_t PackPanelOfWeights(const PackRowsArgs& args, std::int64_t panel) {
  alignas(64) static constexpr T kZeros[kTileColumns] = {};
  constexpr std::int64_t kLine = 64 / sizeof(T);
  const std::int64_t first = args.first_column, most = args.columns / kTileColumns - first;
  const std::int64_t count = args.tile_columns < most ? args.tile_columns : most;
  if (count <= 0) return first;
  for (std::int64_t i = 0; i < kPanelRows; ++i) {
    const std::int64_t row = panel * kPanelRows + i;
    const void* source = row < args.count ? args.rows[row] : nullptr;
    const void* next = row + 1 < args.count ? args.rows[row + 1] : args.next;
    const T* from = source != nullptr ? static_cast<const T*>(source) + first * kTileColumns : kZeros;
    const T* ahead = next != nullptr ? static_cast<const T*>(next) + first * kTileColumns : from;
    const std::int64_t step = source != nullptr ? kTileColumns : 0, ahead_step = next != nullptr ? kTileColumns : step;
    for (std::int64_t k = 0; k < count;) {
      const TileRun run = args.stored.RunAlongPanel(args.first_panel + panel, first + k);
      BFloat16* to = run.data + i * kTileColumns;
      const std::int64_t end = run.length < count - k ? k + run.length : count;
      for (; k < end; ++k, from += step, ahead += ahead_step, to += run.stride) {
        for (std::int64_t j = 0; j < kTileColumns; j += kLine) __builtin_prefetch(ahead + j, 0, 2);
        StoreTileRow(from, to);
      }
    }
  }
  return first + count;
}

/// The whole tiles of a panel; returns the tile column behind them.
template <typename T>
inline std::int64_t PackPlainPanel(const PackRowsArgs& args, std::int64_t panel) {
  const std::int64_t first = args.first_column, most = args.columns / kTileColumns - first;
  const std::int64_t count = args.tile_columns < most ? args.tile_columns : most;
  if (count <= 0) return first;
  // So many tiles ahead are so many panels and columns, or one panel more and fewer columns.
  const std::int64_t panels_ahead = kPrefetchTiles / count, columns_ahead = kPrefetchTiles % count;
  const PlainRows<T> now(args, panel), ahead(args, panel + panels_ahead), further(args, panel + panels_ahead + 1);
  for (std::int64_t k = 0; k < count; ++k) {
    if (k + columns_ahead < count) {
      ahead.Prefetch(first + k + columns_ahead);
    } else {
      further.Prefetch(first + k + columns_ahead - count);
    }
    if (args.pairs.data != nullptr && k + kTargetsAhead < count) {
      const BFloat16* target = args.pairs.Tile(args.first_panel + panel, first + k + kTargetsAhead);
#pragma GCC unroll 16
      for (int i = 0; i < kPanelRows; ++i) __builtin_prefetch(target + 32 * i, 0, 2);
    }
    alignas(64) BFloat16 copies[kTileElements];
    const BFloat16* rows[kPanelRows];
    now.Load(first + k, copies, rows);
    PackTile(args, rows, args.first_panel + panel, first + k);
  }
  return first + count;
}

inline void PackRows(const PackRowsArgs& args) {
  const bool plain = args.row_scale == nullptr && !args.repeat;
  const bool weights = args.stored.data != nullptr && args.stored.column_stride == 0 && args.operand.data == nullptr &&
                       args.pairs.data == nullptr && args.row_pairs.data == nullptr;
  for (std::int64_t panel = 0; panel < args.panels; ++panel) {
    std::int64_t k = args.first_column;
    if (plain && args.dtype == DType::kBFloat16) {
      k = weights ? PackPanelOfWeights<BFloat16>(args, panel) : PackPlainPanel<BFloat16>(args, panel);
    }
    if (plain && args.dtype == DType::kFloat32) {
      k = weights ? PackPanelOfWeights<float>(args, panel) : PackPlainPanel<float>(args, panel);
    }
    for (; k < args.first_column + args.tile_columns; ++k) {
      alignas(64) BFloat16 copies[kTileElements];
      const BFloat16* rows[kPanelRows];
      for (std::int64_t i = 0; i < kPanelRows; ++i) {
        rows[i] = copies + i * kTileColumns;
        LoadTileRow(args, panel * kPanelRows + i, k * kTileColumns, copies + i * kTileColumns);
        if (args.repeat) std::memcpy(copies + i * kTileColumns + 16, copies + i * kTileColumns, 16 * sizeof(BFloat16));
      }
      PackTile(args, rows, args.first_panel + panel, k);
    }
  }
}

inline void Transpose(const float* const* rows, float* out, std::int64_t out_stride) {
  alignas(64) BFloat16 block[2 * 16 * 16];  // two bf16 in the place of each float
  for (int i = 0; i < 16; ++i) {
    if (rows[i] != nullptr) {
      std::memcpy(block + 32 * i, rows[i], 64);
    } else {
      std::memset(block + 32 * i, 0, 64);
    }
  }
  Transpose16x16(block, block);
  for (int j = 0; j < 16; ++j) std::memcpy(out + j * out_stride, block + 32 * j, 64);
}

}  // namespace
