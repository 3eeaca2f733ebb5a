// StoreColumns and StoreRows: sums of gradients to where their owners want them (kernels.h has the contracts).
#pragma once

#include <cstdlib>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// n <= 16 values; whole lines of fp32 past the caches.
MOESAIC_INLINE void StoreLanes(const float* from, std::int64_t n, float* out) {
  if (n < 16) return StoreF32Part(out, LoadF32Part(from, n), n);
  StreamF32(out, LoadF32(from));
}
MOESAIC_INLINE void StoreLanes(const float* from, std::int64_t n, BFloat16* out) {
  if (n < 16) {
    StoreBf16Part(out, LoadF32Part(from, n), n);
  } else {
    StoreBf16(out, LoadF32(from));
  }
}

/// Steps that are written together where they lie nearer to each other than the columns do: in the order of memory.
inline constexpr std::int64_t kStoredAtOnce = 16;

template <typename T>
inline void StoreColumnsOf(const StoreColumnsArgs& args) {
  const std::int64_t most = std::abs(args.out_step) < std::abs(args.column_stride) ? kStoredAtOnce : 1;
  alignas(64) BFloat16 blocks[kStoredAtOnce][2 * 16 * 16];  // two bf16 in the place of each float
  for (std::int64_t first = 0; first < args.steps; first += most) {
    const std::int64_t steps = args.steps - first < most ? args.steps - first : most;
    for (std::int64_t j = 0; j < args.count; j += 16) {
      const std::int64_t n = args.count - j < 16 ? args.count - j : 16;
      for (std::int64_t s = 0; s < steps; ++s) {
        for (int x = 0; x < 16; ++x) {
          F32x16 row{};
          if (args.rows[x] != nullptr) {
            const float* from = args.rows[x] + (first + s) * args.row_step + j;
            row = n == 16 ? LoadF32(from) : LoadF32Part(from, n);
          }
          StoreVector(blocks[s] + 32 * x, row);
        }
        Transpose16x16(blocks[s], blocks[s]);
      }
      T* out = static_cast<T*>(args.out) + first * args.out_step + j * args.column_stride;
      for (std::int64_t k = 0; k < n; ++k) {
        for (std::int64_t s = 0; s < steps; ++s) {
          const auto* column = reinterpret_cast<const float*>(blocks[s] + 32 * k);
          StoreLanes(column, args.width, out + k * args.column_stride + s * args.out_step);
        }
      }
    }
  }
}

inline void StoreColumns(const StoreColumnsArgs& args) {
  if (args.dtype == DType::kFloat32) {
    StoreColumnsOf<float>(args);
  } else {
    StoreColumnsOf<BFloat16>(args);
  }
}

template <typename T>
inline void StoreRowsOf(const StoreRowsArgs& args) {
  static constexpr float kZeros[16] = {};
  for (std::int64_t i = 0; i < args.rows; ++i) {
    T* out = static_cast<T*>(args.out) + i * args.out_stride;
    // First up to where a line begins, then by lines.
    const auto offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out) % 64);
    std::int64_t n = sizeof(T) == sizeof(float) ? (64 - offset) / 4 : 16;
    for (std::int64_t j = 0; j < args.columns; j += n, n = 16) {
      if (n > args.columns - j) n = args.columns - j;
      StoreLanes(args.in != nullptr ? args.in + i * args.ld + j : kZeros, n, out + j);
    }
  }
}

inline void StoreRows(const StoreRowsArgs& args) {
  if (args.dtype == DType::kFloat32) {
    StoreRowsOf<float>(args);
  } else {
    StoreRowsOf<BFloat16>(args);
  }
}

}  // namespace
