// The forms of GEMM for few rows of activations, on tiers without a matrix unit. A cell (cell.h) computes whole panels of
// 16 rows, whose work is lost where an expert has one or two; here it grows with the rows that there are. (The unpack form has
// one source for any number of rows: register_unpack.h.)
//
//   direct   A vector holds the same part of a tile's line, 1 / kTokens of it, of kTokens rows of activations, and meets that
//            part of a row of the weights, repeated. Tiles are read once, from their first line to their last, in the order in
//            which they lie; the partial sums of a result are added up at the end, in one fixed tree.
//   gradient A vector runs along a panel of the right factor, and there are no products but those of the rows; the order of
//            summation is the cell's here.
//
// A product is what an instruction set brings:
//
//   static F32x16 Add(F32x16 sum, U32x16 a, U32x16 b);   // sum[l] + a[l] . b[l], where a dword is a pair of bf16
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/cell.h"
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

using U64x8 = std::uint64_t __attribute__((vector_size(64)));

/// Lines x[0..3], transposed as a matrix of 128-bit parts.
MOESAIC_INLINE void TransposeQuarters(U64x8* x) {
  const U64x8 low01 = __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11);
  const U64x8 high01 = __builtin_shufflevector(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
  const U64x8 low23 = __builtin_shufflevector(x[2], x[3], 0, 1, 2, 3, 8, 9, 10, 11);
  const U64x8 high23 = __builtin_shufflevector(x[2], x[3], 4, 5, 6, 7, 12, 13, 14, 15);
  x[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5, 8, 9, 12, 13);
  x[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7, 10, 11, 14, 15);
  x[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5, 8, 9, 12, 13);
  x[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7, 10, 11, 14, 15);
}

/// kTokens rows of a stored tile, in parts of 1 / kTokens of a line: part q of all of them, side by side, becomes line q.
template <int kTokens>
MOESAIC_INLINE void PartsSideBySide(const BFloat16* rows, BFloat16* parts) {
  if constexpr (kTokens == 16) {
    Transpose16x16(rows, parts);
  } else {
    U64x8 x[kTokens];
    std::memcpy(x, rows, sizeof(x));
    if constexpr (kTokens == 2) {
      const U64x8 low = __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11);
      x[1] = __builtin_shufflevector(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
      x[0] = low;
    } else if constexpr (kTokens == 4) {
      TransposeQuarters(x);
    } else if constexpr (kTokens == 8) {
      U64x8 even[4], odd[4];
      for (int i = 0; i < 4; ++i) {
        even[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        odd[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
      }
      TransposeQuarters(even);
      TransposeQuarters(odd);
      for (int i = 0; i < 4; ++i) {
        x[2 * i] = even[i];
        x[2 * i + 1] = odd[i];
      }
    }
    std::memcpy(parts, x, sizeof(x));
  }
}

/// Repeats the first 1 / kTokens of a line.
template <int kTokens>
MOESAIC_INLINE U32x16 RepeatPart(const BFloat16* line) {
#if defined(__AVX512F__)  // GCC makes single loads of these alone
  if constexpr (kTokens == 2) {
    return (U32x16)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)));
  } else if constexpr (kTokens == 4) {
    return (U32x16)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
  } else if constexpr (kTokens == 8) {
    std::uint64_t part;
    std::memcpy(&part, line, sizeof(part));
    return (U32x16)(U64x8{} + part);
  } else if constexpr (kTokens == 16) {
    std::uint32_t pair;
    std::memcpy(&pair, line, sizeof(pair));
    return U32x16{} + pair;
  }
#else
  if constexpr (kTokens > 1) {
    constexpr int kBytes = 64 / kTokens;
    U32x16 v;
    for (int i = 0; i < kTokens; ++i) std::memcpy(reinterpret_cast<char*>(&v) + i * kBytes, line, kBytes);
    return v;
  }
#endif
  return LoadPairs(line);
}

/// Tiles of the contraction between two visits of the sums: the part of a panel that lies in one superblock.
inline constexpr std::int64_t kFewRowsDepth = kSuperblock;

/// kVectors vectors of activations at a time.
template <int kTokens, int kVectors>
struct FewRowsForm {
  static constexpr int kRows = kTokens * kVectors;
  /// Rows of weights whose sums fit the registers.
  static constexpr int kWeights = kVectors == 1 ? kPanelRows : kPanelRows / 2;
  /// Of a panel: [row of weights][token, part].
  using Sums = float[kPanelRows][kVectors][16];
};

