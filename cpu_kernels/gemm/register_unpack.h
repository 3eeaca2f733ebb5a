// The unpack form (kernels.h, UnpackGemmArgs) on tiers whose product takes its right factor from registers: rows of stored
// tiles are interleaved there, in front of every use, and nothing is laid out in memory. Up to 12 rows of activations (AVX2: 6,
// with half of it at a time, not interleaved: short_vectors.h) are multiplied with a tile column or, where they are few, with
// one tile after the other as they lie, which the hardware fetches ahead; sums go to C and back for each then. Work grows with
// the rows that count, and the order of summation is a cell's. Where there is no bf16 product the rows are widened before, once
// for the columns of a block, and the weights beside the products.
//
// Weights are taken superblock by superblock, or two below each other, down 8 tile columns at a time: so they come from memory
// in runs of 64 KB, the next ones while these are multiplied, and the sums of those columns wait in C meanwhile. An adapter's
// few panels join the last of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/few_rows.h"
#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/simd.h"

namespace {

/// Pairs of two neighbouring rows of a stored tile, of columns 0..15 and 16..31.
MOESAIC_INLINE void InterleaveRows(const BFloat16* rows, U32x16& low, U32x16& high) {
  const auto a = LoadVector<U16x32>(rows), b = LoadVector<U16x32>(rows + kTileColumns);
#if defined(__AVX512BW__)
  low = (U32x16)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  high = (U32x16)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  low = (U32x16)InterleavedLows(a, b);
  high = (U32x16)InterleavedHighs(a, b);
#endif
}

/// Rows whose sums, of one tile column, fit the registers.
template <class Product>
inline constexpr int kRowsInRegisters = kIsShort<Product> ? 6 : 12;
/// The sums of a line's columns.
template <class Product>
using SumsOfLine = std::conditional_t<kIsShort<Product>, F32x8[2][2], F32x16[2]>;

/// kColumns numbers of some rows of a tile, in fp32.
template <std::int64_t kColumns>
MOESAIC_INLINE void WidenRows(const BFloat16* from, std::int64_t rows, float* to, std::int64_t pitch) {
  for (std::int64_t t = 0; t < rows; ++t, from += kTileColumns, to += pitch) {
    for (std::int64_t j = 0; j < kColumns; j += kNativeLanes) Store(to + j, Load(from + j));
  }
}

/// Floats from one widened row of activations to the next: two superblocks of the contraction.
inline constexpr std::int64_t kWidenedPitch = 2 * kSuperblock * kPanelRows;

/// Stored tiles down a column at a constant distance, at most a superblock of them, and the activations that meet them.
template <class Left>
struct RegisterPart {
  const BFloat16* tiles;
  std::int64_t stride, length;
  const Left* left;          ///< tiles, or rows that are widened
  std::int64_t left_stride;  ///< from one pair of tiles to the next
  const BFloat16* ahead;     ///< lines to be prefetched beside the first tile
  std::int64_t lines;        ///< beside each tile, where a column is taken at a time

  /// From the activations of tile n to those of the next one.
  std::int64_t LeftStep(std::int64_t n) const {
    return std::is_same_v<Left, float> || n % 2 == 0 ? kPanelRows : left_stride - kPanelRows;
  }
};

/// Segments of few panels, an adapter's, that join the last tiles of the segment before them: for themselves they would take
/// all sums from C once more.
inline constexpr std::size_t kMostRests = 2;

/// What is added up in registers: up to two superblocks, and rests.
template <class Left>
struct RegisterRun {
  RegisterPart<Left> parts[2 + kMostRests];
  int count;
  std::int64_t ahead_stride;  ///< from the lines beside one tile to those beside the next

