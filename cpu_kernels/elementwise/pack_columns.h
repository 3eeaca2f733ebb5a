// PackColumns: vectors side by side become columns of tiles (kernels.h has the contract).
#pragma once

#include <cstdlib>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// (first[0], second[0], first[1], ...) as bf16: `width` values of each, which may be null, and zeros behind them.
MOESAIC_INLINE U16x32 PairsOf(const float* first, const float* second, std::int64_t width) {
#if defined(__AVX512BF16__)
  return InterleaveHalves(NarrowBoth(LoadF32Part(first, first != nullptr ? width : 0),  //
                                     LoadF32Part(second, second != nullptr ? width : 0)));
#elif defined(__AVX512F__)
  const __m512i low = RoundedToHigh((__m512)LoadF32Part(first, first != nullptr ? width : 0));
  const __m512i high = RoundedToHigh((__m512)LoadF32Part(second, second != nullptr ? width : 0));
  // Bits of `high` in the upper halves, of `low` in the others.
  return (U16x32)_mm512_ternarylogic_epi32(_mm512_set1_epi32(-65536), high, _mm512_srli_epi32(low, 16), 0xca);
#else
  float padded[2][16];
  const float* from[2] = {first, second};
  for (int k = 0; k < 2; ++k) {
    if (from[k] != nullptr && width == 16) continue;
    std::memset(padded[k], 0, sizeof(padded[k]));
    if (from[k] != nullptr) std::memcpy(padded[k], from[k], static_cast<std::size_t>(width) * sizeof(float));
    from[k] = padded[k];
  }
  U16x32 result;
  for (int i = 0; i < 16; i += kNativeLanes) {
    const NativeU32 pairs = RoundToHigh(from[0] + i) >> 16 | (RoundToHigh(from[1] + i) & 0xffff0000u);
    std::memcpy(reinterpret_cast<char*>(&result) + 4 * i, &pairs, sizeof(pairs));
  }
  return result;
#endif
}

MOESAIC_INLINE U16x32 PairsOf(const BFloat16* first, const BFloat16* second, std::int64_t width) {
  U16x16 halves[2] = {};
  const auto bytes = static_cast<std::size_t>(width) * sizeof(BFloat16);
  if (first != nullptr) std::memcpy(&halves[0], first, width == 16 ? sizeof(U16x16) : bytes);
  if (second != nullptr) std::memcpy(&halves[1], second, width == 16 ? sizeof(U16x16) : bytes);
  U16x32 both;
  std::memcpy(&both, halves, sizeof(both));
  return InterleaveHalves(both);
}

/// Steps that are taken together where they lie nearer to each other than the columns do.
inline constexpr std::int64_t kStepsAtOnce = 16;

template <typename T>
inline void PackColumnsOf(const PackColumnsArgs& args) {
  const auto column = [&args](int j) { return static_cast<const T*>(args.columns[j]); };
  // Memory is read in its own order: sixteen steps, one pair of columns after the other, or one step after the other.
  const bool by_column = args.steps > 1 && column(0) != nullptr && column(1) != nullptr &&
                         std::abs(args.step[0]) < std::abs(column(1) - column(0));
  const std::int64_t most = by_column ? kStepsAtOnce : 1;
  const int count = args.repeat ? kTileColumns / 2 : kTileColumns;
  alignas(64) BFloat16 blocks[kStepsAtOnce][kTileElements];
  for (std::int64_t first = 0; first < args.steps; first += most) {
    const std::int64_t steps = args.steps - first < most ? args.steps - first : most;
    for (int j = 0; j < count; j += 2) {
      const T* pair[2] = {column(j), column(j + 1)};
      BFloat16* to = blocks[0] + StoredPosition(j) / 2 * kTileColumns;
      for (std::int64_t s = first; s < first + steps; ++s, to += kTileElements) {
        const T* at[2] = {};
        for (int k = 0; k < 2; ++k) {
          if (pair[k] == nullptr) continue;
          at[k] = pair[k] + s * args.step[j + k];
          // To L2: vectors that lie far apart share a few sets of L1, where what was prefetched would be gone before its use.
          __builtin_prefetch(at[k] + args.ahead, 0, 2);
        }
        const U16x32 pairs = PairsOf(at[0], at[1], args.width);
        std::memcpy(to, &pairs, sizeof(pairs));
        if (args.repeat) std::memcpy(to + 2 * kTileColumns, &pairs, sizeof(pairs));
      }
    }
    for (std::int64_t s = 0; s < steps; ++s) {
      Transpose16x16(blocks[s], blocks[s]);
      for (int x = 0; x < kPanelRows; ++x) {
        if (args.out[x] != nullptr) std::memcpy(args.out[x] + (first + s) * args.out_step, blocks[s] + 32 * x, 64);
      }
    }
  }
}

inline void PackColumns(const PackColumnsArgs& args) {
  if (args.dtype == DType::kFloat32) {
    PackColumnsOf<float>(args);
  } else {
    PackColumnsOf<BFloat16>(args);
  }
}

}  // namespace
