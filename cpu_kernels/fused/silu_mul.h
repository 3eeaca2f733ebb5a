// SiluMul and its backward (fused_kernels.h has the contracts).
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

template <typename T>
inline void SiluMulOf(const SiluMulArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const T* gate = static_cast<const T*>(args.gate) + r * args.in_stride;
    const T* up = static_cast<const T*>(args.up) + r * args.in_stride;
    T* out = static_cast<T*>(args.out) + r * args.out_stride;
    ForVectors(out, args.columns, args.stream, [&](std::int64_t c, std::int64_t n, bool stream) MOESAIC_INLINE_LAMBDA {
      const F32x16 g = Load(gate + c, n);
      const F32x16 z = g * SigmoidFor<T>(g) * Load(up + c, n);
      if (stream) return StreamVector(out + c, z);
      Store(out + c, z, n);
    });
  }
}

inline void SiluMul(const SiluMulArgs& args) {
  if (args.dtype == DType::kFloat32) {
    SiluMulOf<float>(args);
  } else {
    SiluMulOf<BFloat16>(args);
  }
}

template <typename T>
inline void SiluMulBackwardOf(const SiluMulBackwardArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const T* d_out = static_cast<const T*>(args.d_out) + r * args.out_stride;
    const T* gate = static_cast<const T*>(args.gate) + r * args.in_stride;
    const T* up = static_cast<const T*>(args.up) + r * args.in_stride;
    T* d_gate = static_cast<T*>(args.d_gate) + r * args.d_in_stride;
    T* d_up = static_cast<T*>(args.d_up) + r * args.d_in_stride;
    ForVectors(d_gate, args.columns, false, [&](std::int64_t c, std::int64_t n, bool) MOESAIC_INLINE_LAMBDA {
      const F32x16 g = Load(gate + c, n), d = Load(d_out + c, n);
      const F32x16 sigma = SigmoidFor<T>(g), silu = g * sigma;
      Store(d_gate + c, d * Load(up + c, n) * sigma * (1.0f + (g - silu)), n);
      Store(d_up + c, d * silu, n);
    });
  }
}

inline void SiluMulBackward(const SiluMulBackwardArgs& args) {
  if (args.dtype == DType::kFloat32) {
    SiluMulBackwardOf<float>(args);
  } else {
    SiluMulBackwardOf<BFloat16>(args);
  }
}

}  // namespace
