// The forms for few rows where vectors hold 8 floats and there are 16 of them (AVX2), as parts of few_rows.h and
// register_unpack.h. Half a line of a stored tile, 8 pairs of neighbours, is widened to two vectors, of the first and of the
// second numbers of the pairs, by a shift and by a mask: nothing moves across lanes. Activations are widened before, once for
// all weights that they meet.
//
//   direct    Numbers of a row of weights meet the same numbers of a row of activations. The lanes of a sum are added up at the
//             end, in one fixed tree.
//   unpack    The sums of a whole line, 32 columns of C, are four vectors for each row of activations.
//   gradient  A vector runs along half a panel of the right factor, and there are no products but those of the rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/simd.h"

namespace {

MOESAIC_INLINE F32x8 LoadEight(const float* p) {
  F32x8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
MOESAIC_INLINE void StoreEight(float* p, F32x8 v) { std::memcpy(p, &v, sizeof(v)); }

/// The first or the second numbers of eight pairs.
MOESAIC_INLINE F32x8 WidenPairs(const BFloat16* pairs, int half) {
  U32x8 bits;
  std::memcpy(&bits, pairs, sizeof(bits));
  return (F32x8)(half == 0 ? bits << 16 : bits & 0xffff0000u);
}

/// Whether a Product (few_rows.h) has such vectors.
template <class Product>
inline constexpr bool kIsShort = sizeof(typename Product::Vector) == sizeof(F32x8);

// ---- Direct ----

/// kWeights rows of weights, a superblock of a panel at most, times kTokens rows of activations: sums [row][sums_pitch], of
/// which [token][8] are added to. Not inlined, so that the loops have all registers for themselves.
/// @param ahead  lines that come next, as many as are read here; null: none
/// @param parts  rows of activations, [token][superblock of numbers]
template <class Product, int kWeights, int kTokens>
[[gnu::noinline]] void MultiplyHalfLines(const TileRun& run, const BFloat16* ahead, const float* parts, float* sums,
                                         std::int64_t sums_pitch) {
  constexpr std::int64_t kPitch = kSuperblock * kTileColumns;
  F32x8 sum[kWeights][kTokens];
#pragma GCC unroll 4
  for (int i = 0; i < kWeights; ++i) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) sum[i][t] = LoadEight(sums + i * sums_pitch + 8 * t);
  }
  const std::int64_t next = ahead == nullptr ? 0 : kTileColumns;
  const BFloat16* tile = run.data;
  if (ahead == nullptr) ahead = tile;
  for (std::int64_t k = 0; k < run.length; ++k, tile += run.stride, parts += kTileColumns) {
#pragma GCC unroll 4
    for (int i = 0; i < kWeights; ++i, ahead += next) __builtin_prefetch(ahead, 0, Product::kDirectFetchedTo);
#pragma GCC unroll 4
    for (int h = 0; h < 4; ++h) {
      F32x8 weights[kWeights];
#pragma GCC unroll 4
      for (int i = 0; i < kWeights; ++i) weights[i] = WidenPairs(tile + i * kTileColumns + h / 2 * 16, h % 2);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        F32x8 token = LoadEight(parts + t * kPitch + 8 * h);
#if defined(__AVX__)
        // Or GCC has each product load it again. (16 rows x 768 x 2,048 from caches, of the time of cells: 1.21, so 0.97.)
        asm("" : "+x"(token));
#endif
#pragma GCC unroll 4
        for (int i = 0; i < kWeights; ++i) sum[i][t] += weights[i] * token;
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kWeights; ++i) {
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) StoreEight(sums + i * sums_pitch + 8 * t, sum[i][t]);
  }
}

/// Of up to eight vectors the sum of each one's lanes: of neighbours, then of pairs of them, then of halves.
MOESAIC_INLINE F32x8 SumsOfVectors(const float* vectors, std::int64_t count) {
  F32x8 x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = i < count ? LoadEight(vectors + 8 * i) : F32x8{};
#pragma GCC unroll 2
  for (int n = 4; n > 1; n /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) {
      x[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 2, 8, 10, 4, 6, 12, 14) +
             __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 3, 9, 11, 5, 7, 13, 15);
    }
  }
  return __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/// A form of FewRowsPanels (few_rows.h): rows of activations one after the other, five or six at a time.
template <class Product>
struct RowByRow {
  using Part = float;
  static constexpr std::int64_t kMostRows = Product::kMostInParts, kLanes = 8;
  static constexpr std::int64_t kPartElements = kMostRows * kSuperblock * kTileColumns;

