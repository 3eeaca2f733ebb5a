// SoftmaxGrad and RowDots (fused_kernels.h has the contract).
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

/// 16 columns of a row of the gradient: p and its score's gradient.
struct PowerAndGradient {
  F32x16 power, gradient;
};

/// Scores are rounded as SoftmaxRows rounds them, so that none is larger than the largest.
/// @param bias  of the row
template <bool kBiased>
MOESAIC_INLINE PowerAndGradient GradientOfScores(const SoftmaxGradArgs& args, std::int64_t at, std::int64_t c, float bias) {
  const F32x16 x = LoadF32(args.x + at), most = LoadF32(args.most + c);
  F32x16 exponent;
  if constexpr (kBiased) {
    exponent = (MultiplyAdd(x, Broadcast(args.scale), Broadcast(bias)) - most) * kLog2OfE;
  } else {
    exponent = Done(x * (args.scale * kLog2OfE)) - most;
  }
  const F32x16 power = RoughExp2(exponent) * LoadF32(args.inverse_sums + c);
  return {power, power * (LoadF32(args.d_power + at) * args.scale - LoadF32(args.delta + c))};
}

/// Two rows of keys and 32 columns at a time: a line of each operand, and two of row pairs.
template <bool kBiased>
inline void SoftmaxGradOf(const SoftmaxGradArgs& args) {
  constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::int64_t rows_of_panels = RoundUp(args.rows, kPanelRows);
  for (std::int64_t r = 0; r < RoundUp(args.rows, kTileColumns); r += 2) {
    for (std::int64_t c = 0; c < args.columns; c += kTileColumns) {
      PowerAndGradient values[2][2] = {};
      for (int i = 0; i < 2; ++i) {
        const std::int64_t row = r + i, unseen = args.first + row - c;
        if (row >= args.rows || unseen >= kTileColumns) continue;
        const float bias = kBiased ? args.bias[row] : 0.0f;
        for (int half = 0; half < 2; ++half) {
          PowerAndGradient& value = values[i][half];
          value = GradientOfScores<kBiased>(args, row * args.ld + c + 16 * half, c + 16 * half, bias);
          if (unseen > 16 * half) {
            const auto hidden = kLanes < static_cast<std::int32_t>(unseen - 16 * half);
            value = {Select(hidden, F32x16{}, value.power), Select(hidden, F32x16{}, value.gradient)};
          }
        }
      }
      for (int i = 0; i < 2 && r + i < rows_of_panels; ++i) {
        const std::int64_t row = r + i, place = row % kPanelRows * kTileColumns;
        const U16x32 power = NarrowBoth(values[i][0].power, values[i][1].power);
        const U16x32 gradient = NarrowBoth(values[i][0].gradient, values[i][1].gradient);
        std::memcpy(args.power.Tile(row / kPanelRows, c / kTileColumns) + place, &power, sizeof(power));
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
