// Sample, EstimateTopP: what some logits say about the whole row (sampling_kernels.h has the contracts).
#pragma once

#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/logits.h"

namespace {

using namespace moesaic;

/// Bisections: a bound is off by 2^-10 of the sample's range.
inline constexpr int kBisections = 10;
/// A sample whose weights are worth fewer equal ones says nothing; nor does what it has below the boundary.
inline constexpr float kLeastWorth = 64, kLeastWorthBelow = 8;
/// The share of the mass over which the density below the boundary is taken, where there is so much.
inline constexpr float kWindow = 0.03f;

/// Eight parts of the row in turn: neighbouring runs would wait for the same line of the page table.
template <typename T>
MOESAIC_INLINE void SampleOf(const T* logits, std::int64_t size, float* values) {
  constexpr std::int64_t kRuns = kSamplingSample / 16, kParts = 8;
  for (std::int64_t i = 0; i < kRuns; ++i) {
    const std::int64_t run = i % kParts * (kRuns / kParts) + i / kParts;
    StoreF32(values + 16 * run, LoadLogits(logits + run * (size - 16) / (kRuns - 1) / 16 * 16));  // not across cache lines
  }
}

inline void Sample(const LogitRow& row, float* values) {
  WithType(row, [&](const auto* logits) { SampleOf(logits, row.size, values); });
}

/// A sample's finite logits, and e^((x - top) / T); 0 for the others.
struct WeightedSample {
  alignas(64) float values[kSamplingSample];
  alignas(64) float weights[kSamplingSample];

  /// The sum of weights over x > bound, or of their squares.
  template <bool kSquares>
  MOESAIC_INLINE float Above(float bound) const {
    F32x16 sums[4] = {};
    for (std::int64_t i = 0; i < kSamplingSample; i += 64) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const F32x16 w = LoadF32(weights + i + 16 * j);
        sums[j] = AddAbove(sums[j], LoadF32(values + i + 16 * j), Broadcast(bound), kSquares ? w * w : w);
      }
    }
    return SumOfLanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  /// The sum of weights over x < bound, or of their squares. (As a difference from all it would be rounding where few are
  /// above.)
  template <bool kSquares>
  MOESAIC_INLINE float Below(float bound) const {
    F32x16 sum{};
    for (std::int64_t i = 0; i < kSamplingSample; i += 16) {
      const F32x16 w = LoadF32(weights + i);
      sum = AddAbove(sum, -LoadF32(values + i), Broadcast(-bound), kSquares ? w * w : w);
    }
    return SumOfLanes(sum);
  }

  /// A bound above which are weights of about `target`.
  MOESAIC_INLINE float BoundOf(float target, float top, float depth) const {
    float near = 0, far = depth;
    for (int i = 0; i < kBisections; ++i) {
      const float middle = 0.5f * (near + far);
      (Above<false>(top - middle) < target ? near : far) = middle;
    }
    return top - far;
  }
};

inline TopPEstimate EstimateTopP(const TopPEstimateArgs& args) {
  WeightedSample sample;
  Sample(args.row, sample.values);
  F32x16 most = Broadcast(-kInfinity), least = most, count{};  // least: of -x
  for (std::int64_t i = 0; i < kSamplingSample; i += 16) {
    const F32x16 x = LoadF32(sample.values + i);
    const I32x16 is_finite = (x > -kInfinity) & (x < kInfinity);
    const F32x16 counted = Select(is_finite, x, Broadcast(-kInfinity));
    most = Larger(most, counted);
    least = Larger(least, Select(is_finite, -x, Broadcast(-kInfinity)));
    count += Select(is_finite, Broadcast(1), F32x16{});
    StoreF32(sample.values + i, counted);
  }
  const float top = LargestOfLanes(most), depth = top + LargestOfLanes(least), finite = SumOfLanes(count);
  TopPEstimate estimate;
  if (finite > 0) estimate.top = top;
  if (finite < 0.25f * kSamplingSample) return estimate;
  const Power power(args.inverse_temperature);
  for (std::int64_t i = 0; i < kSamplingSample / 16; ++i) {
    const F32x16 x = LoadF32(sample.values + 16 * i);
    StoreF32(sample.weights + 16 * i, AddAbove(F32x16{}, x, Broadcast(-kInfinity), power(x - top)));
  }
  const float all = sample.Above<false>(-kInfinity), squares = sample.Above<true>(-kInfinity);
  const auto p = static_cast<float>(args.top_p);
  float whole = all;  // what a sample has that is like the row
  if (args.mass > 0) {
    const double of_sample = static_cast<double>(kSamplingSample) / static_cast<double>(args.row.size);
    whole = static_cast<float>(args.mass * ExpPrecise((args.reference - top) * args.inverse_temperature) * of_sample);
    if (!((1 - p) * whole < all)) return estimate;
  } else if (!(all * all > kLeastWorth * squares)) {
    return estimate;
  }
  const float left = (1 - p) * whole, window = whole * (kWindow < 0.5f * (1 - p) ? kWindow : 0.5f * (1 - p));
  const float boundary = sample.BoundOf(all - left, top, depth), below = sample.BoundOf(all - left + window, top, depth);
  const float mass = sample.Above<false>(below) - sample.Above<false>(boundary);
  if (!(below < boundary && mass > 0)) return estimate;
  if (args.mass > 0) {
    const float rest = sample.Below<false>(boundary);
    if (!(rest * rest > kLeastWorthBelow * sample.Below<true>(boundary))) return estimate;
  }
  estimate.boundary = boundary;
  estimate.density = static_cast<double>(mass) / static_cast<double>(whole) / (static_cast<double>(boundary) - below);
  return estimate;
}

}  // namespace
