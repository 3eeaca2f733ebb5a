// SoftmaxGrad and RowDots (fused_kernels.h has the contract).
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

/// Sixteen columns of a row.
struct ProbabilityAndGradient {
  F32x16 probability, gradient;
};

/// x where it is not above 0; NaN passes through.
MOESAIC_INLINE F32x16 AtMostZero(const F32x16& x) { return Smaller(F32x16{}, x); }

/// n <= 16 columns from c on, of the row with this x, d_probability and bias. The largest score came out of another product: it
/// may be smaller than this one by a rounding, which is no small number where scores are huge.
template <bool kBiased>
MOESAIC_INLINE ProbabilityAndGradient GradientOfScores(const SoftmaxGradArgs& args, const float* x, const float* d_probability,
                                                       float bias, std::int64_t c, std::int64_t n) {
  const F32x16 most = Load(args.most + c, n);
  F32x16 exponent;
  if constexpr (kBiased) {
    exponent = (MultiplyAdd(Load(x + c, n), Broadcast(args.scale), Broadcast(bias)) - most) * kLog2OfE;
  } else {
    exponent = Done(Load(x + c, n) * Broadcast(args.scale * kLog2OfE)) - most;
  }
  const F32x16 probability = RoughExp2(AtMostZero(exponent)) * Load(args.inverse_sums + c, n);
  return {probability, probability * (Load(d_probability + c, n) * Broadcast(args.scale) - Load(args.delta + c, n))};
}

/// The same where queries before column `first`, and those that begin behind this row, do not see the key, and there are
/// `columns` in all.
template <bool kBiased>
MOESAIC_INLINE ProbabilityAndGradient SeenGradientOfScores(const SoftmaxGradArgs& args, std::int64_t row, const float* x,
                                                           const float* d_probability, float bias, std::int64_t c,
                                                           std::int64_t first) {
  const std::int64_t left = args.columns - c, n = left < 16 ? left : 16, unseen = first > c ? first - c : 0;
  if (unseen >= n) return {F32x16{}, F32x16{}};
  const ProbabilityAndGradient value = GradientOfScores<kBiased>(args, x, d_probability, bias, c, n);
  I32x16 counts = ~LanesBelow(unseen) & LanesBelow(n);
  if (args.first_rows != nullptr) {
    counts = counts & (LoadVector<I32x16>(args.first_rows + c) < I32x16{} + static_cast<std::int32_t>(row + 1));
  }
  return {Select(counts, value.probability, F32x16{}), Select(counts, value.gradient, F32x16{})};
}

/// 32 columns of a row, as a line of both operands.
MOESAIC_INLINE void StoreOperands(const SoftmaxGradArgs& args, std::int64_t row, std::int64_t c,
                                  const ProbabilityAndGradient& low, const ProbabilityAndGradient& high) {
  const std::int64_t place = row % kPanelRows * kTileColumns;
  const U16x32 probability = NarrowBoth(low.probability, high.probability), gradient = NarrowBoth(low.gradient, high.gradient);
  StoreVector(args.probability.Tile(row / kPanelRows, c / kTileColumns) + place, probability);
  StoreVector(args.d_x.Tile(row / kPanelRows, c / kTileColumns) + place, gradient);
}

/// Sixteen columns of two rows, as a line of row pairs.
MOESAIC_INLINE void StorePairs(const SoftmaxGradArgs& args, std::int64_t r, std::int64_t c, F32x16 even, F32x16 odd) {
  BFloat16* const tile = args.d_x_pairs.Tile(c / kPanelRows, r / kTileColumns);
  StoreVector(tile + r % kTileColumns / 2 * kTileColumns, NarrowPairs(even, odd));
}

/// Two rows of keys and 32 columns at a time.
template <bool kBiased>
inline void SoftmaxGradOf(const SoftmaxGradArgs& args) {
  const std::int64_t rows_of_panels = RoundUp(args.rows, kPanelRows);
  for (std::int64_t r = 0; r < RoundUp(args.rows, kTileColumns); r += 2) {
    const bool both = r + 1 < args.rows, none = r >= args.rows;
    const std::int64_t first[2] = {none ? args.columns : args.diagonal + r, both ? args.diagonal + r + 1 : args.columns};
    const float *const x = args.x + r * args.ld, *const d_probability = args.d_probability + r * args.ld;
    const float bias[2] = {kBiased && !none ? args.bias[r] : 0.0f, kBiased && both ? args.bias[r + 1] : 0.0f};
    for (std::int64_t c = 0; c < args.columns; c += kTileColumns) {
      ProbabilityAndGradient even[2], odd[2];  // rows
      if (args.first_rows == nullptr && first[1] <= c && c + kTileColumns <= args.columns) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const std::int64_t at = c + 16 * half;
          even[half] = GradientOfScores<kBiased>(args, x, d_probability, bias[0], at, 16);
          odd[half] = GradientOfScores<kBiased>(args, x + args.ld, d_probability + args.ld, bias[1], at, 16);
        }
      } else {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const std::int64_t at = c + 16 * half;
          even[half] = SeenGradientOfScores<kBiased>(args, r, x, d_probability, bias[0], at, first[0]);
          odd[half] = SeenGradientOfScores<kBiased>(args, r + 1, x + args.ld, d_probability + args.ld, bias[1], at, first[1]);
        }
      }
      if (r < rows_of_panels) {
        StoreOperands(args, r, c, even[0], even[1]);
        StoreOperands(args, r + 1, c, odd[0], odd[1]);
      }
      StorePairs(args, r, c, even[0].gradient, odd[0].gradient);
      StorePairs(args, r, c + kPanelRows, even[1].gradient, odd[1].gradient);
    }
  }
}

inline void SoftmaxGrad(const SoftmaxGradArgs& args) {
  if (args.bias == nullptr) {
    SoftmaxGradOf<false>(args);
  } else {
    SoftmaxGradOf<true>(args);
  }
}

inline void RowDots(const RowDotsArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const BFloat16 *a = args.a + r * args.a_stride, *b = args.b + r * args.b_stride;
    F32x16 sum{};
    for (std::int64_t c = 0; c < args.columns; c += 16) {
      const std::int64_t n = args.columns - c < 16 ? args.columns - c : 16;
      sum = sum + Load(a + c, n) * Load(b + c, n);
    }
    args.out[r] = args.scale * SumOfLanes(sum);
  }
}

}  // namespace