  BFloat16* const* rows;  ///< with the last tiles: where the sums go, rounded, from element `out` on (UnpackGemmArgs); or null
  std::int64_t out;
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

/// Of a row, rounded, to its place in the result.
MOESAIC_INLINE void StoreRounded(BFloat16* to, const F32x16 (&sum)[2]) { StoreRounded(to, sum[0], sum[1]); }

/// The sums of tile column `j` of a run: to C or, with the last tiles, to the rows of the result.
template <int kRows, class Line, class Left>
MOESAIC_INLINE void KeepSums(const Line (&sum)[kRows], const RegisterRun<Left>& run, bool last, int j, float* c,
                             std::int64_t ldc) {
  if (run.rows == nullptr || !last) return StoreSums(sum, c + j * kTileColumns, ldc);
#pragma GCC unroll 12
  for (int t = 0; t < kRows; ++t) {
    if (run.rows[t] != nullptr) StoreRounded(run.rows[t] + run.out + j * kTileColumns, sum[t]);
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

/// Adds the products of kRows rows, widened and kPitch floats apart, with vectors of pairs, which are widened here.
template <class Product, std::int64_t kPitch, int kRows, int kVectors>
MOESAIC_INLINE void MultiplyPairs(const float* left, const U32x16 (&right)[kVectors], F32x16 (&sum)[kRows][kVectors]) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    F32x16 wide[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) wide[v] = Product::Widened(right[v], half);
#pragma GCC unroll 12
    for (int t = 0; t < kRows; ++t) {
      const float number = left[t * kPitch + half];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[t][v] += number * wide[v];
    }
  }
}

/// The same of rows that are widened, [kRows][kWidenedPitch].
template <class Product, int kRows, class Beside>
MOESAIC_INLINE void MultiplyTile(const BFloat16* tile, const float* left, F32x8 (&sum)[kRows][2][2], Beside&& beside) {
  MultiplyLines<kWidenedPitch>(tile, left, sum, beside);
}
template <class Product, int kRows, class Beside>
MOESAIC_INLINE void MultiplyTile(const BFloat16* tile, const float* left, F32x16 (&sum)[kRows][2], Beside&& beside) {
#pragma GCC unroll 1
  for (int p = 0; p < 8; ++p, left += 2) {
    beside(p);
    U32x16 right[2];
    InterleaveRows(tile + 64 * p, right[0], right[1]);
    MultiplyPairs<Product, kWidenedPitch>(left, right, sum);
  }
}

/// C of one tile column (+)= the products of kRows rows with a run. Not inlined, so that the loops have all registers for
/// themselves.
template <class Product, int kRows>
[[gnu::noinline]] void MultiplyColumn(const RegisterRun<typename Product::Left>& run, float* c, std::int64_t ldc,
                                      bool accumulate) {
  SumsOfLine<Product> sum[kRows] = {};
  if (accumulate) LoadSums(c, ldc, sum);
  for (int i = 0; i < run.count; ++i) {
    const RegisterPart<typename Product::Left>& part = run.parts[i];
    const typename Product::Left* left = part.left;
    const BFloat16 *tile = part.tiles, *ahead = part.ahead;
    for (std::int64_t n = 0; n < part.length; ++n, tile += part.stride, ahead += run.ahead_stride) {
      // A few at a time: of many at once some get lost.
      MultiplyTile<Product, kRows>(tile, left, sum, [&](int p) {
        if (p < part.lines) __builtin_prefetch(ahead + p * kTileColumns, 0, Product::kUnpackFetchedTo);
        if (p + 8 < part.lines) __builtin_prefetch(ahead + (p + 8) * kTileColumns, 0, Product::kUnpackFetchedTo);
      });
      left += part.LeftStep(n);
    }
  }
  KeepSums(sum, run, true, 0, c, ldc);
}

/// The same in vectors of eight, half a tile column at a time: the pairs of half lines.
template <class Product, int kRows, int kHalf>
[[gnu::noinline]] void MultiplyHalfColumn(const RegisterRun<float>& run, float* c, std::int64_t ldc, bool accumulate) {
  F32x8 sum[kRows][2] = {};
  if (accumulate) {
#pragma GCC unroll 6
    for (int t = 0; t < kRows; ++t) LoadHalf(c + t * ldc + 8 * kHalf, sum[t]);
  }
  for (int i = 0; i < run.count; ++i) {
    const RegisterPart<float>& part = run.parts[i];
    const float* left = part.left;
    const BFloat16 *tile = part.tiles + 16 * kHalf, *ahead = part.ahead;
    for (std::int64_t n = 0; n < part.length; ++n, tile += part.stride, ahead += run.ahead_stride) {
      const BFloat16* line = tile;
#pragma GCC unroll 1
      for (int p = 0; p < 8; ++p) {
        if (p + 8 * kHalf < part.lines)
          __builtin_prefetch(ahead + (p + 8 * kHalf) * kTileColumns, 0, Product::kUnpackFetchedTo);
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r, ++left, line += kTileColumns) {
          const F32x8 first = WidenPairs(line, 0), second = WidenPairs(line, 1);
#pragma GCC unroll 6
          for (int t = 0; t < kRows; ++t) {
            sum[t][0] += left[t * kWidenedPitch] * first;
            sum[t][1] += left[t * kWidenedPitch] * second;
          }
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < kRows; ++t) {
    if (run.rows == nullptr) {
      StoreHalf(sum[t], c + t * ldc + 8 * kHalf);
    } else if (run.rows[t] != nullptr) {
      StoreHalfRounded(sum[t], run.rows[t] + run.out + 8 * kHalf);
    }
  }
}

/// The same of several columns, whose tiles lie side by side: tile after tile as they lie, and so are those ahead.
template <class Product, int kRows>
[[gnu::noinline]] void MultiplyInOrder(const RegisterRun<typename Product::Left>& run, int columns, float* c, std::int64_t ldc,
                                       bool accumulate) {
  constexpr int kEvery = kRows <= kRowsFetchedAhead ? Product::kLinesFetchedAhead : 1;
  static_assert(kEvery == 1 || kEvery == 4);
  const RegisterPart<typename Product::Left>& part = run.parts[0];
  const typename Product::Left* left = part.left;
  for (std::int64_t n = 0; n < part.length; ++n, accumulate = true) {
    const BFloat16 *tile = part.tiles + n * part.stride, *ahead = part.ahead + n * run.ahead_stride;
    for (int j = 0; j < columns; ++j, tile += kTileElements, ahead += kTileElements) {
      if constexpr (kEvery > 1) {
        for (int i = 0; i < kPanelRows; i += kEvery) __builtin_prefetch(ahead + i * kTileColumns, 0, Product::kUnpackFetchedTo);
      }
      SumsOfLine<Product> sum[kRows] = {};
      if (accumulate) LoadSums(c + j * kTileColumns, ldc, sum);
      MultiplyTile<Product, kRows>(tile, left, sum, [&](int p) {
        if constexpr (kEvery == 1) {
          for (int i = 0; i < 2; ++i) __builtin_prefetch(ahead + (2 * p + i) * kTileColumns, 0, Product::kUnpackFetchedTo);
        }
      });
      KeepSums(sum, run, n + 1 == part.length, j, c, ldc);
    }
    left += part.LeftStep(n);
  }
}

/// At most kRows rows.
template <class Product, int kRows = kRowsInRegisters<Product>>
void MultiplyColumn(std::int64_t rows, const RegisterRun<typename Product::Left>& run, float* c, std::int64_t ldc,
                    bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyColumn<Product, kRows - 1>(rows, run, c, ldc, accumulate);
  }
  if constexpr (kIsShort<Product> && kRows > 2) {
    MultiplyHalfColumn<Product, kRows, 0>(run, c, ldc, accumulate);
    MultiplyHalfColumn<Product, kRows, 1>(run, c, ldc, accumulate);
  } else {
    MultiplyColumn<Product, kRows>(run, c, ldc, accumulate);
  }
}

template <class Product, int kRows = Product::kRowsInOrder>
void MultiplyInOrder(std::int64_t rows, const RegisterRun<typename Product::Left>& run, int columns, float* c, std::int64_t ldc,
                     bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyInOrder<Product, kRows - 1>(rows, run, columns, c, ldc, accumulate);
  }
  MultiplyInOrder<Product, kRows>(run, columns, c, ldc, accumulate);
}

/// A part of a superblock, or of two, `columns` from `column` on and `length` panels from `panel` on, times all rows; and all
/// panels of the `rests` segments behind it.
struct RegisterBlock {
  const GemmSegment* segment;
  std::int64_t panel, length, column;
  int columns;
  std::size_t rests;
};

/// Rows of activations as a block's products take them: bf16 where they lie,
template <class Left>
class LeftRows {
 public:
  static constexpr std::int64_t kPitch = kTileColumns;

