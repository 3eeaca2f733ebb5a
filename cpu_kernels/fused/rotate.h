// Rotate (fused_kernels.h has the contract).
#pragma once

#include <type_traits>

#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

/// A product, as memory of type T would hold it.
template <typename T>
MOESAIC_INLINE F32x16 Rounded(const F32x16& x) {
  if constexpr (std::is_same_v<T, BFloat16>) return Widen(NarrowToBf16(x));
  return Done(x);
}

template <typename T>
inline void RotateOf(const RotateArgs& args) {
  const std::int64_t half = args.size / 2;
  const T *c1 = static_cast<const T*>(args.cos), *c2 = c1 + half, *s1 = static_cast<const T*>(args.sin), *s2 = s1 + half;
  const T* x1 = static_cast<const T*>(args.x);
  T* out1 = static_cast<T*>(args.out);
  for (std::int64_t v = 0; v < args.count; ++v, x1 += args.size, out1 += args.size) {
    const T* const x2 = x1 + half;
    T* const out2 = out1 + half;
    for (std::int64_t i = 0; i < half; i += 16) {
      FetchAhead(x1 + i);
      FetchAhead(x2 + i);
      const F32x16 first = Load(x1 + i, 16), second = Load(x2 + i, 16);
      const F32x16 first_s = Load((args.back ? s2 : s1) + i, 16), second_s = Load((args.back ? s1 : s2) + i, 16);
      const F32x16 of_first = Rounded<T>(second * first_s), of_second = Rounded<T>(first * second_s);
      const F32x16 first_c = Rounded<T>(first * Load(c1 + i, 16)), second_c = Rounded<T>(second * Load(c2 + i, 16));
      Store(out1 + i, args.back ? first_c + of_first : first_c - of_first, 16);
      Store(out2 + i, args.back ? second_c - of_second : second_c + of_second, 16);
    }
  }
}

inline void Rotate(const RotateArgs& args) {
  if (args.dtype == DType::kFloat32) {
    RotateOf<float>(args);
  } else {
    RotateOf<BFloat16>(args);
  }
}

}  // namespace
