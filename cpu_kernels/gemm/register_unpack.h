// The unpack form (kernels.h, UnpackGemmArgs) on tiers whose product takes its right factor from registers: rows of stored
// tiles are interleaved there, in front of every use, and nothing is laid out in memory. Up to 12 rows of activations are
// multiplied with a tile column or, where they are few, with one tile after the other as they lie, which the hardware fetches
// ahead; sums go to C and back for each then. Work grows with the rows that count, and the order of summation is a cell's.
//
// Weights are taken superblock by superblock, or two below each other, down 8 tile columns at a time: so they come from memory
// in runs of 64 KB, the next ones while these are multiplied, and the sums of those columns wait in C meanwhile.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/few_rows.h"
#include "cpu_kernels/simd.h"

namespace {

/// Pairs of two neighbouring rows of a stored tile, of columns 0..15 and 16..31.
MOESAIC_INLINE void InterleaveRows(const BFloat16* rows, U32x16& low, U32x16& high) {
  U16x32 a, b;
  std::memcpy(&a, rows, sizeof(a));
  std::memcpy(&b, rows + kTileColumns, sizeof(b));
#if defined(__AVX512BW__)
  low = (U32x16)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  high = (U32x16)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  low = (U32x16)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50,
                                        19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
  high = (U32x16)__builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22,
                                         54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
#endif
}

/// Rows whose sums, of one tile column, fit the registers.
inline constexpr int kRowsInRegisters = 12;

/// Up to two superblocks of stored tiles down a column, and the activations that meet them.
struct RegisterRun {
  const BFloat16* tiles;
  const BFloat16* tiles_below;  ///< in the second superblock, if there is one
  std::int64_t stride, length;
  const BFloat16* left;
  std::int64_t left_stride;     ///< from one pair of tiles to the next
  const BFloat16* ahead;        ///< lines to be prefetched beside the first tile
  const BFloat16* ahead_below;  ///< beside the first one of the second superblock
  std::int64_t lines;           ///< beside each tile, where a column is taken at a time
  std::int64_t ahead_stride;    ///< from those beside one tile to those beside the next

  BFloat16* const* rows;  ///< with the last tiles: where the sums go, rounded, from element `out` on (UnpackGemmArgs); or null
  std::int64_t out;

  std::int64_t LeftStep(std::int64_t n) const { return n % 2 == 0 ? kPanelRows : left_stride - kPanelRows; }
};

template <int kRows, int kVectors>
MOESAIC_INLINE void LoadSums(const float* c, std::int64_t ldc, F32x16 (&sum)[kRows][kVectors]) {
#pragma GCC unroll 12
  for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[t][v] = LoadF32(c + t * ldc + 16 * v);
  }
}

template <int kRows, int kVectors>
MOESAIC_INLINE void StoreSums(const F32x16 (&sum)[kRows][kVectors], float* c, std::int64_t ldc) {
#pragma GCC unroll 12
  for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) StoreF32(c + t * ldc + 16 * v, sum[t][v]);
  }
}

/// The sums of tile column `j` of a run: to C or, with the last tiles, to the rows of the result.
template <int kRows>
MOESAIC_INLINE void KeepSums(const F32x16 (&sum)[kRows][2], const RegisterRun& run, bool last, int j, float* c,
                             std::int64_t ldc) {
  if (run.rows == nullptr || !last) return StoreSums(sum, c + j * kTileColumns, ldc);
#pragma GCC unroll 12
  for (int t = 0; t < kRows; ++t) {
    if (run.rows[t] != nullptr) StoreRounded(run.rows[t] + run.out + j * kTileColumns, sum[t][0], sum[t][1]);
  }
}

