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

/// Eight parts of the row in turn: neighbouring runs would wait for the same line of the page table. Each run waits for its
/// page and for memory, whether it is one line or two: in runs of 16 fp32 logits a sample took 5.9 us, in these 3.5, of 64 3.2
/// (Zen 4).
template <typename T>
MOESAIC_INLINE void SampleOf(const T* logits, std::int64_t size, float* values) {
  constexpr std::int64_t kRun = kSamplingRun, kRuns = kSamplingSample / kRun, kParts = 8;
  for (std::int64_t i = 0; i < kRuns; ++i) {
    const std::int64_t run = i % kParts * (kRuns / kParts) + i / kParts;
    const T* from = logits + run * (size - kRun) / (kRuns - 1) / kRun * kRun;  // not across cache lines
    for (std::int64_t j = 0; j < kRun; j += 16) StoreF32(values + kRun * run + j, LoadLogits(from + j));
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

  /// Bounds above which are weights of about these targets.
  MOESAIC_INLINE void BoundsOf(const float (&targets)[2], float top, float depth, float (&bounds)[2]) const {
    float near[2] = {}, far[2] = {depth, depth};
    for (int i = 0; i < kBisections; ++i) {
      F32x16 sums[2][2] = {};
      const float middle[2] = {0.5f * (near[0] + far[0]), 0.5f * (near[1] + far[1])};
      const F32x16 bound[2] = {Broadcast(top - middle[0]), Broadcast(top - middle[1])};
      for (std::int64_t k = 0; k < kSamplingSample; k += 32) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const F32x16 x = LoadF32(values + k + 16 * j), w = LoadF32(weights + k + 16 * j);
          for (int n = 0; n < 2; ++n) sums[n][j] = AddAbove(sums[n][j], x, bound[n], w);
        }
      }
      for (int n = 0; n < 2; ++n) (SumOfLanes(sums[n][0] + sums[n][1]) < targets[n] ? near : far)[n] = middle[n];
    }
    for (int n = 0; n < 2; ++n) bounds[n] = top - far[n];
  }
};

inline TopPEstimate EstimateTopP(const TopPEstimateArgs& args) {
  WeightedSample sample;
  Sample(args.row, sample.values);
  F32x16 most = Broadcast(-kInfinity), least = most, count{};  // least: of -x
  for (std::int64_t i = 0; i < kSamplingSample; i += 16) {
    const F32x16 x = LoadF32(sample.values + i);
    const I32x16 is_finite = (Broadcast(-kInfinity) < x) & (x < Broadcast(kInfinity));
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
  float bounds[2];
  sample.BoundsOf({all - left, all - left + window}, top, depth, bounds);
  const float boundary = bounds[0], below = bounds[1];
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
