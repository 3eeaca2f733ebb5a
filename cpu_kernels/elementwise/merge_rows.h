// MergeRows: the weighted sum of a token's rows (kernels.h has the contract).
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// Columns ahead: eight cache lines.
inline constexpr std::int64_t kMergePrefetch = 256;

inline void MergeRows(const MergeRowsArgs& args) {
  for (std::int64_t c = 0; c < args.columns; c += 16) {
    const std::int64_t n = args.columns - c < 16 ? args.columns - c : 16;
    F32x16 sum{};
    for (std::int64_t j = 0; j < args.count; ++j) {
      // Too many streams for the hardware to run ahead in all of them.
      if (c % 32 == 0) __builtin_prefetch(args.rows[j] + c + kMergePrefetch);
      const F32x16 value = n == 16 ? LoadBf16(args.rows[j] + c) : LoadBf16Part(args.rows[j] + c, n);
      sum += Broadcast(args.weights[j]) * value;
    }
    if (args.out_stride == 1 && args.dtype == DType::kFloat32) {
      float* out = static_cast<float*>(args.out) + c;
      n == 16 ? StoreF32(out, sum) : StoreF32Part(out, sum, n);
    } else if (args.out_stride == 1) {
      BFloat16* out = static_cast<BFloat16*>(args.out) + c;
      if (n == 16) {
        StoreBf16(out, sum);
      } else {
        StoreBf16Part(out, sum, n);
      }
    } else {
      float wide[16];
      BFloat16 narrow[16];
      StoreF32(wide, sum);
      StoreBf16(narrow, sum);
      for (std::int64_t i = 0; i < n; ++i) {
        if (args.dtype == DType::kFloat32) {
          static_cast<float*>(args.out)[(c + i) * args.out_stride] = wide[i];
        } else {
          static_cast<BFloat16*>(args.out)[(c + i) * args.out_stride] = narrow[i];
        }
      }
    }
  }
}

}  // namespace
