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
//   using Vector = F32x16;  // or F32x8: of all this short_vectors.h has its own then, without functions or kTwelveInFours
//   using Left = BFloat16;  // as register_direct.h and register_unpack.h take rows of activations; or float, and then
//   static F32x16 Widened(U32x16 pairs, int half);  // the first or the second numbers of pairs
//
// and what a host does fastest with weights from memory:
//
//   static constexpr std::int64_t kMostInParts;  // rows that the direct form takes in parts of lines, at most
//   static constexpr std::int64_t kMostStored;   // rows that it transposes weights for (register_direct.h), at most
//   static constexpr bool kTwelveInFours;     // whether 10 to 12 rows are three vectors of 4, not one of 8 and a rest
//   static constexpr int kLinesFetchedAhead;  // of so many lines one is prefetched, up to kRowsFetchedAhead rows
//   static constexpr int kDirectFetchedTo;    // as __builtin_prefetch has it: 2 L2, 3 L1
//   static constexpr int kUnpackFetchedTo;    // the same of the unpack form
//   static constexpr int kRowsInOrder;        // rows, at most, with which the unpack form meets tiles in the order of memory
//   static constexpr int kRowsInSuperblock;   // rows, at most, with which it takes one superblock at a time and not two
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/direct_gemm.h"
#include "cpu_kernels/gemm/short_vectors.h"
#include "cpu_kernels/simd.h"

namespace {

/// Rows with which a Product's kLinesFetchedAhead counts. Their products take much less time than the weights' way from memory.
inline constexpr int kRowsFetchedAhead = 2;

/// One panel, of the gradient form.
inline constexpr int kMostGradientRows = 16;

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
  static_assert(kTokens == 1 || kTokens == 2 || kTokens == 4 || kTokens == 8);
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
  }
#else
  if constexpr (kTokens > 1) {
    constexpr int kBytes = 64 / kTokens;
    char parts[64];
    for (int i = 0; i < kTokens; ++i) std::memcpy(parts + i * kBytes, line, kBytes);
    return LoadVector<U32x16>(parts);
  }
#endif
  return LoadVector<U32x16>(line);
}

/// Adds the products of kWeights rows of a run of stored tiles with kVectors vectors of activations to their sums.
/// @param ahead  lines that come next, kLines beside each part of a tile
/// @param parts  [tile][pitch] elements, of which [vector][part] lines are read
/// @param sums   [row][pitch], of which [vector][16] are added to
template <class Product, int kTokens, int kVectors, int kWeights, int kLines>
MOESAIC_INLINE void MultiplyParts(const TileRun& run, const BFloat16* ahead, const BFloat16* parts, std::int64_t parts_pitch,
                                  float* sums, std::int64_t sums_pitch) {
  constexpr int kEvery = kTokens <= kRowsFetchedAhead ? Product::kLinesFetchedAhead : 1;
  F32x16 sum[kWeights][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) sum[i][j] = LoadF32(sums + i * sums_pitch + 16 * j);
  }
  const BFloat16* tile = run.data;
  // Else GCC has sums on the stack around the loop. (Zen 4, 12 and 24 rows 5 and 4% faster; of two vectors 16 and 32 1 and 4%
  // slower.)
  if (kVectors == 3 && run.length <= 0) __builtin_unreachable();
  for (std::int64_t k = run.length; k > 0; --k, tile += run.stride, parts += parts_pitch) {
#pragma GCC unroll 1
    for (int q = 0; q < kTokens; ++q) {
#pragma GCC unroll 16
      for (int i = 0; i < kLines; i += kEvery) __builtin_prefetch(ahead + i * kTileColumns, 0, Product::kDirectFetchedTo);
      ahead += kLines * kTileColumns;
      U32x16 right[kVectors];
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) right[j] = LoadVector<U32x16>(parts + (j * kTokens + q) * kTileColumns);
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
    for (int j = 0; j < kVectors; ++j) StoreF32(sums + i * sums_pitch + 16 * j, sum[i][j]);
  }
}

