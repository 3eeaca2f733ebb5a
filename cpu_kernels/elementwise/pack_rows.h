// PackRows: rows of numbers become tiles (kernels.h has the contract).
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// 32 values in order, rounded.
MOESAIC_INLINE void NarrowTileRow(const float* from, BFloat16* out) {
#if defined(__AVX512F__)
  const U16x32 row = NarrowBoth(LoadF32(from), LoadF32(from + 16));
  std::memcpy(out, &row, sizeof(row));
#else
  for (int i = 0; i < kTileColumns; i += kNativeLanes) {
    const auto narrow = __builtin_convertvector(RoundToHigh(from + i) >> 16, NativeU16);
    std::memcpy(out + i, &narrow, sizeof(narrow));
  }
#endif
}

/// 32 columns of one row, scaled and rounded, in order.
MOESAIC_INLINE void LoadTileRow(const PackRowsArgs& args, std::int64_t row, std::int64_t column, BFloat16* out) {
  const void* source = args.rows[row];
  const std::int64_t n = args.columns - column < kTileColumns ? args.columns - column : kTileColumns;
  if (source == nullptr || n <= 0) {
    std::memset(out, 0, kTileColumns * sizeof(BFloat16));
    return;
  }
  const bool scaled = args.row_scale != nullptr || args.column_scale != nullptr;
  if (args.dtype == DType::kBFloat16 && !scaled) {
    const BFloat16* from = static_cast<const BFloat16*>(source) + column;
    if (n == kTileColumns) {
      std::memcpy(out, from, kTileColumns * sizeof(BFloat16));
    } else {
      std::memset(out, 0, kTileColumns * sizeof(BFloat16));
      std::memcpy(out, from, static_cast<std::size_t>(n) * sizeof(BFloat16));
    }
    return;
  }
  if (args.dtype == DType::kFloat32 && !scaled && n == kTileColumns) {
    NarrowTileRow(static_cast<const float*>(source) + column, out);
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
  if (scaled) {
    const float row_scale = args.row_scale != nullptr ? args.row_scale[row] : 1.0f;
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] *= args.column_scale != nullptr ? row_scale * args.column_scale[column + i] : row_scale;
    }
  }
  StoreBf16(out, LoadF32(values));
  StoreBf16(out + 16, LoadF32(values + 16));
}

/// The permutation of a stored tile's row: 8-byte groups 0..7 go to 0, 2, 4, 6, 1, 3, 5, 7.
MOESAIC_INLINE void PermuteTileRow(const BFloat16* in, BFloat16* out) {
#if defined(__AVX512F__)
  // One store of the whole row: the vector load that follows cannot be served from two halves still on their way.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi64(order, _mm512_loadu_si512(in)));
#else
  using U64x4 = std::uint64_t __attribute__((vector_size(32)));
  U64x4 half[2], to[2];
  std::memcpy(half, in, sizeof(half));
  to[0] = __builtin_shufflevector(half[0], half[1], 0, 4, 1, 5);
  to[1] = __builtin_shufflevector(half[0], half[1], 2, 6, 3, 7);
  std::memcpy(out, to, sizeof(to));
#endif
}

/// Rows are gathered from all over the tensor, sixteen at a time: too many places for the hardware to run ahead in. This many
/// tiles, in the order in which they are filled. (To L2: 8 tiles ahead to L1 took a tenth longer.)
inline constexpr std::int64_t kPrefetchTiles = 16;

MOESAIC_INLINE void Prefetch(const PackRowsArgs& args, std::int64_t row, std::int64_t column) {
  if (row >= args.count || args.rows[row] == nullptr || column >= args.columns) return;
  const std::int64_t size = args.dtype == DType::kFloat32 ? 4 : 2;
  const char* line = static_cast<const char*>(args.rows[row]) + column * size;
  __builtin_prefetch(line, 0, 2);
  if (size == 4) __builtin_prefetch(line + 64, 0, 2);
}

inline void PackRows(const PackRowsArgs& args) {
  for (std::int64_t panel = 0; panel < args.panels; ++panel) {
    const std::int64_t target = args.first_panel + panel;
    for (std::int64_t k = args.first_column; k < args.first_column + args.tile_columns; ++k) {
      alignas(64) BFloat16 rows[kTileElements];
      alignas(64) BFloat16 permuted[kTileElements];
      const std::int64_t ahead = k - args.first_column + kPrefetchTiles;
      for (std::int64_t i = 0; i < kPanelRows; ++i) {
        const std::int64_t row = panel * kPanelRows + i;
        if (row < args.count) {
          LoadTileRow(args, row, k * kTileColumns, rows + i * kTileColumns);
          if (args.repeat) std::memcpy(rows + i * kTileColumns + 16, rows + i * kTileColumns, 16 * sizeof(BFloat16));
          Prefetch(args, row + ahead / args.tile_columns * kPanelRows,
                   (args.first_column + ahead % args.tile_columns) * kTileColumns);
        } else {
          std::memset(rows + i * kTileColumns, 0, kTileColumns * sizeof(BFloat16));
        }
      }
      if (args.operand.data != nullptr) std::memcpy(args.operand.Tile(target, k), rows, sizeof(rows));
      if (args.stored.data == nullptr && args.pairs.data == nullptr && args.row_pairs.data == nullptr) continue;
      BFloat16* stored = args.stored.data != nullptr ? args.stored.Tile(target, k) : permuted;
      for (int i = 0; i < kPanelRows; ++i) PermuteTileRow(rows + i * kTileColumns, stored + i * kTileColumns);
      if (args.pairs.data != nullptr) Transpose16x16(stored, args.pairs.Tile(target, k));
      if (args.row_pairs.data != nullptr) {
        const std::int64_t half = target % 2 * (kTileElements / 2);
        InterleaveRowPairs<kPanelRows / 2>(stored, args.row_pairs.Tile(2 * k, target / 2) + half,
                                           args.row_pairs.Tile(2 * k + 1, target / 2) + half);
      }
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