/// Adds the products of kRows rows of activations with one stored tile; beside(p) comes before each of its eight pairs of rows.
template <class Product, int kRows, class Beside>
MOESAIC_INLINE void MultiplyTile(const BFloat16* tile, const BFloat16* left, F32x16 (&sum)[kRows][2], Beside&& beside) {
#pragma GCC unroll 1
  for (int p = 0; p < 8; ++p) {
    beside(p);
    U32x16 low, high;
    InterleaveRows(tile + 64 * p, low, high);
#pragma GCC unroll 12
    for (int t = 0; t < kRows; ++t) {
      std::uint32_t pair;
      std::memcpy(&pair, left + t * kTileColumns + 2 * p, sizeof(pair));
      const U32x16 pairs = U32x16{} + pair;
      sum[t][0] = Product::Add(sum[t][0], pairs, low);
      sum[t][1] = Product::Add(sum[t][1], pairs, high);
    }
  }
}

/// C of one tile column (+)= the products of kRows rows with a run. Not inlined, so that the loops have all registers for
/// themselves.
template <class Product, int kRows>
[[gnu::noinline]] void MultiplyColumn(const RegisterRun& run, float* c, std::int64_t ldc, bool accumulate) {
  F32x16 sum[kRows][2] = {};
  if (accumulate) LoadSums(c, ldc, sum);
  const BFloat16 *tile = run.tiles, *left = run.left, *ahead = run.ahead;
  for (std::int64_t n = 0; n < run.length; ++n, tile += run.stride, ahead += run.ahead_stride) {
    if (n == kSuperblock) {
      tile = run.tiles_below;
      ahead = run.ahead_below;
    }
    // A few at a time: of many at once some get lost.
    MultiplyTile<Product, kRows>(tile, left, sum, [&](int p) {
      if (p < run.lines) __builtin_prefetch(ahead + p * kTileColumns, 0, Product::kUnpackFetchedTo);
      if (p + 8 < run.lines) __builtin_prefetch(ahead + (p + 8) * kTileColumns, 0, Product::kUnpackFetchedTo);
    });
    left += run.LeftStep(n);
  }
  KeepSums(sum, run, true, 0, c, ldc);
}

/// The same of several columns, whose tiles lie side by side: tile after tile as they lie, and so are those ahead.
template <class Product, int kRows>
[[gnu::noinline]] void MultiplyInOrder(const RegisterRun& run, int columns, float* c, std::int64_t ldc, bool accumulate) {
  constexpr int kEvery = kRows <= kRowsFetchedAhead ? Product::kLinesFetchedAhead : 1;
  static_assert(kEvery == 1 || kEvery == 4);
  const BFloat16* left = run.left;
  for (std::int64_t n = 0; n < run.length; ++n, accumulate = true) {
    const BFloat16 *tile = run.tiles + n * run.stride, *ahead = run.ahead + n * run.ahead_stride;
    for (int j = 0; j < columns; ++j, tile += kTileElements, ahead += kTileElements) {
      if constexpr (kEvery > 1) {
        for (int i = 0; i < kPanelRows; i += kEvery) __builtin_prefetch(ahead + i * kTileColumns, 0, Product::kUnpackFetchedTo);
      }
      F32x16 sum[kRows][2] = {};
      if (accumulate) LoadSums(c + j * kTileColumns, ldc, sum);
      MultiplyTile<Product, kRows>(tile, left, sum, [&](int p) {
        if constexpr (kEvery == 1) {
          for (int i = 0; i < 2; ++i) __builtin_prefetch(ahead + (2 * p + i) * kTileColumns, 0, Product::kUnpackFetchedTo);
        }
      });
      KeepSums(sum, run, n + 1 == run.length, j, c, ldc);
    }
    left += run.LeftStep(n);
  }
}

/// At most kRows rows.
template <class Product, int kRows = kRowsInRegisters>
void MultiplyColumn(std::int64_t rows, const RegisterRun& run, float* c, std::int64_t ldc, bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyColumn<Product, kRows - 1>(rows, run, c, ldc, accumulate);
  }
  MultiplyColumn<Product, kRows>(run, c, ldc, accumulate);
}