  LeftRows(const TileMatrix& activations, std::int64_t first_panel, const RegisterBlock& block)
      : rows_(activations.Tile(first_panel, block.panel / 2)), stride_(activations.column_stride * kTileElements) {}

  /// Rows that are taken at a time, at most.
  std::int64_t Most(std::int64_t rows) const { return rows; }
  const BFloat16* From(std::int64_t row, std::int64_t) const { return rows_ + row * kTileColumns; }
  /// From a row of the block's first superblock to the same of its second one.
  std::int64_t Below() const { return kSuperblock / 2 * stride_; }

 private:
  const BFloat16* rows_;
  std::int64_t stride_;
};

/// or widened, once for all columns of the block.
template <>
class LeftRows<float> {
 public:
  static constexpr std::int64_t kPitch = kWidenedPitch;

  LeftRows(const TileMatrix& activations, std::int64_t first_panel, const RegisterBlock& block)
      : tile_(activations.Tile(first_panel, block.panel / 2)),
        stride_(activations.column_stride * kTileElements),
        length_(block.length) {}

  std::int64_t Most(std::int64_t) const { return kMost; }
  const float* From(std::int64_t row, std::int64_t count) {
    for (std::int64_t n = 0; n < length_; ++n) {
      WidenRows<kPanelRows>(tile_ + n / 2 * stride_ + n % 2 * kPanelRows + row * kTileColumns, count, rows_ + n * kPanelRows,
                            kPitch);
    }
    return rows_;
  }
  std::int64_t Below() const { return kSuperblock * kPanelRows; }

