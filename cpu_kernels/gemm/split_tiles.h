// Rank-wide intermediates of low-rank products, and the sums of products that they are part of.
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <span>

#include "cpu_kernels/aligned_buffer.h"
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

  /// Memory for [rows][rank], rank along columns; none where rank is 0.
  static SplitTiles Take(Carver& carver, std::int64_t rows, std::int64_t rank);
};

/// Whether the factors of a low-rank product hold each rank twice, as k and 16 + k.
inline bool IsRankTwice(std::int64_t rank) { return rank <= kPanelRows; }

/// What a GEMM takes an intermediate as (TileMatrix says how each kind lies).
enum class TileKind {
  kOperand,  ///< left factor of the unpack and the gradient form
  kPairs,    ///< right factor of the direct form
  kStored,   ///< the same for few rows
  kRowPairs  ///< right factor of the gradient form
};

/// Lays [rows][columns] fp32 out as hi and lo tiles or, where `lo` has no memory, as both in one: then columns is at most 16.
/// Whatever else is in these tiles becomes zero. NaN and infinite values are all in hi.
/// @param values  [rows][ld], overwritten; ld is at least 32 where both lie in one
/// @param tiles   as many panels and columns as are to be filled; of row pairs panels are columns / 16, columns are rows / 32
/// Throws std::bad_alloc.
void PackSplit(const KernelTier& kernels, float* values, std::int64_t rows, std::int64_t columns, std::int64_t ld,
               TileKind kind, const SplitTiles& tiles);

/// out[j * ld_out + i] = in[i * ld_in + j], some rows or columns of rank-wide fp32.
void TransposeSmall(const float* in, std::int64_t ld_in, std::int64_t rows, std::int64_t columns, float* out,
                    std::int64_t ld_out);

/// The sum of products that one result is.
struct Segments {
  std::array<GemmSegment, 4> segment{};
  std::size_t count = 0;

  void Add(const TileMatrix& weights, const TileMatrix& activations) {
    assert(count < segment.size());
    segment[count++] = {weights, activations};
  }
  void Add(const TileMatrix& weights, const SplitTiles& activations) {
    Add(weights, activations.hi);
    if (activations.lo.data != nullptr) Add(weights, activations.lo);
  }
  operator std::span<const GemmSegment>() const { return {segment.data(), count}; }  // NOLINT: it is that span
};

}  // namespace moesaic
