// ScanBlocks, BlockMass, Collect: the passes in fp32 (sampling_kernels.h has the contracts).
#pragma once

#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/logits.h"

namespace {

using namespace moesaic;

/// Bytes that are fetched ahead of what is read.
inline constexpr std::int64_t kAhead = 4096;

/// Block b of a row: where it lies, or the row's last part in `room`, filled up with -infinity.
template <typename T>
MOESAIC_INLINE const T* WholeBlock(const T* logits, std::int64_t b, std::int64_t size, T (&room)[kSamplingBlock]) {
  const T* p = logits + b * kSamplingBlock;
  const std::int64_t left = size - b * kSamplingBlock;
  if (left >= kSamplingBlock) return p;
  for (std::int64_t i = 0; i < kSamplingBlock; ++i) room[i] = i < left ? p[i] : LowestOf<T>();
  return room;
}

/// True where a lane of any of them is NaN.
struct NanWatch {
#if defined(__AVX512F__)
  __mmask16 found = 0;
  MOESAIC_INLINE void Look(F32x16 v, F32x16 w) { found |= _mm512_cmp_ps_mask((__m512)v, (__m512)w, _CMP_UNORD_Q); }
  MOESAIC_INLINE bool Found() const { return found != 0; }
#else
  std::uint32_t found[16] = {};
  MOESAIC_INLINE void Look(F32x16 v, F32x16 w) {
    std::uint32_t bits[32];
    std::memcpy(bits, &v, sizeof(v));
    std::memcpy(bits + 16, &w, sizeof(w));
    for (int i = 0; i < 32; ++i) found[i % 16] |= (bits[i] & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
  }
  MOESAIC_INLINE bool Found() const {
    std::uint32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= found[i];
    return any != 0;
  }
#endif
};

/// Appends the lanes with low <= x <= high, and returns how many they were. kRare: mostly there are none, and to ask first
/// pays.
template <bool kRare>
MOESAIC_INLINE std::int64_t Append(F32x16 x, F32x16 low, F32x16 high, std::int64_t column, float* values,
                                   std::int32_t* columns) {
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#if defined(__AVX512F__)
  const __mmask16 inside =
      _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GE_OQ) & _mm512_cmp_ps_mask((__m512)x, (__m512)high, _CMP_LE_OQ);
  if (kRare && inside == 0) return 0;
  // In a register first: storing under a mask is slow on some hosts.
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(inside, (__m512)x));
  const I32x16 numbers = lane + static_cast<std::int32_t>(column);
  _mm512_storeu_si512(columns, _mm512_maskz_compress_epi32(inside, (__m512i)numbers));
  return __builtin_popcount(inside);
#else
  float v[16], least[16], most[16];
  std::memcpy(v, &x, sizeof(x));
  std::memcpy(least, &low, sizeof(low));
  std::memcpy(most, &high, sizeof(high));
  std::uint32_t any = 0;
  for (int i = 0; i < 16; ++i) any |= (v[i] >= least[i] ? 1u : 0u) & (v[i] <= most[i] ? 1u : 0u);
  if (any == 0) return 0;
  std::int64_t count = 0;
  for (int i = 0; i < 16; ++i) {
    values[count] = v[i];
    columns[count] = static_cast<std::int32_t>(column) + lane[i];
    count += v[i] >= least[i] && v[i] <= most[i] ? 1 : 0;
  }
  return count;
#endif
}

/// The largest element of a block; NaN if there is a NaN.
template <typename T>
MOESAIC_INLINE float BlockMax(const T* p) {
  F32x16 largest[4] = {Broadcast(-kInfinity), Broadcast(-kInfinity), Broadcast(-kInfinity), Broadcast(-kInfinity)};
  NanWatch nan;
#pragma GCC unroll 8
  for (int i = 0; i < kBlockVectors; i += 2) {
    const F32x16 x = LoadLogits(p + 16 * i), y = LoadLogits(p + 16 * i + 16);
    largest[i % 4] = Larger(largest[i % 4], x);
    largest[i % 4 + 1] = Larger(largest[i % 4 + 1], y);
    nan.Look(x, y);
  }
  if (nan.Found()) return __builtin_nanf("");
  return LargestOfLanes(Larger(Larger(largest[0], largest[1]), Larger(largest[2], largest[3])));
}

