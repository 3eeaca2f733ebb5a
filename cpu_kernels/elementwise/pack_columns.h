// PackColumns: vectors side by side become columns of tiles (kernels.h has the contract).
#pragma once

#include <cstdlib>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// out = (first[0], second[0], first[1], ...) as bf16: `width` values of each, which may be null, and zeros behind them.
MOESAIC_INLINE void StorePairs(const float* first, const float* second, std::int64_t width, BFloat16* out) {
#if defined(__AVX512BF16__)
  const U16x32 pairs = InterleaveHalves(NarrowBoth(LoadF32Part(first, first != nullptr ? width : 0),  //
                                                   LoadF32Part(second, second != nullptr ? width : 0)));
  std::memcpy(out, &pairs, sizeof(pairs));
#else
  float padded[2][16];
  const float* from[2] = {first, second};
  for (int k = 0; k < 2; ++k) {
    if (from[k] != nullptr && width == 16) continue;
    std::memset(padded[k], 0, sizeof(padded[k]));
    if (from[k] != nullptr) std::memcpy(padded[k], from[k], static_cast<std::size_t>(width) * sizeof(float));
    from[k] = padded[k];
  }
  for (int i = 0; i < 16; i += kNativeLanes) {
    const NativeU32 pairs = RoundToHigh(from[0] + i) >> 16 | (RoundToHigh(from[1] + i) & 0xffff0000u);
    std::memcpy(out + 2 * i, &pairs, sizeof(pairs));
  }
#endif
}

MOESAIC_INLINE void StorePairs(const BFloat16* first, const BFloat16* second, std::int64_t width, BFloat16* out) {
  U16x16 halves[2] = {};
  const auto bytes = static_cast<std::size_t>(width) * sizeof(BFloat16);
  if (first != nullptr) std::memcpy(&halves[0], first, width == 16 ? sizeof(U16x16) : bytes);
  if (second != nullptr) std::memcpy(&halves[1], second, width == 16 ? sizeof(U16x16) : bytes);
  U16x32 both;
  std::memcpy(&both, halves, sizeof(both));
  const U16x32 pairs = InterleaveHalves(both);
  std::memcpy(out, &pairs, sizeof(pairs));
}

/// Steps that are taken together where they lie nearer to each other than the columns do.
inline constexpr std::int64_t kStepsAtOnce = 16;

template <typename T>
inline void PackColumnsOf(const PackColumnsArgs& args) {
  const auto column = [&args](int j) { return static_cast<const T*>(args.columns[j]); };
  int count = kTileColumns;
  while (count > 0 && column(count - 1) == nullptr) --count;
  // Memory is read in its own order, with prefetches 16 to 32 lines ahead: the vectors lie far apart, and the hardware does not
  // run ahead of itself. Those of one step often share one set of the L1 cache, where what was prefetched for the next step
  // would be gone before its use: so sixteen steps are taken, one pair of columns after the other.
  const bool by_column = count > 1 && args.steps > 1 && column(0) != nullptr && column(1) != nullptr &&
                         std::abs(args.step[0]) < std::abs(column(1) - column(0));
  const std::int64_t most = by_column ? kStepsAtOnce : 1;
  const std::int64_t ahead = by_column ? most : count > 16 ? 1 : 2;
  alignas(64) BFloat16 blocks[kStepsAtOnce][kTileElements];
  for (std::int64_t first = 0; first < args.steps; first += most) {
    const std::int64_t steps = args.steps - first < most ? args.steps - first : most;
    for (int j = 0; j < kTileColumns; j += 2) {
      const T* pair[2] = {column(j), column(j + 1)};
      BFloat16* to = blocks[0] + StoredPosition(j) / 2 * kTileColumns;
      // By column, the next pair of columns is wanted next.
      const int next = by_column && j + 2 < count ? j + 2 : j;
      for (std::int64_t s = first; s < first + steps; ++s, to += kTileElements) {
        if (pair[0] == nullptr && pair[1] == nullptr) {
          std::memset(to, 0, 64);
          continue;
        }
        const T* at[2] = {};
        for (int k = 0; k < 2; ++k) {
          if (pair[k] != nullptr) at[k] = pair[k] + s * args.step[j + k];
          if (next + k >= count || column(next + k) == nullptr) continue;
          __builtin_prefetch(column(next + k) + (next == j ? s + ahead : s) * args.step[next + k]);
        }
        StorePairs(at[0], at[1], args.width, to);
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