  static constexpr std::int64_t Vectors(std::int64_t rows) { return rows; }
  /// The sums of all of them, 64 KB at most, stay in cache.
  static constexpr std::int64_t MostPanels(std::int64_t rows) { return rows <= 16 ? 8 : rows <= 32 ? 4 : 2; }
  static_assert(kMostRows <= 64);
  static constexpr std::int64_t kMostSums = kPanelRows * kLanes * 128;  // rows * MostPanels(rows) is no more

  static void LayOut(const BFloat16* rows, std::int64_t count, std::int64_t tile, float* parts) {
    parts += tile * kTileColumns;
    for (std::int64_t t = 0; t < count; ++t, rows += kTileColumns, parts += kSuperblock * kTileColumns) {
#pragma GCC unroll 4
      for (int h = 0; h < 4; ++h) StoreEight(parts + 8 * h, WidenPairs(rows + h / 2 * 16, h % 2));
    }
  }

  static void Multiply(const TileRun& run, const BFloat16* ahead, const float* parts, std::int64_t rows, float* sums) {
    // Of six at a time some sums are on the stack, and three twice take longer still: 0.39 and 0.43 of the time of cells.
    const std::int64_t groups = rows <= 6 ? 1 : CeilDiv(rows, 5);
    for (std::int64_t g = 0, t = 0, end; g < groups; ++g, t = end, ahead = nullptr) {
      end = (g + 1) * rows / groups;
      const float* part = parts + t * kSuperblock * kTileColumns;
      float* sum = sums + 8 * t;
      switch (end - t) {
        case 6:
          Pass<2, 6>(run, ahead, part, sum, 8 * rows);
          break;
        case 5:
          Pass<2, 5>(run, ahead, part, sum, 8 * rows);
          break;
        case 4:
          Pass<2, 4>(run, ahead, part, sum, 8 * rows);
          break;
        case 3:
          Pass<2, 3>(run, ahead, part, sum, 8 * rows);
          break;
        case 2:
          Pass<2, 2>(run, ahead, part, sum, 8 * rows);
          break;
        default:
          Pass<4, 1>(run, ahead, part, sum, 8 * rows);
      }
    }
  }

  static void Finish(const float* sums, std::int64_t rows, bool accumulate, float* c) {
    for (std::int64_t t = 0; t < RoundUp(rows, kPanelRows); t += 8) {
      const F32x8 sum = SumsOfVectors(sums + 8 * t, rows - t);
      StoreEight(c + t, accumulate ? LoadEight(c + t) + sum : sum);
    }
  }

 private:
  template <int kWeights, int kTokens>
  static void Pass(const TileRun& run, const BFloat16* ahead, const float* parts, float* sums, std::int64_t sums_pitch) {
    for (int row = 0; row < kPanelRows; row += kWeights) {
      MultiplyHalfLines<Product, kWeights, kTokens>({run.data + row * kTileColumns, run.stride, run.length}, ahead, parts,
                                                    sums + row * sums_pitch, sums_pitch);
      if (ahead != nullptr) ahead += kWeights * run.length * kTileColumns;
    }
  }
};

// ---- Unpack ----

/// Sums of half a line's columns as they are in registers, the first ones of its pairs and the second ones. In C columns are in
/// order: 8 from the half's place on, and 8 behind the 16 of both halves.
MOESAIC_INLINE void LoadHalf(const float* c, F32x8 (&sum)[2]) {
  const F32x8 low = LoadEight(c), high = LoadEight(c + 16);
  sum[0] = __builtin_shufflevector(low, high, 0, 2, 8, 10, 4, 6, 12, 14);
  sum[1] = __builtin_shufflevector(low, high, 1, 3, 9, 11, 5, 7, 13, 15);
}
MOESAIC_INLINE void StoreHalf(const F32x8 (&sum)[2], float* c) {
  StoreEight(c, __builtin_shufflevector(sum[0], sum[1], 0, 8, 1, 9, 4, 12, 5, 13));
  StoreEight(c + 16, __builtin_shufflevector(sum[0], sum[1], 2, 10, 3, 11, 6, 14, 7, 15));
}
MOESAIC_INLINE void StoreHalfRounded(const F32x8 (&sum)[2], BFloat16* to) {
  alignas(64) float halves[24], both[16];
  StoreHalf(sum, halves);
  StoreEight(both, LoadEight(halves));
  StoreEight(both + 8, LoadEight(halves + 16));
  const U16x16 bits = NarrowToBf16(LoadF32(both));
  std::memcpy(to, &bits, 16);
  std::memcpy(to + 16, reinterpret_cast<const char*>(&bits) + 16, 16);
}

