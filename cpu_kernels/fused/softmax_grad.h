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
MOESAIC_INLINE F32x16 AtMostZero(F32x16 x) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_min_ps(_mm512_setzero_ps(), (__m512)x);  // the second operand where one is NaN
#else
  return Select(x > F32x16{}, F32x16{}, x);
#endif
}

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
    exponent = Done(Load(x + c, n) * (args.scale * kLog2OfE)) - most;
  }
  const F32x16 probability = RoughExp2(AtMostZero(exponent)) * Load(args.inverse_sums + c, n);
  return {probability, probability * (Load(d_probability + c, n) * args.scale - Load(args.delta + c, n))};
}

/// Two rows of keys and 32 columns at a time: a line of each operand, and two of row pairs.
template <bool kBiased>
inline void SoftmaxGradOf(const SoftmaxGradArgs& args) {
  constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::int64_t rows_of_panels = RoundUp(args.rows, kPanelRows);
  for (std::int64_t r = 0; r < RoundUp(args.rows, kTileColumns); r += 2) {
    for (std::int64_t c = 0; c < args.columns; c += kTileColumns) {
      ProbabilityAndGradient values[2][2] = {};
      for (int i = 0; i < 2; ++i) {
        const std::int64_t row = r + i, unseen = args.diagonal + row - c, counted = args.columns - c;
        if (row >= args.rows || unseen >= kTileColumns) continue;
        const float *const x = args.x + row * args.ld, *const d_probability = args.d_probability + row * args.ld;
        const float bias = kBiased ? args.bias[row] : 0.0f;
        if (unseen <= 0 && counted >= kTileColumns) {
          for (int half = 0; half < 2; ++half) {
            values[i][half] = GradientOfScores<kBiased>(args, x, d_probability, bias, c + 16 * half, 16);
          }
          continue;
        }
        for (int half = 0; half < 2 && counted > 16 * half; ++half) {
          const std::int64_t left = counted - 16 * half, n = left < 16 ? left : 16;
          const std::int64_t first = unseen > 16 * half ? unseen - 16 * half : 0;
          const auto counts = (kLanes >= static_cast<std::int32_t>(first)) & (kLanes < static_cast<std::int32_t>(n));
          const ProbabilityAndGradient value = GradientOfScores<kBiased>(args, x, d_probability, bias, c + 16 * half, n);
          values[i][half] = {Select(counts, value.probability, F32x16{}), Select(counts, value.gradient, F32x16{})};
        }
      }
      for (int i = 0; i < 2 && r + i < rows_of_panels; ++i) {
        const std::int64_t row = r + i, place = row % kPanelRows * kTileColumns;
        const U16x32 probability = NarrowBoth(values[i][0].probability, values[i][1].probability);
        const U16x32 gradient = NarrowBoth(values[i][0].gradient, values[i][1].gradient);
        std::memcpy(args.probability.Tile(row / kPanelRows, c / kTileColumns) + place, &probability, sizeof(probability));
        std::memcpy(args.d_x.Tile(row / kPanelRows, c / kTileColumns) + place, &gradient, sizeof(gradient));
      }
      for (int half = 0; half < 2; ++half) {
        const U16x32 pairs = NarrowEvenOdd({values[0][half].gradient, values[1][half].gradient});
        BFloat16* const tile = args.d_x_pairs.Tile(c / kPanelRows + half, r / kTileColumns);
        std::memcpy(tile + r % kTileColumns / 2 * kTileColumns, &pairs, sizeof(pairs));
      }
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
    args.out[r] = args.scale * SumOf(sum);
  }
}

}  // namespace