template <class Product, int kRows = Product::kRowsInOrder>
void MultiplyInOrder(std::int64_t rows, const RegisterRun& run, int columns, float* c, std::int64_t ldc, bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyInOrder<Product, kRows - 1>(rows, run, columns, c, ldc, accumulate);
  }
  MultiplyInOrder<Product, kRows>(run, columns, c, ldc, accumulate);
}

/// A part of a superblock, or of two, `columns` from `column` on and `length` panels from `panel` on, times all rows.
struct RegisterBlock {
  const GemmSegment* segment;
  std::int64_t panel, length, column;
  int columns;
};

/// Whether a segment is worth prefetching, not an adapter's few panels.
inline bool IsLong(const TileMatrix& weights) {
  return weights.data != nullptr && !weights.repeats && weights.panels >= kSuperblock;
}

/// What is read after a block: down a column of a superblock, and of the one below it (or the same, where there is none).
struct SuperblocksAhead {
  TileRun first{}, second{};

  SuperblocksAhead() = default;
  SuperblocksAhead(const TileMatrix& weights, std::int64_t panel, std::int64_t column)
      : first(weights.RunDownColumn(panel, column)), second(first) {
    if (panel + kSuperblock < weights.panels) second = weights.RunDownColumn(panel + kSuperblock, column);
  }
};

/// What is read after a block of segment s: of the next one down the columns, of the next segment or of the first one at
/// `next_column`. None after the tiles of adapters.
inline SuperblocksAhead BlockAhead(const UnpackGemmArgs& args, std::size_t s, std::int64_t end, std::int64_t column,
                                   std::int64_t next_column) {
  if (!IsLong(args.segments[s].weights)) return {};
  if (end < args.segments[s].weights.panels) return {args.segments[s].weights, end, column};
  while (++s < args.segments.size()) {
    if (IsLong(args.segments[s].weights)) return {args.segments[s].weights, 0, column};
  }
  if (next_column >= args.first_column + args.columns || !IsLong(args.segments[0].weights)) return {};
  return {args.segments[0].weights, 0, next_column};
}

/// @param first, rows  of the activations, below args.first_panel
/// @param out          of the same rows: where the sums go, for this is the last block of its columns; or null
template <class Product>
void MultiplyBlock(const UnpackGemmArgs& args, const RegisterBlock& block, const SuperblocksAhead& ahead, std::int64_t first,
                   std::int64_t rows, float* c, std::int64_t ldc, bool accumulate, BFloat16* const* out) {
  const TileMatrix &weights = block.segment->weights, &x = block.segment->activations;
  const BFloat16* left = x.Tile(args.first_panel, block.panel / 2) + first * kTileColumns;
  alignas(64) BFloat16 decoded[2 * kSuperblock * kTileElements];
  RegisterRun run{};
  run.rows = out;
  run.out = block.column * kTileColumns;
  run.tiles = decoded;
  run.tiles_below = decoded + kSuperblock * kTileElements;
  run.stride = kTileElements;
  if (weights.codec == nullptr) {
    const TileRun tiles = weights.RunDownColumn(block.panel, block.column);
    run.tiles = tiles.data;
    run.stride = tiles.stride;
  }
  run.length = block.length;
  run.left = left;
  run.left_stride = x.column_stride * kTileElements;
  run.ahead = ahead.first.data;
  run.ahead_below = ahead.second.data;
  run.ahead_stride = ahead.first.stride;
  if (rows <= Product::kRowsInOrder && weights.codec == nullptr && weights.column_stride == 0) {
    if (ahead.first.data == nullptr) {  // what is there already
      run.ahead = run.tiles;
      run.ahead_stride = run.stride;
    }
    return MultiplyInOrder<Product>(rows, run, block.columns, c, ldc, accumulate);
  }
  const std::int64_t groups = CeilDiv(rows, kRowsInRegisters);
  // Whole superblocks follow: 64 KB in their order. Else tile by tile, as far as this block has tiles beside them.
  const bool in_order = rows > Product::kRowsInSuperblock && ahead.first.stride == block.columns * kTileElements;
  for (int j = 0; j < block.columns; ++j, run.out += kTileColumns) {
    if (weights.codec != nullptr) {
      for (std::int64_t p = 0; p < block.length; ++p) {
        weights.codec->decode(weights, block.panel + p, block.column + j, 1, decoded + p * kTileElements);
      }
    } else {
      run.tiles = weights.Tile(block.panel, block.column + j);
      if (block.length > kSuperblock) run.tiles_below = weights.Tile(block.panel + kSuperblock, block.column + j);
    }
    for (std::int64_t g = 0, row = 0, end; g < groups; ++g, row = end) {
      end = (g + 1) * rows / groups;
      run.left = left + row * kTileColumns;
      if (out != nullptr) run.rows = out + row;
      if (ahead.first.data != nullptr) {
        const std::int64_t line = g * kPanelRows / groups;
        run.lines = (g + 1) * kPanelRows / groups - line;
        if (in_order) {
          run.ahead_stride = run.lines * kTileColumns;
        } else {
          run.ahead = ahead.first.data + j * kTileElements + line * kTileColumns;
          run.ahead_below = ahead.second.data + j * kTileElements + line * kTileColumns;
        }
      }
      MultiplyColumn<Product>(end - row, run, c + row * ldc + j * kTileColumns, ldc, accumulate);
      if (in_order) {
        const std::int64_t of_superblock = run.lines * Least(block.length, kSuperblock) * kTileColumns;
        run.ahead += of_superblock;
        run.ahead_below += of_superblock;
      }
    }
  }
}

