// The direct form (kernels.h, DirectGemmArgs) of stored activations on tiers whose product takes its factors from registers:
// two panels of the weights are transposed for a superblock of the contraction, into L1, and meet all rows of activations from
// there, up to 12 rows at a time. Work grows with the rows that count, and the order of summation is a cell's. Where there is
// no bf16 product these rows are widened before, and the weights beside the products.
//
// (Two Zen 5 cores, weights from memory, 2,048 x 1,536, GFLOP/s beside parts of lines (few_rows.h) and cells: 42 rows 882 and
// 784, 66 rows 912 and 747, 250 rows 976 and 930; of a few whole panels cells are faster, 96 rows 943 and 962. Transposed by
// masked loads, which take half of the shuffles, 5% slower with 64 rows, and beside the products before 4%. All panels of a
// slice before the next slice, sums waiting in C, on two Zen 4 cores: 1 to 5% slower with 61 and 250 rows.)
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "cpu_kernels/gemm/direct_gemm.h"
#include "cpu_kernels/gemm/register_unpack.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

/// A slice of two panels, transposed, and the activations that meet it.
struct TransposedSlice {
  static constexpr std::int64_t kTiles = kSuperblock;
  /// Of segments shorter than a slice, then one as long, then a rest of less than half (DirectSlices).
  static constexpr std::int64_t kMostTiles = 2 * kTiles + kTiles / 2;
  static constexpr std::int64_t kLine = 2 * kPanelRows;  ///< dwords: a pair of columns of both panels

  alignas(64) float lines[kMostTiles * kPanelRows * kLine];  ///< [tile][pair][panel][16]
  const BFloat16* left[kMostTiles];                          ///< the first row of each tile
  int tiles = 0;

  void Transpose(const DirectGemmArgs& args, std::span<const SlicePart> parts, std::int64_t panel, int panels) {
    tiles = 0;
    for (const SlicePart& part : parts) {
      for (std::int64_t k = part.begin; k < part.end; ++k, ++tiles) {
        left[tiles] = args.segments[part.segment].activations.Tile(0, k);
        float* to = lines + tiles * kPanelRows * kLine;
        for (int p = 0; p < panels; ++p) {
          TransposeTile(WeightTile(args.segments[part.segment].weights, panel + p, k, args.scratch), to + p * kPanelRows);
        }
      }
    }
  }

 private:
  static void TransposeTile(const BFloat16* tile, float* to) {
    Transpose16x16(reinterpret_cast<const float*>(tile), kPanelRows, to, kLine);
  }
};

/// Lines that lie one after the other, brought to the caches one beside each pair of columns: more at a time get lost, and the
/// hardware fetches further ahead what it sees in order. (Two Zen 4 cores, 34, 66, 250 rows, GFLOP/s: 390, 415, 431; some lines
/// of each tile beside a tile before 306, 371, 418, the same one beside each pair 356, 388, 431.)
struct RunAhead {
  const BFloat16 *begin, *end;
};

/// Adds the products of kRows rows, from `row` on, with the kPanels of a slice to their sums, [row][32]. Not inlined, so that
/// the loops have all registers for themselves.
template <class Product, int kPanels, int kRows>
[[gnu::noinline]] void MultiplyTransposed(const TransposedSlice& slice, RunAhead ahead, std::int64_t row, float* sums,
                                          bool accumulate) {
  constexpr bool kWidens = std::is_same_v<typename Product::Left, float>;
  constexpr std::int64_t kPitch = TransposedSlice::kMostTiles * kTileColumns;
  [[maybe_unused]] alignas(64) float widened[kWidens ? kRows * kPitch : 1];
  if constexpr (kWidens) {
    for (int n = 0; n < slice.tiles; ++n) {
      WidenRows<kTileColumns>(slice.left[n] + row * kTileColumns, kRows, widened + n * kTileColumns, kPitch);
    }
  }
  sums += row * TransposedSlice::kLine;
  F32x16 sum[kRows][kPanels] = {};
  if (accumulate) LoadSums(sums, TransposedSlice::kLine, sum);
  const float* line = slice.lines;
  const std::int64_t beside = CeilDiv((ahead.end - ahead.begin) / kTileColumns, slice.tiles);
  for (int n = 0; n < slice.tiles; ++n) {
    const BFloat16* left = slice.left[n] + row * kTileColumns;
#pragma GCC unroll 1
    for (int p = 0; p < kPanelRows; ++p, line += TransposedSlice::kLine, left += 2) {
      if (p < beside) {
        __builtin_prefetch(ahead.begin);
        ahead.begin += kTileColumns;
      }
      U32x16 right[kPanels];
      std::memcpy(right, line, sizeof(right));
      if constexpr (kWidens) {
        MultiplyPairs<Product, kPitch>(widened + n * kTileColumns + 2 * p, right, sum);
      } else {
#pragma GCC unroll 12
        for (int t = 0; t < kRows; ++t) {
          std::uint32_t pair;
          std::memcpy(&pair, left + t * kTileColumns, sizeof(pair));
          const U32x16 pairs = U32x16{} + pair;
#pragma GCC unroll 2
          for (int v = 0; v < kPanels; ++v) sum[t][v] = Product::Add(sum[t][v], pairs, right[v]);
        }
      }
    }
  }
  StoreSums(sum, sums, TransposedSlice::kLine);
}