/// The sums come from the L1 cache, to which the maximum has brought the block; what comes after it is fetched ahead into L2,
/// so that memory is read while sums are computed: without, a row from memory took the time of both.
template <bool kSum, bool kAbove, typename T>
inline std::int64_t ScanBlocksOf(const T* logits, const ScanBlocksArgs& args) {
  const Power power(args.inverse_temperature);
  const F32x16 low = Broadcast(args.low), high = Broadcast(args.high);
  T room[kSamplingBlock];
  std::int64_t count = 0;
  for (std::int64_t b = args.first; b < args.last; ++b) {
    const T* p = WholeBlock(logits, b, args.row.size, room);
    for (std::int64_t i = 0; i < kSamplingBlock; i += 64 / static_cast<std::int64_t>(sizeof(T))) {
      __builtin_prefetch(reinterpret_cast<const char*>(p + i) + kAhead, 0, 2);
    }
    const float max = BlockMax(p);
    args.max[b] = max;
    if constexpr (!kSum) continue;
    args.sum[b] = 0;
    if constexpr (kAbove) args.above[b] = 0;
    if (!(max > -kInfinity && max < kInfinity)) continue;
    F32x16 sums[4] = {}, sums_above[2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      const F32x16 x = LoadLogits(p + 16 * i), weight = power(x - max);
      sums[i % 4] += weight;
      if constexpr (kAbove) {
        sums_above[i % 2] += WhereAbove(x, high, weight);
        count += Append<false>(x, low, high, b * kSamplingBlock + 16 * i, args.values + count, args.columns + count);
      }
    }
    args.sum[b] = SumOfLanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if constexpr (kAbove) args.above[b] = SumOfLanes(sums_above[0] + sums_above[1]);
  }
  return count;
}

inline std::int64_t ScanBlocks(const ScanBlocksArgs& args) {
  return WithType(args.row, [&](const auto* logits) {
    if (args.sum == nullptr) return ScanBlocksOf<false, false>(logits, args);
    return args.above == nullptr ? ScanBlocksOf<true, false>(logits, args) : ScanBlocksOf<true, true>(logits, args);
  });
}

inline void BlockMass(const BlockMassArgs& args) {
  for (std::int64_t b = 0; b < args.count; ++b) {
    const double weight = ExpPrecise((static_cast<double>(args.max[b]) - args.reference) * args.inverse_temperature);
    args.mass[b] = weight;
  }
  if (args.sum == nullptr) return;
  for (std::int64_t b = 0; b < args.count; ++b) args.mass[b] *= static_cast<double>(args.sum[b]);
}

template <bool kMass, typename T>
inline std::int64_t CollectOf(const T* logits, const CollectArgs& args) {
  const Power power(args.inverse_temperature);
  const F32x16 low = Broadcast(args.low), high = Broadcast(args.high);
  const auto reference = static_cast<float>(args.reference);
  T room[kSamplingBlock];
  std::int64_t count = 0;
  for (std::int64_t b = args.first; b < args.last; ++b) {
    if constexpr (kMass) args.mass[b] = 0;
    if (args.max[b] < args.low) continue;
    const T* p = WholeBlock(logits, b, args.row.size, room);
    F32x16 sums[2] = {};
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < kBlockVectors; ++i) {
      const F32x16 x = LoadLogits(p + 16 * i);
      if constexpr (kMass) sums[i % 2] += WhereAbove(x, high, power(x - reference));
      count += Append<!kMass>(x, low, high, b * kSamplingBlock + 16 * i, args.values + count, args.columns + count);
    }
    if constexpr (kMass) args.mass[b] = static_cast<double>(SumOfLanes(sums[0] + sums[1]));
  }
  return count;
}

inline std::int64_t Collect(const CollectArgs& args) {
  return WithType(args.row, [&](const auto* logits) {
    return args.mass != nullptr ? CollectOf<true>(logits, args) : CollectOf<false>(logits, args);
  });
}

}  // namespace