/// The sums of the parts of up to 16 tokens, in kCount vectors, side by side: neighbours are added to each other, then pairs of
/// them, and so on.
template <int kTokens, int kCount>
MOESAIC_INLINE F32x16 SumOfParts(const float* sums) {
  F32x16 x[kCount + 1] = {};
  for (int i = 0; i < kCount; ++i) x[i] = LoadF32(sums + 16 * i);
  int count = kCount;
#pragma GCC unroll 4
  for (int parts = 16 / kTokens; parts > 1; parts /= 2) {
#pragma GCC unroll 4
    for (int i = 0; 2 * i < count; ++i) {
      const F32x16 a = x[2 * i], b = 2 * i + 1 < count ? x[2 * i + 1] : F32x16{};
      x[i] = SumsOfNeighbours(a, b);
    }
    count = (count + 1) / 2;
  }
  return x[0];
}

/// A row of C: the sums of its parts, and zeros beyond `rows`.
template <class Form>
void FinishParts(const float* sums, std::int64_t rows, bool accumulate, float* c) {
  const std::int64_t vectors = Form::Vectors(rows), of_panel = Form::Vectors(kPanelRows);
  for (std::int64_t t = 0, v = 0; t < rows; t += kPanelRows, v += of_panel) {
    const F32x16 sum = Form::Sum(sums + v * 16, vectors - v);
    const F32x16 value = (F32x16)((I32x16)sum & LanesBelow(rows - t));
    StoreF32(c + t, accumulate ? LoadF32(c + t) + value : value);
  }
}

/// What FewRowsPanels keeps of up to kMost rows, kTokens of them in a vector.
template <int kTokens, int kMost>
struct PartsOfRows {
  using Part = BFloat16;
  static constexpr std::int64_t kLanes = 16, kPartElements = kSuperblock * RoundUp(kMost, kTokens) * kTileColumns;
  static constexpr std::int64_t kMostSums = kSuperblock * kPanelRows * kLanes * CeilDiv(kMost, kTokens);

  static constexpr std::int64_t MostPanels(std::int64_t) { return kSuperblock; }
};

/// Up to kTokens rows, in one vector: 16 rows of weights at a time.
template <class Product, int kTokens>
struct OneVector : PartsOfRows<kTokens, kTokens> {
  static constexpr std::int64_t Vectors(std::int64_t) { return 1; }
  static void LayOut(const BFloat16* rows, std::int64_t, std::int64_t tile, BFloat16* parts) {
    PartsSideBySide<kTokens>(rows, parts + tile * kTokens * kTileColumns);
  }
  static void Finish(const float* sums, std::int64_t rows, bool accumulate, float* c) {
    FinishParts<OneVector>(sums, rows, accumulate, c);
  }
  static void Multiply(const TileRun& run, const BFloat16* ahead, const BFloat16* parts, std::int64_t, float* sums) {
    MultiplyParts<Product, kTokens, 1, kPanelRows, kPanelRows / kTokens>(run, ahead, parts, kTokens * kTileColumns, sums, 16);
  }
  static F32x16 Sum(const float* sums, std::int64_t) { return SumOfParts<kTokens, 1>(sums); }
};

/// More of them, kTokens in a vector: up to three vectors and 8 rows of weights at a time. A rest of up to kRest rows (0: there
/// is none) has a vector of its own, which meets tiles once more, in L1. (GFLOP/s of a Zen 5 core with weights from memory, 24,
/// 32 and 64 rows, 4 in a vector: 350, 370, 370; 8: 400, 430, 420; 16, as a cell has them: 310, 420, 425. Of two Zen 4 cores,
/// 9, 17, 26 rows with a vector of 8 for the rest: 267, 284, 344; with one of its own 364, 395, 397.)
template <class Product, int kTokens, int kMost, int kRest>
struct SomeVectors : PartsOfRows<kTokens, kMost> {
  // Without a rest, of a last block's vectors there is one less than of a whole one, or none.
  static_assert(kTokens == 8 || (kMost == 12 && kRest == 0));