/// The same of whole lines.
template <int kRows>
MOESAIC_INLINE void LoadSums(const float* c, std::int64_t ldc, F32x8 (&sum)[kRows][2][2]) {
#pragma GCC unroll 2
  for (int t = 0; t < kRows; ++t) {
    LoadHalf(c + t * ldc, sum[t][0]);
    LoadHalf(c + t * ldc + 8, sum[t][1]);
  }
}
MOESAIC_INLINE void StoreLine(const F32x8 (&sum)[2][2], float* c) {
  StoreHalf(sum[0], c);
  StoreHalf(sum[1], c + 8);
}
template <int kRows>
MOESAIC_INLINE void StoreSums(const F32x8 (&sum)[kRows][2][2], float* c, std::int64_t ldc) {
#pragma GCC unroll 2
  for (int t = 0; t < kRows; ++t) StoreLine(sum[t], c + t * ldc);
}
MOESAIC_INLINE void StoreRounded(BFloat16* to, const F32x8 (&sum)[2][2]) {
  alignas(64) float line[kTileColumns];
  StoreLine(sum, line);
  StoreRounded(to, LoadF32(line), LoadF32(line + 16));
}

/// Adds the products of kRows rows, widened and kPitch floats apart, with one stored tile; beside(p) comes before each of its
/// eight pairs of rows.
template <std::int64_t kPitch, int kRows, class Beside>
MOESAIC_INLINE void MultiplyLines(const BFloat16* tile, const float* left, F32x8 (&sum)[kRows][2][2], Beside&& beside) {
#pragma GCC unroll 1
  for (int p = 0; p < 8; ++p) {
    beside(p);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, ++left, tile += kTileColumns) {
#pragma GCC unroll 4
      for (int h = 0; h < 4; ++h) {
        const F32x8 right = WidenPairs(tile + h / 2 * 16, h % 2);
#pragma GCC unroll 2
        for (int t = 0; t < kRows; ++t) sum[t][h / 2][h % 2] += left[t * kPitch] * right;
      }
    }
  }
}

// ---- Gradient ----

/// kRows rows of a panel of C, 16 columns of it.
/// @param left  [kRows][kTileColumns], widened
template <int kRows>
[[gnu::noinline]] void AddOuterProducts(const float* left, const BFloat16* right, std::int64_t pairs, float* c,
                                        std::int64_t ldc, bool accumulate) {
  F32x8 sum[kRows][2] = {};
  if (accumulate) {
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < 2; ++v) sum[i][v] = LoadEight(c + i * ldc + 8 * v);
    }
  }
  for (std::int64_t k = 0; k < pairs; ++k, left += 2, right += kTileColumns) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const F32x8 low = WidenPairs(right, half), high = WidenPairs(right + 16, half);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += left[i * kTileColumns + half] * low;
        sum[i][1] += left[i * kTileColumns + half] * high;
      }
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < 2; ++v) StoreEight(c + i * ldc + 8 * v, sum[i][v]);
  }
}

inline void ShortGradient(const GradientGemmArgs& args) {
  const std::int64_t pairs = CeilDiv(args.few_rows, 2), right_panels = args.segments[0].right.panels;
  for (std::int64_t p = 0; p < args.panels; ++p) {
    bool accumulate = args.accumulate;
    for (const GradientSegment& segment : args.segments) {
      alignas(64) float left[kPanelRows * kTileColumns];
      const BFloat16* const tile = segment.left.Tile(args.first_panel + p, 0);
      for (std::int64_t i = 0; i < kPanelRows * kTileColumns; i += kNativeLanes) Store(left + i, Load(tile + i));
      for (std::int64_t n = 0; n < right_panels; ++n) {
        const BFloat16* const right = segment.right.Tile(n, 0);
        float* const c = args.c + p * kPanelRows * args.ldc + n * kPanelRows;
        AddOuterProducts<6>(left, right, pairs, c, args.ldc, accumulate);
        AddOuterProducts<5>(left + 6 * kTileColumns, right, pairs, c + 6 * args.ldc, args.ldc, accumulate);
        AddOuterProducts<5>(left + 11 * kTileColumns, right, pairs, c + 11 * args.ldc, args.ldc, accumulate);
      }
      accumulate = true;
    }
  }
}

}  // namespace