/// At most kRows rows.
template <class Product, int kPanels, int kRows = kRowsInRegisters<Product>>
void MultiplyTransposed(std::int64_t rows, const TransposedSlice& slice, RunAhead ahead, std::int64_t row, float* sums,
                        bool accumulate) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return MultiplyTransposed<Product, kPanels, kRows - 1>(rows, slice, ahead, row, sums, accumulate);
  }
  MultiplyTransposed<Product, kPanels, kRows>(slice, ahead, row, sums, accumulate);
}

/// Sums [row][32] of two panels to or from C, [32][ldc]: 16 x 16 at a time.
class SumsOfPair {
 public:
  SumsOfPair(const DirectGemmArgs& args, std::int64_t panel) : args_(args), panel_(panel) {}

  void Load(float* sums) const {
    Each([&](float* c, float* block) { Transpose16x16(c, args_.ldc, block, TransposedSlice::kLine); }, sums);
  }
  void Store(float* sums) const {
    Each([&](float* c, float* block) { Transpose16x16(block, TransposedSlice::kLine, c, args_.ldc); }, sums);
  }

 private:
  template <class Move>
  void Each(Move move, float* sums) const {
    for (std::int64_t p = 0; p < 2 && panel_ + p < args_.panels; ++p) {
      for (std::int64_t t = 0; t < args_.row_count; t += kPanelRows) {
        move(args_.c + (panel_ + p) * kPanelRows * args_.ldc + t, sums + t * TransposedSlice::kLine + p * kPanelRows);
      }
    }
  }
  const DirectGemmArgs& args_;
  const std::int64_t panel_;
};

/// What is transposed after a slice of two panels: the next slice, the next two panels, or what the next call begins with. (Not
/// adapters, which are repeated, nor compressed weights. Two panels lie in one superblock, as all callers cut them.)
inline RunAhead NextTransposed(const DirectGemmArgs& args, std::span<const SlicePart> next, std::int64_t panel) {
  const TileMatrix* weights = &args.prefetch.weights;
  std::int64_t first = args.prefetch.first_panel, column = args.prefetch.first_column;
  if (!next.empty()) {
    weights = &args.segments[next[0].segment].weights;
    first = args.first_panel + panel;
    column = next[0].begin;
  } else if (panel + 2 < args.panels) {
    weights = &args.segments[0].weights;
    first = args.first_panel + panel + 2;
    column = 0;
  }
  if (weights->data == nullptr || weights->repeats) return {};
  const BFloat16* const tile = weights->Tile(first, column);
  return {tile, tile + Least(2, weights->panels - first) * Least(kSuperblock, weights->columns - column) * kTileElements};
}

/// The tiles of adapters of a few ranks, which end a contraction: they come from where another thread packed them.
inline void PrefetchRests(const DirectGemmArgs& args, std::int64_t panel, int panels) {
  for (const GemmSegment& segment : args.segments.subspan(1)) {
    const TileMatrix& weights = segment.weights;
    if (weights.data == nullptr || weights.columns > 2) continue;
    for (int p = 0; p < panels; ++p) {
      for (std::int64_t k = 0; k < weights.columns; ++k) PrefetchTile(weights.Tile(args.first_panel + panel + p, k));
    }
  }
}

template <class Product>
void DirectInRegisters(const DirectGemmArgs& args) {
  static_assert(Product::kMostStored <= kMostStoredRows);
  TransposedSlice transposed;
  alignas(64) float sums[RoundUp(kMostStoredRows, kPanelRows) * TransposedSlice::kLine];
  const std::int64_t rows = args.row_count, groups = CeilDiv(rows, kRowsInRegisters<Product>);
  std::int64_t slices = 0;
  for (DirectSlices all(args.segments, TransposedSlice::kTiles); !all.done(); all.Next()) ++slices;
  OthersAhead others(args.prefetch, slices * CeilDiv(args.panels, 2));
  std::memset(sums + rows * TransposedSlice::kLine, 0,
              (RoundUp(rows, kPanelRows) - rows) * TransposedSlice::kLine * sizeof(float));
  for (std::int64_t panel = 0; panel < args.panels; panel += 2) {
    const int panels = Least(2, args.panels - panel);
    const SumsOfPair sums_of_pair(args, panel);
    if (args.accumulate) sums_of_pair.Load(sums);
    PrefetchRests(args, panel, panels);
    bool accumulate = args.accumulate;
    for (DirectSlices slice(args.segments, TransposedSlice::kTiles), next = slice; !slice.done();
         slice = next, accumulate = true) {
      next.Next();
      transposed.Transpose(args, slice.parts(), args.first_panel + panel, panels);
      const RunAhead all = NextTransposed(args, next.parts(), panel);
      const std::int64_t lines = (all.end - all.begin) / kTileColumns;
      for (std::int64_t g = 0, row = 0, end; g < groups; ++g, row = end) {
        end = (g + 1) * rows / groups;
        const RunAhead ahead{all.begin + g * lines / groups * kTileColumns,
                             all.begin + (g + 1) * lines / groups * kTileColumns};
        // A rank's single panel: half of the work.
        panels == 2 ? MultiplyTransposed<Product, 2>(end - row, transposed, ahead, row, sums, accumulate)
                    : MultiplyTransposed<Product, 1>(end - row, transposed, ahead, row, sums, accumulate);
      }
      const LinesAhead& more = others.Next();
      for (const BFloat16* first : more.begin) {
        for (std::int64_t i = 0; i < more.lines; ++i) __builtin_prefetch(first + i * kTileColumns, 0, 2);
      }
    }
    sums_of_pair.Store(sums);
  }
}

}  // namespace
