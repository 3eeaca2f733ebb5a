// The forms of GEMM for few rows of activations, on tiers without a matrix unit. A cell (cell.h) computes whole panels of
// 16 rows, whose work is lost where an expert has one or two; here it grows with the rows that there are.
//
//   direct   A vector runs along the contraction: a row of a stored tile times a row of the activations, 32 products at a time,
//            and the 16 partial sums of a result are added up at the end, in one fixed tree.
//   unpack   A vector runs along the columns of the weights, as in a cell, in registers all the way from the stored tile; the
//            order of summation is the cell's.
//   gradient A vector runs along a panel of the right factor, and there are no products but those of the rows; the order of
//            summation is the cell's here too.
//
// A product is what an instruction set brings:
//
//   static F32x16 Add(F32x16 sum, U32x16 a, U32x16 b);   // sum[l] + a[l] . b[l], where a dword is a pair of bf16
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/direct_gemm.h"
#include "cpu_kernels/simd.h"

namespace {

/// One panel: with 12 rows an expert on average, taking up to 16 this way was a tenth faster than up to 12 (a layer forward,
/// avx512).
inline constexpr int kMostFewRows = 16;

MOESAIC_INLINE U32x16 LoadPairs(const BFloat16* p) {
  U32x16 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// ---- Direct ----

/// Tiles of the weights of one or two panels, as far as their distance is constant, and where their activations lie.
struct FewRowsUnit {
  const BFloat16* weights[2];
  std::int64_t stride;
  std::int64_t length;  ///< at most kSuperblock
  const BFloat16* activations;
  std::int64_t activation_stride;
};

/// Units between two visits of the partial sums, at most: their rows of activations, 32 KB, stay in L1.
inline constexpr int kFewRowsUnits = 8;
MOESAIC_INLINE int FewRowsUnits(std::int64_t rows) { return rows <= 8 ? kFewRowsUnits : kFewRowsUnits / 2; }

/// Partial sums of a row of activations with a panel: [row of weights][lane].
using FewRowsSums = float[kPanelRows][16];

/// Adds the units' products of kRows rows of activations, from `first` on, with one panel to its partial sums.
/// @param lines  the activations, [tile][rows][32]
template <class Product, int kRows>
void FewRowsPanel(const FewRowsUnit* units, int count, int panel, const BFloat16* lines, std::int64_t rows, std::int64_t first,
                  FewRowsSums* sums, Prefetcher& prefetcher) {
  // 16 chains of additions hide the latency of a product.
  constexpr int kGroup = kRows == 1 ? 16 : kRows == 2 ? 8 : 4;
  Prefetcher::Steps steps(prefetcher);
  for (std::int64_t row = 0; row < kPanelRows; row += kGroup) {
    F32x16 sum[kGroup][kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 4
      for (int t = 0; t < kRows; ++t) sum[i][t] = LoadF32(sums[first + t][row + i]);
    }
    const BFloat16* line = lines + first * kTileColumns;
    for (int u = 0; u < count; ++u) {
      const BFloat16* tile = units[u].weights[panel] + row * kTileColumns;
      for (std::int64_t k = 0; k < units[u].length; ++k, tile += units[u].stride, line += rows * kTileColumns) {
        U32x16 right[kRows];
#pragma GCC unroll 4
        for (int t = 0; t < kRows; ++t) right[t] = LoadPairs(line + t * kTileColumns);
#pragma GCC unroll 16
        for (int i = 0; i < kGroup; ++i) {
          const U32x16 left = LoadPairs(tile + i * kTileColumns);
#pragma GCC unroll 4
          for (int t = 0; t < kRows; ++t) sum[i][t] = Product::Add(sum[i][t], left, right[t]);
        }
        steps.Next();
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 4
      for (int t = 0; t < kRows; ++t) StoreF32(sums[first + t][row + i], sum[i][t]);
    }
  }
}

/// Rows of activations are taken four at a time.
inline constexpr std::int64_t kFewRowsGroup = 4;

/// @param sums  [panels][kMostFewRows]
template <class Product>
void FewRowsBlock(const FewRowsUnit* units, int count, int panels, std::int64_t rows, FewRowsSums* sums,
                  Prefetcher& prefetcher) {
  // Side by side: 1 KB apart, as they come, they would share four sets of L1.
  alignas(64) BFloat16 lines[kFewRowsUnits * kSuperblock * 8 * kTileColumns];
  BFloat16* line = lines;
  for (int u = 0; u < count; ++u) {
    for (std::int64_t k = 0; k < units[u].length; ++k) {
      const BFloat16* from = units[u].activations + k * units[u].activation_stride;
      for (std::int64_t t = 0; t < rows; ++t, line += kTileColumns) std::memcpy(line, from + t * kTileColumns, 64);
    }
  }
  for (int panel = 0; panel < panels; ++panel, sums += kMostFewRows) {
    for (std::int64_t first = 0; first < rows; first += kFewRowsGroup) {
      switch (Least(kFewRowsGroup, rows - first)) {
        case 1:
          FewRowsPanel<Product, 1>(units, count, panel, lines, rows, first, sums, prefetcher);
          break;
        case 2:
          FewRowsPanel<Product, 2>(units, count, panel, lines, rows, first, sums, prefetcher);
          break;
        case 3:
          FewRowsPanel<Product, 3>(units, count, panel, lines, rows, first, sums, prefetcher);
          break;
        default:
          FewRowsPanel<Product, 4>(units, count, panel, lines, rows, first, sums, prefetcher);
      }
    }
  }
}

/// Lane i of the result: the sum of v[i]'s lanes. Halves are added to halves, then quarters, and so on.
inline F32x16 SumOfLanes(const float (*v)[16]) {
  F32x16 eight[8], four[4];
  for (int i = 0; i < 8; ++i) {
    const F32x16 a = LoadF32(v[2 * i]), b = LoadF32(v[2 * i + 1]);
    eight[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const F32x16 a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  F32x16 two[2];
  for (int i = 0; i < 2; ++i) {
    const F32x16 a = four[2 * i], b = four[2 * i + 1];
    two[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
             __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  return __builtin_shufflevector(two[0], two[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(two[0], two[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/// C^T of one panel, zeros beyond `rows`, to C or added to it.
inline void StoreFewRows(const FewRowsSums* sums, std::int64_t rows, float* c, std::int64_t ldc, bool accumulate) {
  alignas(64) float block[kPanelRows][16] = {};
  for (std::int64_t t = 0; t < rows; ++t) StoreF32(block[t], SumOfLanes(sums[t]));
  auto* dwords = reinterpret_cast<BFloat16*>(block);
  Transpose16x16(dwords, dwords);
  for (std::int64_t i = 0; i < kPanelRows; ++i) {
    const F32x16 value = LoadF32(block[i]);
    StoreF32(c + i * ldc, accumulate ? LoadF32(c + i * ldc) + value : value);
  }
}

template <class Product>
void FewRowsDirect(const DirectGemmArgs& args) {
  const std::int64_t rows = args.few_rows;
  std::int64_t steps = 0;
  for (const GemmSegment& segment : args.segments) steps += segment.weights.columns;
  steps *= CeilDiv(rows, kFewRowsGroup) * (rows == 1 ? 1 : rows == 2 ? 2 : 4);
  const DirectSlices whole(args.segments, 0);
  OthersAhead others(args.prefetch, CeilDiv(args.panels, 2));
  for (std::int64_t p = 0; p < args.panels; p += 2) {
    const int panels = Least(2, args.panels - p);
    const bool last = p + panels == args.panels;
    const WeightsAhead nothing,
        ahead = PieceAhead(args, last ? std::span<const SlicePart>() : whole.parts(), p + panels, 2, kMaxRuns * kSuperblock);
    Prefetcher prefetcher;
    prefetcher.Aim(nothing, ahead, others.Next(), steps * panels);
    alignas(64) FewRowsSums sums[2][kMostFewRows];
    std::memset(sums, 0, sizeof(sums));
    FewRowsUnit units[kFewRowsUnits];
    int count = 0;
    BFloat16* decoded = args.scratch;
    for (const GemmSegment& segment : args.segments) {
      const TileMatrix& x = segment.activations;
      for (std::int64_t k = 0; k < segment.weights.columns;) {
        TileRun runs[2];
        for (int a = 0; a < panels; ++a) {
          runs[a] = WeightRun(segment.weights, args.first_panel + p + a, k, segment.weights.columns, decoded);
          if (segment.weights.codec != nullptr) decoded += runs[a].length * kTileElements;
        }
        for (std::int64_t done = 0; done < runs[0].length; done += kSuperblock) {
          FewRowsUnit& unit = units[count++];
          for (int a = 0; a < panels; ++a) unit.weights[a] = runs[a].data + done * runs[a].stride;
          unit.stride = runs[0].stride;
          unit.length = Least(kSuperblock, runs[0].length - done);
          unit.activations = x.Tile(0, k + done);
          unit.activation_stride = x.column_stride * kTileElements;
          if (count == FewRowsUnits(rows)) {
            FewRowsBlock<Product>(units, count, panels, rows, sums[0], prefetcher);
            count = 0;
          }
        }
        k += runs[0].length;
      }
    }
    FewRowsBlock<Product>(units, count, panels, rows, sums[0], prefetcher);
    for (int a = 0; a < panels; ++a) {
      StoreFewRows(sums[a], rows, args.c + (p + a) * kPanelRows * args.ldc, args.ldc, args.accumulate);
    }
  }
}

// ---- Unpack ----

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

/// Rows of the unpack form whose accumulators fit the registers.
inline constexpr int kFewRowsInRegisters = 12;

/// Tile column n, for kRows rows from `first` on.
template <class Product, int kRows>
void FewRowsColumn(const UnpackGemmArgs& args, std::int64_t n, std::int64_t first) {
  const std::int64_t column = args.first_column + n;
  const bool more = n + 1 < args.columns;
  alignas(64) BFloat16 decoded[kTileElements];
  alignas(64) float block[kRows][kTileColumns];
  float* c = args.rows == nullptr ? args.c + first * args.ldc + n * kTileColumns : block[0];
  const std::int64_t ldc = args.rows == nullptr ? args.ldc : kTileColumns;
  F32x16 sum[kRows][2] = {};
  if (args.rows == nullptr && args.accumulate) {
#pragma GCC unroll 12
    for (int t = 0; t < kRows; ++t) {
      sum[t][0] = LoadF32(c + t * ldc);
      sum[t][1] = LoadF32(c + t * ldc + 16);
    }
  }
  for (const GemmSegment& segment : args.segments) {
    const TileMatrix& weights = segment.weights;
    const bool ahead = more && weights.codec == nullptr;
    for (std::int64_t panel = 0; panel < weights.panels; ++panel) {
      const BFloat16* tile = WeightTile(weights, panel, column, decoded);
      const BFloat16* next = ahead ? weights.Tile(panel, column + 1) : tile;
      const BFloat16* left =
          segment.activations.Tile(args.first_panel, panel / 2) + first * kTileColumns + panel % 2 * kPanelRows;
      for (int p = 0; p < 8; ++p) {
        U32x16 low, high;
        InterleaveRows(tile + 64 * p, low, high);
        __builtin_prefetch(next + 64 * p, 0, 2);
        __builtin_prefetch(next + 64 * p + 32, 0, 2);
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
  }
#pragma GCC unroll 12
  for (int t = 0; t < kRows; ++t) {
    StoreF32(c + t * ldc, sum[t][0]);
    StoreF32(c + t * ldc + 16, sum[t][1]);
  }
  if (args.rows != nullptr) ScatterRows(c, ldc, kRows, kTileColumns, args.rows + first, column * kTileColumns);
}

template <class Product, int kRows>
void FewRowsColumns(const UnpackGemmArgs& args, std::int64_t rows, std::int64_t n, std::int64_t first) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return FewRowsColumns<Product, kRows - 1>(args, rows, n, first);
  }
  FewRowsColumn<Product, kRows>(args, n, first);
}

template <class Product>
void FewRowsUnpack(const UnpackGemmArgs& args) {
  // Rows that do not fit take the column, which is in cache by then, in two halves.
  const std::int64_t step = CeilDiv(args.few_rows, CeilDiv(args.few_rows, kFewRowsInRegisters));
  for (std::int64_t n = 0; n < args.columns; ++n) {
    for (std::int64_t first = 0; first < args.few_rows; first += step) {
      FewRowsColumns<Product, kFewRowsInRegisters>(args, Least(step, args.few_rows - first), n, first);
    }
  }
  if (args.rows != nullptr) StreamFence();
}

// ---- Gradient ----

template <class Product>
void FewRowsGradient(const GradientGemmArgs& args) {
  const std::int64_t pairs = CeilDiv(args.few_rows, 2), right_panels = args.segments[0].right.panels;
  for (std::int64_t p = 0; p < args.panels; ++p) {
    for (std::int64_t n = 0; n < right_panels; ++n) {
      float* c = args.c + p * kPanelRows * args.ldc + n * kPanelRows;
      F32x16 sum[kPanelRows] = {};
      if (args.accumulate) {
#pragma GCC unroll 16
        for (int i = 0; i < kPanelRows; ++i) sum[i] = LoadF32(c + i * args.ldc);
      }
      for (const GradientSegment& segment : args.segments) {
        const BFloat16* left = segment.left.Tile(args.first_panel + p, 0);
        const BFloat16* right = segment.right.Tile(n, 0);
        for (std::int64_t k = 0; k < pairs; ++k) {
          const U32x16 row = LoadPairs(right + k * kTileColumns);
#pragma GCC unroll 16
          for (int i = 0; i < kPanelRows; ++i) {
            std::uint32_t pair;
            std::memcpy(&pair, left + i * kTileColumns + 2 * k, sizeof(pair));
            sum[i] = Product::Add(sum[i], U32x16{} + pair, row);
          }
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kPanelRows; ++i) StoreF32(c + i * args.ldc, sum[i]);
    }
  }
}

}  // namespace