/// Up to a superblock of columns, `n` of the call and more, times `rows` rows from `first` on: sums to C, the last ones to
/// args.rows where there are any.
template <class Product>
void MultiplySuperblocks(const UnpackGemmArgs& args, std::int64_t n, int columns, std::int64_t first, std::int64_t rows,
                         float* c, std::int64_t ldc) {
  const std::int64_t column = args.first_column + n;
  bool accumulate = args.rows == nullptr && args.accumulate;
  // Two at a time, and the sums go to C and back half as often: 2 to 3% faster with 24 to 352 rows on Zen 4.
  const std::int64_t superblocks = rows > Product::kRowsInSuperblock ? 2 : 1;
  for (std::size_t s = 0; s < args.segments.size(); ++s) {
    const GemmSegment& segment = args.segments[s];
    for (std::int64_t panel = 0, end; panel < segment.weights.panels; panel = end) {
      end = panel + Least(superblocks * kSuperblock, segment.weights.panels - panel);
      const RegisterBlock block{&segment, panel, end - panel, column, columns};
      const bool last = s + 1 == args.segments.size() && end == segment.weights.panels;
      MultiplyBlock<Product>(args, block, BlockAhead(args, s, end, column, column + columns), first, rows, c, ldc, accumulate,
                             last && args.rows != nullptr ? args.rows + first : nullptr);
      accumulate = true;
    }
  }
}

/// Without memory for sums rows are taken as many at a time as fit the registers, all the way.
template <class Product>
void UnpackInRegisters(const UnpackGemmArgs& args) {
  constexpr std::int64_t kPitch = SumsPitch(kSuperblock * kTileColumns);
  const std::int64_t all = args.row_count > 0 ? args.row_count : args.panels * kPanelRows;
  const std::int64_t step = args.c != nullptr ? all : kRowsInRegisters;
  for (std::int64_t n = 0, columns; n < args.columns; n += columns) {
    const std::int64_t column = args.first_column + n;
    columns = Least(kSuperblock - column % kSuperblock, args.columns - n);
    for (std::int64_t first = 0; first < all; first += step) {
      alignas(64) float block[kRowsInRegisters * kPitch];
      float* c = args.rows == nullptr ? args.c + n * kTileColumns : args.c != nullptr ? args.c : block;
      MultiplySuperblocks<Product>(args, n, static_cast<int>(columns), first, Least(step, all - first), c,
                                   args.c != nullptr ? args.ldc : kPitch);
    }
  }
  if (args.rows != nullptr) StreamFence();
}

}  // namespace