/// Adds the products of rows [row, row + kWeights) of a panel's tiles to its sums.
/// @param ahead  as many tiles, which are prefetched
/// @param parts  [tile][vector][part] lines
template <class Product, int kTokens, int kVectors>
void FewRowsPanel(const TileRun& run, const BFloat16* ahead, int row, const BFloat16* parts,
                  typename FewRowsForm<kTokens, kVectors>::Sums& sums) {
  constexpr int kWeights = FewRowsForm<kTokens, kVectors>::kWeights;
  F32x16 sum[kWeights][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) sum[i][j] = LoadF32(sums[row + i][j]);
  }
  const BFloat16* tile = run.data + row * kTileColumns;
  ahead += row * run.length * kTileColumns;
  for (std::int64_t k = run.length; k > 0; --k, tile += run.stride, parts += kVectors * kTokens * kTileColumns) {
#pragma GCC unroll 1
    for (int q = 0; q < kTokens; ++q) {
#pragma GCC unroll 16
      for (int i = 0; i < kWeights / kTokens; ++i, ahead += kTileColumns) __builtin_prefetch(ahead);
      U32x16 right[kVectors];
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) right[j] = LoadPairs(parts + (j * kTokens + q) * kTileColumns);
#pragma GCC unroll 16
      for (int i = 0; i < kWeights; ++i) {
        const U32x16 left = RepeatPart<kTokens>(tile + i * kTileColumns + q * (kTileColumns / kTokens));
#pragma GCC unroll 3
        for (int j = 0; j < kVectors; ++j) sum[i][j] = Product::Add(sum[i][j], left, right[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) StoreF32(sums[row + i][j], sum[i][j]);
  }
}

/// In each lane the sum of its token's parts: halves are added to halves, then quarters, and so on.
template <int kTokens>
MOESAIC_INLINE F32x16 SumOfParts(F32x16 v) {
  if constexpr (kTokens <= 1) v = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (kTokens <= 2) v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if constexpr (kTokens <= 4) v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  if constexpr (kTokens <= 8) v = v + __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v;
}

/// C^T of one panel, zeros beyond `rows`, to C or added to it.
template <int kTokens, int kVectors>
void StoreFewRows(const typename FewRowsForm<kTokens, kVectors>::Sums& sums, std::int64_t rows, float* c, std::int64_t ldc,
                  bool accumulate) {
  for (int i = 0; i < kPanelRows; ++i, c += ldc) {
    alignas(64) float parts[kVectors][16], row[16] = {};
    for (int j = 0; j < kVectors; ++j) StoreF32(parts[j], SumOfParts<kTokens>(LoadF32(sums[i][j])));
    for (std::int64_t t = 0; t < rows; ++t) row[t] = parts[t / kTokens][t % kTokens * (16 / kTokens)];
    const F32x16 value = LoadF32(row);
    StoreF32(c, accumulate ? LoadF32(c) + value : value);
  }
}

/// Up to a superblock of panels at a time: their tiles are read in runs of 64 KB, and the activations laid out once for all.
template <class Product, int kTokens, int kVectors>
void FewRowsPanels(const DirectGemmArgs& args, std::int64_t first, int panels) {
  using Form = FewRowsForm<kTokens, kVectors>;
  alignas(64) BFloat16 parts[kFewRowsDepth][kVectors][kTokens * kTileColumns];
  alignas(64) typename Form::Sums sums[kSuperblock];
  std::memset(sums, 0, sizeof(sums[0]) * static_cast<std::size_t>(panels));
  const std::int64_t first_panel = args.first_panel + first;
  const PrefetchRange& next_call = args.prefetch;
  for (const GemmSegment& segment : args.segments) {
    const TileMatrix& weights = segment.weights;
    for (std::int64_t begin = 0, end; begin < weights.columns; begin = end) {
      end = begin + Least(kFewRowsDepth, weights.columns - begin);
      for (std::int64_t k = begin; k < end; ++k) {
        for (int j = 0; j < kVectors; ++j) {
          PartsSideBySide<kTokens>(segment.activations.Tile(0, k) + j * kTokens * kTileColumns, parts[k - begin][j]);
        }
      }
      for (int p = 0; p < panels; ++p) {
        const TileRun run = WeightRun(weights, first_panel + p, begin, end, args.scratch);
        const BFloat16* ahead = run.data;
        if (p + 1 < panels) {
          if (weights.codec == nullptr) ahead = weights.Tile(first_panel + p + 1, begin);
        } else if (end < weights.columns) {
          if (weights.codec == nullptr) ahead = weights.Tile(first_panel, end);
        } else if (next_call.weights.data != nullptr && first + panels == args.panels) {
          ahead = next_call.weights.Tile(next_call.first_panel, next_call.first_column);
        }
        for (int row = 0; row < kPanelRows; row += Form::kWeights) {
          FewRowsPanel<Product, kTokens, kVectors>(run, ahead, row, parts[0][0], sums[p]);
        }
      }
    }
  }
  for (int p = 0; p < panels; ++p) {
    StoreFewRows<kTokens, kVectors>(sums[p], args.few_rows, args.c + (first + p) * kPanelRows * args.ldc, args.ldc,
                                    args.accumulate);
  }
}

template <class Product, int kTokens, int kVectors>
void FewRowsDirectAs(const DirectGemmArgs& args) {
  for (std::int64_t p = 0; p < args.panels; p += kSuperblock) {
    FewRowsPanels<Product, kTokens, kVectors>(args, p, Least(kSuperblock, args.panels - p));
  }
}

template <class Product>
void FewRowsDirect(const DirectGemmArgs& args) {
  for (const BFloat16* line : args.prefetch.others) {
    for (std::int64_t i = 0; line != nullptr && i < args.prefetch.lines; ++i) __builtin_prefetch(line + i * kTileColumns, 0, 2);
  }
  if (args.few_rows == 1) return FewRowsDirectAs<Product, 1, 1>(args);
  if (args.few_rows == 2) return FewRowsDirectAs<Product, 2, 1>(args);
  if (args.few_rows <= 4) return FewRowsDirectAs<Product, 4, 1>(args);
  if (args.few_rows <= 8) return FewRowsDirectAs<Product, 8, 1>(args);
  if (args.few_rows <= 12) return FewRowsDirectAs<Product, 4, 3>(args);
  FewRowsDirectAs<Product, 16, 1>(args);
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
