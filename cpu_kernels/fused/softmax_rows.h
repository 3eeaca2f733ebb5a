// SoftmaxRows (fused_kernels.h has the contract).
//
// Both walks of a row compute its scores, which is cheaper than to keep them, and powers go to their tiles as they are made.
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

/// scale x + bias, of n <= 16 columns from c on; without bias scale x / ln 2, an exponent of 2.
template <bool kBiased>
MOESAIC_INLINE F32x16 Scores(const SoftmaxRowsArgs& args, const float* x, std::int64_t c, std::int64_t n) {
  if constexpr (!kBiased) return Load(x + c, n) * Broadcast(args.scale * kLog2OfE);
  return MultiplyAdd(Load(x + c, n), Broadcast(args.scale), Load(args.bias + c, n));
}

/// e^(score - most), of scores rounded as the largest was: the difference of a sum of products that is not may be anything. (A
/// bias of -3e38, as masks have it, would not be finite in powers of two.)
template <bool kBiased>
MOESAIC_INLINE F32x16 Powers(const SoftmaxRowsArgs& args, const float* x, std::int64_t c, std::int64_t n, float most) {
  if constexpr (!kBiased) return RoughExp2(Done(Scores<false>(args, x, c, n)) - Broadcast(most));
  return RoughExp2((Scores<true>(args, x, c, n) - Broadcast(most)) * kLog2OfE);
}

/// The columns that a row sees, [first, end). They are taken by 32, of which the first and the last may be seen in part.
struct SeenColumns {
  std::int64_t first, end;

  /// Of the sixteen columns from c on.
  MOESAIC_INLINE I32x16 Lanes(std::int64_t c) const { return ~LanesBelow(first - c) & LanesBelow(end - c); }
  /// How many of them lie before the end.
  MOESAIC_INLINE std::int64_t Left(std::int64_t c) const { return end - c < 16 ? end - c : 16; }
};

/// The largest of 16 numbers and of the scores from `from` to `to`, of which some are not seen.
template <bool kBiased>
MOESAIC_INLINE F32x16 LargerOfPart(const SoftmaxRowsArgs& args, const float* x, const SeenColumns& seen, std::int64_t from,
                                   std::int64_t to, F32x16 largest) {
  for (std::int64_t c = from; c < to && c < seen.end; c += 16) {
    const F32x16 scores = Scores<kBiased>(args, x, c, seen.Left(c));
    largest = Larger(Select(seen.Lanes(c), scores, Broadcast(-__builtin_inff())), largest);
  }
  return largest;
}

/// Powers of the 32 columns from c on, of which some are not seen and are 0.
template <bool kBiased>
MOESAIC_INLINE void PowersOfPart(const SoftmaxRowsArgs& args, const float* x, const SeenColumns& seen, std::int64_t c,
                                 float most, F32x16 (&sums)[2], BFloat16* out) {
  F32x16 powers[2] = {};
  for (int i = 0; i < 2; ++i, c += 16) {
    if (seen.Left(c) > 0) powers[i] = Select(seen.Lanes(c), Powers<kBiased>(args, x, c, seen.Left(c), most), F32x16{});
    sums[i] = sums[i] + powers[i];
  }
  StoreVector(out, NarrowBoth(powers[0], powers[1]));
}

/// @return the largest score
template <bool kBiased>
inline float SoftmaxRow(const SoftmaxRowsArgs& args, const float* x, const SeenColumns& seen, BFloat16* out,
                        float& inverse_sum) {
  constexpr float kInfinity = __builtin_inff();
  const std::int64_t step = args.powers.column_stride * kTileElements;
  // Whole blocks are [whole, rest), and what is seen in part lies in [begin, whole) and [rest, end).
  const std::int64_t begin = seen.first / 32 * 32, whole = RoundUp(seen.first, 32);
  const std::int64_t rest = seen.end / 32 * 32 > whole ? seen.end / 32 * 32 : whole;
  F32x16 largest[2] = {Broadcast(-kInfinity), Broadcast(-kInfinity)};
  largest[1] = LargerOfPart<kBiased>(args, x, seen, begin, whole, largest[1]);
  for (std::int64_t c = whole; c < rest; c += 32) {
    for (int i = 0; i < 2; ++i) largest[i] = Larger(Scores<kBiased>(args, x, c + 16 * i, 16), largest[i]);
  }
  largest[0] = LargerOfPart<kBiased>(args, x, seen, rest, seen.end, largest[0]);
  float most = LargestOfLanes(Larger(largest[0], largest[1]));
  const bool nothing = most == -kInfinity;
  if (nothing) most = 0.0f;
  F32x16 sums[2] = {};
  for (std::int64_t c = 0; c < begin; c += 32, out += step) std::memset(out, 0, 64);
  if (begin < whole) {
    PowersOfPart<kBiased>(args, x, seen, begin, most, sums, out);
    out += step;
  }
  for (std::int64_t c = whole; c < rest; c += 32, out += step) {
    F32x16 powers[2];
    for (int i = 0; i < 2; ++i) {
      powers[i] = Powers<kBiased>(args, x, c + 16 * i, 16, most);
      sums[i] = sums[i] + powers[i];
    }
    StoreVector(out, NarrowBoth(powers[0], powers[1]));
  }
  if (rest < seen.end) {
    PowersOfPart<kBiased>(args, x, seen, rest, most, sums, out);
    out += step;
  }
  for (std::int64_t c = RoundUp(seen.end, 32); c < args.columns; c += 32, out += step) std::memset(out, 0, 64);
  const float sum = SumOfLanes(sums[0] + sums[1]);
  inverse_sum = nothing && sum == sum ? 0.0f : 1.0f / sum;  // NaN passes through
  return most;
}

inline void SoftmaxRows(const SoftmaxRowsArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    BFloat16* const out = args.powers.Tile(r / kPanelRows, 0) + r % kPanelRows * kTileColumns;
    const float* const x = args.x + r * args.ld;
    const std::int64_t sees = args.first_sees + r;
    SeenColumns seen{0, args.first_sees == 0 || sees > args.columns ? args.columns : sees};
    if (args.first_columns != nullptr) seen.first = args.first_columns[r];
    if (seen.first >= seen.end) seen = {0, 0};
    const float most = args.bias == nullptr ? SoftmaxRow<false>(args, x, seen, out, args.inverse_sums[r])
                                            : SoftmaxRow<true>(args, x, seen, out, args.inverse_sums[r]);
    if (args.most != nullptr) args.most[r] = most;
  }
  for (std::int64_t r = args.rows; r % kPanelRows != 0; ++r) {
    for (std::int64_t c = 0; c < args.powers.columns; ++c) {
      std::memset(args.powers.Tile(r / kPanelRows, c) + r % kPanelRows * kTileColumns, 0, kTileColumns * sizeof(BFloat16));
    }
  }
}

}  // namespace
