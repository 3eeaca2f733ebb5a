// PackColumns: vectors side by side become columns of tiles (kernels.h has the contract).
#pragma once

#include <cstdlib>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// (first[0], second[0], first[1], ...) as bf16: `width` values of each, which may be null, and zeros behind them.
MOESAIC_INLINE U16x32 PairsOf(const float* first, const float* second, std::int64_t width) {
  const auto load = [width](const float* p) MOESAIC_INLINE_LAMBDA {
    if (p == nullptr) return F32x16{};
    return width == 16 ? LoadF32(p) : LoadF32Part(p, width);
  };
  return NarrowPairs(load(first), load(second));
}

MOESAIC_INLINE U16x32 PairsOf(const BFloat16* first, const BFloat16* second, std::int64_t width) {
  std::uint16_t halves[32] = {};
  const auto bytes = static_cast<std::size_t>(width) * sizeof(BFloat16);
  if (first != nullptr) std::memcpy(halves, first, width == 16 ? sizeof(U16x16) : bytes);
  if (second != nullptr) std::memcpy(halves + 16, second, width == 16 ? sizeof(U16x16) : bytes);
  return InterleaveHalves(LoadVector<U16x32>(halves));
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
        StoreVector(to, pairs);
        if (args.repeat) StoreVector(to + 2 * kTileColumns, pairs);
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