  static constexpr std::int64_t Vectors(std::int64_t rows) { return CeilDiv(rows, kTokens); }
  static void LayOut(const BFloat16* rows, std::int64_t vectors, std::int64_t tile, BFloat16* parts) {
    const std::int64_t whole = Whole(vectors);
    parts += tile * vectors * kVector;
    for (std::int64_t v = 0; v < whole; ++v) PartsSideBySide<kTokens>(rows + v * kVector, parts + v * kVector);
    if constexpr (kRest > 0) PartsSideBySide<kRest>(rows + whole * kVector, parts + whole * kVector);
  }
  static void Finish(const float* sums, std::int64_t rows, bool accumulate, float* c) {
    FinishParts<SomeVectors>(sums, rows, accumulate, c);
  }
  static void Multiply(const TileRun& run, const BFloat16* ahead, const BFloat16* parts, std::int64_t vectors, float* sums) {
    const std::int64_t whole = Whole(vectors), pitch = vectors * kVector, sums_pitch = 16 * vectors;
    if (whole == 1) {
      MultiplyParts<Product, kTokens, 1, kPanelRows, kPanelRows / kTokens>(run, ahead, parts, pitch, sums, sums_pitch);
    } else {
      MultiplyHalves(run, ahead, parts, whole, pitch, sums, sums_pitch);
    }
    if constexpr (kRest > 0) {
      MultiplyParts<Product, kRest, 1, kPanelRows, 0>(run, ahead, parts + whole * kVector, pitch, sums + 16 * whole,
                                                      sums_pitch);
    }
  }
  /// Of the first 16 tokens or, in fewer vectors, of all.
  static F32x16 Sum(const float* sums, std::int64_t vectors) {
    constexpr int kCount = 16 / kTokens;
    if constexpr (kRest > 0) {
      if (vectors == 1) return SumOfParts<kRest, 1>(sums);
      if (vectors == 2) {
        return FirstEights(SumOfParts<8, 1>(sums), SumOfParts<kRest, 1>(sums + 16));
      }
    }
    if (vectors >= kCount) return SumOfParts<kTokens, kCount>(sums);
    return SumOfParts<kTokens, kCount - 1>(sums);
  }

 private:
  static constexpr std::int64_t kVector = kTokens * kTileColumns;

  static std::int64_t Whole(std::int64_t vectors) { return kRest > 0 ? vectors - 1 : vectors; }
  static void MultiplyHalves(const TileRun& run, const BFloat16* ahead, const BFloat16* parts, std::int64_t vectors,
                             std::int64_t pitch, float* sums, std::int64_t sums_pitch) {
    constexpr int kHalf = kPanelRows / 2, kLines = kHalf / kTokens;
    const std::int64_t groups = CeilDiv(vectors, 3);
    const BFloat16* const first_ahead = ahead;
    for (int row = 0; row < kPanelRows; row += kHalf) {
      const TileRun half{run.data + row * kTileColumns, run.stride, run.length};
      for (std::int64_t g = 0, v = 0, to; g < groups; ++g, v = to) {
        to = (g + 1) * vectors / groups;
        float* sum = sums + row * sums_pitch + 16 * v;
        if (to - v == 3) {
          MultiplyParts<Product, kTokens, 3, kHalf, kLines>(half, ahead, parts + v * kVector, pitch, sum, sums_pitch);
        } else {
          MultiplyParts<Product, kTokens, 2, kHalf, kLines>(half, ahead, parts + v * kVector, pitch, sum, sums_pitch);
        }
        // All is prefetched by two passes.
        ahead = ahead == first_ahead ? ahead + run.length * kHalf * kTileColumns : first_ahead;
      }
    }
  }
};

