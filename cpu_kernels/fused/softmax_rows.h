// SoftmaxRows (fused_kernels.h has the contract).
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

MOESAIC_INLINE F32x16 LargerOf(F32x16 a, F32x16 b) { return Select(a > b, a, b); }

/// The largest of sixteen values, but for NaN.
MOESAIC_INLINE float LargestOf(F32x16 v) {
  float x[16];
  StoreF32(x, v);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = x[i + half] > x[i] ? x[i + half] : x[i];
  }
  return x[0];
}

/// Sixteen columns of scale x + bias, or n of them.
MOESAIC_INLINE F32x16 Score(const SoftmaxRowsArgs& args, const float* x, std::int64_t c, std::int64_t n) {
  const F32x16 v = Load(x + c, n) * args.scale;
  return args.bias == nullptr ? v : v + Load(args.bias + c, n);
}

inline void SoftmaxRow(const SoftmaxRowsArgs& args, float* x, float& inverse_sum) {
  constexpr float kInfinity = __builtin_inff();
  constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const std::int64_t whole = args.columns / 32 * 32;
  F32x16 largest[2] = {Broadcast(-kInfinity), Broadcast(-kInfinity)};
  for (std::int64_t c = 0; c < whole; c += 32) {
    for (int i = 0; i < 2; ++i) largest[i] = LargerOf(Score(args, x, c + 16 * i, 16), largest[i]);
  }
  for (std::int64_t c = whole; c < args.columns; c += 16) {
    const std::int64_t n = args.columns - c < 16 ? args.columns - c : 16;
    const F32x16 v = Select(kLanes < static_cast<std::int32_t>(n), Score(args, x, c, n), Broadcast(-kInfinity));
    largest[0] = LargerOf(v, largest[0]);
  }
  const float most = LargestOf(LargerOf(largest[0], largest[1]));
  const bool nothing = most == -kInfinity;
  const F32x16 shift = Broadcast(nothing ? 0.0f : most);
  F32x16 sums[2] = {};
  for (std::int64_t c = 0; c < whole; c += 32) {
    for (int i = 0; i < 2; ++i) {
      const F32x16 e = RoughExp(Score(args, x, c + 16 * i, 16) - shift);
      StoreF32(x + c + 16 * i, e);
      sums[i] = sums[i] + e;
    }
  }
  for (std::int64_t c = whole; c < args.columns; c += 16) {
    const std::int64_t n = args.columns - c < 16 ? args.columns - c : 16;
    const F32x16 e = RoughExp(Score(args, x, c, n) - shift);
    Store(x + c, e, n);
    sums[0] = sums[0] + FirstLanes(e, n);
  }
  const float sum = SumOf(sums[0] + sums[1]);
  inverse_sum = nothing && sum == sum ? 0.0f : 1.0f / sum;  // NaN passes through
}

inline void SoftmaxRows(const SoftmaxRowsArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) SoftmaxRow(args, args.x + r * args.ld, args.inverse_sums[r]);
}

}  // namespace