 private:
  static constexpr std::int64_t kMost = 96;

  const BFloat16* tile_;
  std::int64_t stride_, length_;
  alignas(64) float rows_[kMost * kPitch];
};

/// Whether a segment is worth prefetching, not an adapter's few panels.
inline bool IsLong(const TileMatrix& weights) {
  return weights.data != nullptr && !weights.repeats && weights.panels >= kSuperblock;
}

/// Whether rests join the block before them. (Rows that are widened have no room for them.)
template <class Product>
constexpr bool JoinsRests() {
  return std::is_same_v<typename Product::Left, BFloat16>;
}

/// Segments at the end that are rests.
inline std::size_t RestsOf(std::span<const GemmSegment> segments) {
  std::size_t count = 0;
  for (; count < kMostRests && count + 1 < segments.size(); ++count) {
    const TileMatrix& weights = segments[segments.size() - 1 - count].weights;
    if (weights.data == nullptr || IsLong(weights)) break;
  }
  return count;
}

/// Of tiles that another thread has packed.
inline void PrefetchTile(const BFloat16* tile) {
  for (int i = 0; i < kPanelRows; ++i) __builtin_prefetch(tile + i * kTileColumns);
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
  alignas(64) BFloat16 decoded[2 * kSuperblock * kTileElements];
  LeftRows<typename Product::Left> left_rows(x, args.first_panel, block);
  RegisterRun<typename Product::Left> run{};
  run.out = block.column * kTileColumns;
  run.ahead_stride = ahead.first.stride;
  const BFloat16* const aheads[] = {ahead.first.data, ahead.second.data};
  for (std::int64_t panel = 0; panel < block.length; panel += kSuperblock) {
    TileRun tiles{decoded + panel * kTileElements, kTileElements, 0};
    if (weights.codec == nullptr) tiles = weights.RunDownColumn(block.panel + panel, block.column);
    auto& part = run.parts[run.count];
    part.tiles = tiles.data;
    part.stride = tiles.stride;
    part.length = Least(kSuperblock, block.length - panel);
    part.left_stride = x.column_stride * kTileElements;
    part.ahead = aheads[run.count++];
  }
  if (rows <= Product::kRowsInOrder && weights.codec == nullptr && weights.column_stride == 0) {
    if (ahead.first.data == nullptr) {  // what is there already
      run.parts[0].ahead = run.parts[0].tiles;
      run.ahead_stride = run.parts[0].stride;
    }
    static_assert(Product::kRowsInOrder <= Product::kRowsInSuperblock, "one part");
    run.parts[0].left = left_rows.From(first, rows);
    run.rows = out;
    return MultiplyInOrder<Product>(rows, run, block.columns, c, ldc, accumulate);
  }
  const int superblocks = run.count;
  for (std::size_t i = 1; i <= block.rests; ++i) {
    const auto& [rest, activations] = block.segment[i];
    auto& part = run.parts[run.count++];
    part.stride = rest.RunDownColumn(0, block.column).stride;
    part.length = rest.panels;
    part.ahead = rest.data;  // no lines of it
    part.left_stride = activations.column_stride * kTileElements;
  }
  // Whole superblocks follow: 64 KB in their order. Else tile by tile, as far as this block has tiles beside them.
  const bool in_order = rows > Product::kRowsInSuperblock && ahead.first.stride == block.columns * kTileElements;
  const std::int64_t parts = CeilDiv(rows, left_rows.Most(rows));
  for (std::int64_t part = 0, begin = 0, part_end; part < parts; ++part, begin = part_end) {
    part_end = (part + 1) * rows / parts;
    const std::int64_t count = part_end - begin, groups = CeilDiv(count, kRowsInRegisters<Product>);
    const typename Product::Left* const left = left_rows.From(first + begin, count);
    const bool fetches = part == 0 && ahead.first.data != nullptr;
    for (int i = 0; i < superblocks; ++i) run.parts[i].lines = 0;
    for (int j = 0; j < block.columns; ++j) {
      run.out = (block.column + j) * kTileColumns;
      if (weights.codec != nullptr) {
        for (std::int64_t p = 0; p < block.length; ++p) {
          weights.codec->decode(weights, block.panel + p, block.column + j, 1, decoded + p * kTileElements);
        }
      } else {
        for (int i = 0; i < superblocks; ++i) {
          run.parts[i].tiles = weights.Tile(block.panel + i * kSuperblock, block.column + j);
        }
      }
      for (std::size_t i = 1; i <= block.rests; ++i) {
        const TileMatrix& rest = block.segment[i].weights;
        run.parts[superblocks + i - 1].tiles = rest.Tile(0, block.column + j);
        for (std::int64_t p = 0; p < (rest.repeats ? 1 : rest.panels) && block.column + j + 1 < rest.columns; ++p) {
          PrefetchTile(rest.Tile(p, block.column + j + 1));
        }
      }
      for (std::int64_t g = 0, row = 0, end; g < groups; ++g, row = end) {
        end = (g + 1) * count / groups;
        for (int i = 0; i < superblocks; ++i) run.parts[i].left = left + row * left_rows.kPitch + i * left_rows.Below();
        if constexpr (JoinsRests<Product>()) {
          for (std::size_t i = 1; i <= block.rests; ++i) {
            run.parts[superblocks + i - 1].left =
                block.segment[i].activations.Tile(args.first_panel, 0) + (first + begin + row) * kTileColumns;
          }
        }
        if (out != nullptr) run.rows = out + begin + row;
        if (fetches) {
          const std::int64_t line = g * kPanelRows / groups, lines = (g + 1) * kPanelRows / groups - line;
          if (in_order) run.ahead_stride = lines * kTileColumns;
          for (int i = 0; i < superblocks; ++i) {
            run.parts[i].lines = lines;
            if (!in_order) run.parts[i].ahead = aheads[i] + j * kTileElements + line * kTileColumns;
          }
        }
        MultiplyColumn<Product>(end - row, run, c + (begin + row) * ldc + j * kTileColumns, ldc, accumulate);
        if (fetches && in_order) {
          for (int i = 0; i < superblocks; ++i) {
            run.parts[i].ahead += run.parts[i].lines * Least(block.length, kSuperblock) * kTileColumns;
          }
        }
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
  const std::size_t rests = JoinsRests<Product>() && rows > Product::kRowsInOrder ? RestsOf(args.segments) : 0;
  const std::size_t segments = args.segments.size() - rests;
  for (std::size_t s = 0; s < segments; ++s) {
    const GemmSegment& segment = args.segments[s];
    for (std::int64_t panel = 0, end; panel < segment.weights.panels; panel = end) {
      end = panel + Least(superblocks * kSuperblock, segment.weights.panels - panel);
      const bool last = s + 1 == segments && end == segment.weights.panels;
      const RegisterBlock block{&segment, panel, end - panel, column, columns, last ? rests : 0};
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
  const std::int64_t step = args.c != nullptr ? all : kRowsInRegisters<Product>;
  for (std::int64_t n = 0, columns; n < args.columns; n += columns) {
    const std::int64_t column = args.first_column + n;
    columns = Least(kSuperblock - column % kSuperblock, args.columns - n);
    for (std::int64_t first = 0; first < all; first += step) {
      alignas(64) float block[kRowsInRegisters<Product> * kPitch];
      float* c = args.rows == nullptr ? args.c + n * kTileColumns : args.c != nullptr ? args.c : block;
      MultiplySuperblocks<Product>(args, n, static_cast<int>(columns), first, Least(step, all - first), c,
                                   args.c != nullptr ? args.ldc : kPitch);
    }
  }
  if (args.rows != nullptr) StreamFence();
}

}  // namespace