/// Up to Form::MostPanels at a time, of a superblock at most, so that the activations are laid out once for all, and superblock
/// after superblock along the contraction, so that weights come from memory in runs of up to 64 KB.
template <class Form>
void FewRowsPanels(const DirectGemmArgs& args, std::int64_t first, int panels, OthersAhead& others) {
  alignas(64) typename Form::Part parts[Form::kPartElements];
  alignas(64) float sums[Form::kMostSums];
  const std::int64_t rows = args.row_count, vectors = Form::Vectors(rows), of_panel = kPanelRows * Form::kLanes * vectors;
  const std::int64_t first_panel = args.first_panel + first;
  std::memset(sums, 0, static_cast<std::size_t>(panels * of_panel) * sizeof(float));
  for (const GemmSegment& segment : args.segments) {
    const TileMatrix& weights = segment.weights;
    for (std::int64_t begin = 0, end; begin < weights.columns; begin = end) {
      end = begin + Least(kSuperblock, weights.columns - begin);
      for (std::int64_t k = begin; k < end; ++k) {
        Form::LayOut(segment.activations.Tile(0, k), vectors, k - begin, parts);
      }
      for (int p = 0; p < panels; ++p) {
        const TileRun run = WeightRun(weights, first_panel + p, begin, end, args.scratch);
        const TileMatrix* then = &weights;
        std::int64_t panel = first_panel + p + 1, column = begin;
        if (p + 1 == panels && end < weights.columns) {
          panel = first_panel;
          column = end;
        } else if (p + 1 == panels) {
          // A segment ends: what comes after the adapter's, which is not worth it.
          const bool last = first + panels == args.panels;
          then = last ? &args.prefetch.weights : &args.segments[0].weights;
          panel = last ? args.prefetch.first_panel : first_panel + panels;
          column = last ? args.prefetch.first_column : 0;
        }
        Form::Multiply(run, then->data != nullptr ? then->Tile(panel, column) : run.data, parts, vectors, sums + p * of_panel);
        const LinesAhead& lines = others.Next();
        for (const BFloat16* line : lines.begin) {
          for (std::int64_t i = 0; i < lines.lines; ++i) __builtin_prefetch(line + i * kTileColumns, 0, 2);
        }
      }
    }
  }
  for (std::int64_t i = 0; i < panels * kPanelRows; ++i) {
    Form::Finish(sums + i * vectors * Form::kLanes, rows, args.accumulate, args.c + (first * kPanelRows + i) * args.ldc);
  }
}

template <class Form>
void FewRowsDirectAs(const DirectGemmArgs& args) {
  std::int64_t runs = 0;
  for (const GemmSegment& segment : args.segments) runs += CeilDiv(segment.weights.columns, kSuperblock) * args.panels;
  OthersAhead others(args.prefetch, runs);
  const std::int64_t most = Form::MostPanels(args.row_count);
  for (std::int64_t p = 0; p < args.panels; p += most) {
    FewRowsPanels<Form>(args, p, Least(most, args.panels - p), others);
  }
}

template <class Product>
void FewRowsDirect(const DirectGemmArgs& args) {
  if (args.row_count == 1) return FewRowsDirectAs<OneVector<Product, 1>>(args);
  if (args.row_count == 2) return FewRowsDirectAs<OneVector<Product, 2>>(args);
  if (args.row_count <= 4) return FewRowsDirectAs<OneVector<Product, 4>>(args);
  if (args.row_count <= 8) return FewRowsDirectAs<OneVector<Product, 8>>(args);
  if constexpr (Product::kTwelveInFours) {
    if (args.row_count >= 10 && args.row_count <= 12) return FewRowsDirectAs<SomeVectors<Product, 4, 12, 0>>(args);
  }
  constexpr int kMost = (Product::kMostInParts + 7) / 8 * 8;  // whole vectors of eight
  const std::int64_t rest = args.row_count % 8;
  if (rest == 1) return FewRowsDirectAs<SomeVectors<Product, 8, kMost, 1>>(args);
  if (rest == 2) return FewRowsDirectAs<SomeVectors<Product, 8, kMost, 2>>(args);
  if (rest == 3 || rest == 4) return FewRowsDirectAs<SomeVectors<Product, 8, kMost, 4>>(args);
  FewRowsDirectAs<SomeVectors<Product, 8, kMost, 0>>(args);
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
          const U32x16 row = LoadVector<U32x16>(right + k * kTileColumns);
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
