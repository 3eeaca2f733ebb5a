// Rank-wide intermediates of low-rank products, and the sums of products that they are part of.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/kernels.h"

namespace moesaic {

/// A rank-wide intermediate in two bf16 parts, hi + lo: together they carry 16 bits of each value. One number of it stands in
/// for a whole row of the result, so that its rounding error does not average out as those of wide operands do; with a small
/// rank and strong adapters a single part was measured to put 2.5e-3 of relative error on its own into the outputs. The second
/// part is one more step of the contraction or, where the factors hold each rank twice (IsRankTwice), the other half of the
/// same step: `hi` then has both, and `lo` is empty.
struct SplitTiles {
  TileMatrix hi;
  TileMatrix lo;
};

/// Whether the factors of a low-rank product hold each rank twice, as k and 16 + k.
MOESAIC_INLINE bool IsRankTwice(std::int64_t rank) { return rank <= kPanelRows; }

/// What a GEMM takes an intermediate as.
enum class TileKind { kOperand, kPairs, kStored, kRowPairs };

/// Lays [rows][columns] fp32 out as hi and lo tiles, or as both in one. `values` [rows][ld] is overwritten; ld is at least a
/// tile's columns for the latter.
void PackSplit(const KernelTier& kernels, float* values, std::int64_t rows, std::int64_t columns, std::int64_t ld,
               TileKind kind, const SplitTiles& tiles);

/// out[j * ld_out + i] = in[i * ld_in + j], some rows or columns of rank-wide fp32.
void TransposeSmall(const float* in, std::int64_t ld_in, std::int64_t rows, std::int64_t columns, float* out,
                    std::int64_t ld_out);

/// The sum of products that one result is.
struct Segments {
  std::array<GemmSegment, 4> segment{};
  std::size_t count = 0;

  void Add(const TileMatrix& weights, const TileMatrix& activations) { segment[count++] = {weights, activations}; }
  void Add(const TileMatrix& weights, const SplitTiles& activations) {
    Add(weights, activations.hi);
    if (activations.lo.data != nullptr) Add(weights, activations.lo);
  }
  operator std::span<const GemmSegment>() const { return {segment.data(), count}; }  // NOLINT: it is that span
};

}  // namespace moesaic
