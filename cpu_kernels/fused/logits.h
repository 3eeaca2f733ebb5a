// FoldLogits and LogitGrad (fused_kernels.h has the contracts): sixteen rows side by side, one column after the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// Below it e^x is 0 in fp32, and x times it must not become NaN.
inline constexpr float kNoPower = -200.0f;

/// Up to sixteen columns of a block, each a vector of sixteen rows.
class LogitColumns {
 public:
  LogitColumns(const LogitBlock& block, std::int64_t first) : block_(block), first_(first) {
    if (block.by_rows) {
      Transpose16x16(block.products + first, block.ld, turned_, 16);
    } else {
      products_ = block.products + first * block.ld;
      ld_ = block.ld;
    }
  }
  LogitColumns(const LogitColumns&) = delete;
  LogitColumns& operator=(const LogitColumns&) = delete;

  std::int64_t count() const { return block_.columns - first_ < 16 ? block_.columns - first_ : 16; }

  /// z of the column first + i.
  MOESAIC_INLINE F32x16 operator[](std::int64_t i) const {
    const F32x16 product = LoadF32(products_ + i * ld_);
    return (block_.bias == nullptr ? product : product + block_.bias[first_ + i]) * block_.scale;
  }

 private:
  const LogitBlock& block_;
  const std::int64_t first_;
  alignas(64) float turned_[16 * 16];
  const float* products_ = turned_;
  std::int64_t ld_ = 16;
};

/// z of one row and column, rounded as LogitColumns does.
inline float LogitAt(const LogitBlock& block, std::int64_t row, std::int64_t column) {
  const float product = block.products[block.by_rows ? row * block.ld + column : column * block.ld + row];
  return (block.bias == nullptr ? product : product + block.bias[column]) * block.scale;
}

inline void FoldLogits(const FoldLogitsArgs& args) {
  const LogitBlock& block = args.block;
  LogitStatistics& known = *args.statistics;
  F32x16 largest = Broadcast(LogitStatistics::kNone), total{};
  for (std::int64_t c = 0; c < block.columns; c += 16) {
    const LogitColumns z(block, c);
    for (std::int64_t i = 0; i < z.count(); ++i) {
      const F32x16 logits = z[i];
      largest = Larger(logits, largest);
      total = total + logits;
    }
  }
  alignas(64) float here[16];
  StoreF32(here, largest);
  for (std::int64_t row = 0; row < 16; ++row) {
    const std::int64_t target = block.targets[row];
    float before = target < 0 ? LogitStatistics::kNone : here[row];
    if (target >= 0 && target < block.columns) {
      known.target[row] = LogitAt(block, row, target);
      before = LogitStatistics::kNone;
      for (std::int64_t c = 0; c < target; ++c) {
        const float logit = LogitAt(block, row, c);
        if (logit > before) before = logit;
      }
    }
    if (before > known.before[row]) known.before[row] = before;
  }

  const F32x16 old_most = LoadF32(known.most), most = Larger(largest, old_most);
  // Where all are -infinity so far, their powers are to be 0.
  const F32x16 base = Select(Broadcast(LogitStatistics::kNone) < most, most, F32x16{});
  F32x16 sum{}, weighted{}, squares{};
  for (std::int64_t c = 0; c < block.columns; c += 16) {
    const LogitColumns z(block, c);
    for (std::int64_t i = 0; i < z.count(); ++i) {
      const F32x16 exponent = Larger(Broadcast(kNoPower), z[i] - base);
      const F32x16 power = Exp(exponent);
      sum = sum + power;
      weighted = weighted + power * exponent;
      squares = squares + power * power;
    }
  }
  // What was known, from the new largest one on.
  const F32x16 shift = Larger(Broadcast(kNoPower), old_most - base), shrink = Exp(shift);
  const F32x16 old_sum = LoadF32(known.sum) * shrink;
  StoreF32(known.weighted, (LoadF32(known.weighted) * shrink + old_sum * shift) + weighted);
  StoreF32(known.sum, old_sum + sum);
  StoreF32(known.squares, LoadF32(known.squares) * (shrink * shrink) + squares);
  StoreF32(known.total, LoadF32(known.total) + total);
  StoreF32(known.most, most);
}

/// What sixteen rows make of a logit.
/// @tparam kRough    for what is rounded to bf16
/// @tparam kEntropy  whether it has a gradient
template <bool kRough, bool kEntropy>
class LogitGradient {
 public:
  explicit LogitGradient(const LogitGradArgs& args)
      : targets_(LoadVector<I32x16>(args.block.targets)),
        log_sum_(LoadF32(args.log_sum)),
        d_log_prob_(LoadF32(args.d_log_prob) * args.block.scale) {
    if constexpr (kEntropy) {
      entropy_ = LoadF32(args.entropy);
      d_entropy_ = LoadF32(args.d_entropy) * args.block.scale;
    }
  }

  /// @param z  of `column` of the block
  MOESAIC_INLINE F32x16 Of(const F32x16& z, std::int64_t column) const {
    const F32x16 log_p = Larger(Broadcast(kNoPower), z - log_sum_), p = kRough ? RoughExp2(log_p * kLog2OfE) : Exp(log_p);
    F32x16 gradient = -(d_log_prob_ * p);
    if constexpr (kEntropy) gradient = gradient - d_entropy_ * p * (log_p + entropy_);
    const I32x16 is_target = targets_ == I32x16{} + static_cast<std::int32_t>(column);
    return Select(is_target, gradient + d_log_prob_, gradient);
  }

 private:
  I32x16 targets_;
  F32x16 log_sum_, d_log_prob_, entropy_{}, d_entropy_{};
};

template <bool kRough, bool kEntropy>
inline void LogitGradOf(const LogitGradArgs& args) {
  const LogitBlock& block = args.block;
  const LogitGradient<kRough, kEntropy> gradient(args);
  for (std::int64_t c = 0; c < block.columns; c += kTileColumns) {
    alignas(64) BFloat16 pairs[kTileElements];
    for (std::int64_t half = c; half < c + kTileColumns; half += 16) {
      alignas(64) float values[16 * 16];
      BFloat16* const to = pairs + 16 * (half - c);
      if (half >= block.columns) {
        std::memset(to, 0, 8 * 64);
        if (args.rows != nullptr) std::memset(values, 0, sizeof(values));
      } else {
        const LogitColumns z(block, half);
        const std::int64_t count = z.count();
        for (std::int64_t i = 0; i < 16; i += 2) {
          const F32x16 even = i < count ? gradient.Of(z[i], half + i) : F32x16{};
          const F32x16 odd = i + 1 < count ? gradient.Of(z[i + 1], half + i + 1) : F32x16{};
          if constexpr (kRough) {
            StoreVector(to + 16 * i, NarrowPairs(even, odd));
          } else {
            StoreF32(values + 16 * i, even);
            StoreF32(values + 16 * (i + 1), odd);
          }
        }
      }
      if constexpr (!kRough) Transpose16x16(values, 16, args.rows + half, args.rows_ld);
    }
    if constexpr (kRough) Transpose16x16(pairs, args.operand.Tile(args.panel, args.tile_column + c / kTileColumns));
  }
}

inline void LogitGrad(const LogitGradArgs& args) {
  const bool rough = args.rows == nullptr, entropy = args.d_entropy != nullptr;
  if (rough && entropy) return LogitGradOf<true, true>(args);
  if (rough) return LogitGradOf<true, false>(args);
  if (entropy) return LogitGradOf<false, true>(args);
  LogitGradOf<false, false>(args);
}

}  // namespace
