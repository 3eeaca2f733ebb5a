// Vectors as wide as the machine's (NativeF32 in simd.h), of fp32 or bf16 in memory: for what is generic in their width and
// keeps many of them in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/simd.h"

namespace {

MOESAIC_INLINE NativeF32 Load(const float* p) { return LoadVector<NativeF32>(p); }
MOESAIC_INLINE NativeF32 Load(const BFloat16* p) {
#if defined(__AVX512F__)
  return LoadBf16(p);
#else
  return (NativeF32)(__builtin_convertvector(LoadVector<NativeU16>(p), NativeU32) << 16);
#endif
}
MOESAIC_INLINE void Store(float* p, NativeF32 v) { StoreVector(p, v); }
MOESAIC_INLINE void Store(BFloat16* p, NativeF32 v) {
#if defined(__AVX512F__)
  StoreBf16(p, v);
#else
  StoreVector(p, __builtin_convertvector(RoundToHigh(v) >> 16, NativeU16));
#endif
}
/// To bf16 and back.
MOESAIC_INLINE NativeF32 Rounded(NativeF32 v) {
#if defined(__AVX512F__)
  return Widen(NarrowToBf16(v));
#else
  return (NativeF32)(RoundToHigh(v) & 0xffff0000u);
#endif
}
/// Operands are bf16, as in the products of tiles.
MOESAIC_INLINE NativeF32 AsOperand(const float*, NativeF32 v) { return Rounded(v); }
MOESAIC_INLINE NativeF32 AsOperand(const BFloat16*, NativeF32 v) { return v; }

/// Past the caches, where the vector is aligned. StreamFence() comes before another thread may read it.
MOESAIC_INLINE void Stream(float* p, NativeF32 v) {
#if defined(__AVX512F__)
  StreamF32(p, v);
#elif defined(__AVX2__)
  if (reinterpret_cast<std::uintptr_t>(p) % 32 == 0) return _mm256_stream_ps(p, (__m256)v);
  Store(p, v);
#else
  Store(p, v);
#endif
}

#if defined(__AVX512F__)
/// How many of n numbers one vector holds.
MOESAIC_INLINE std::int64_t LanesOf(std::int64_t n) { return n < 0 ? 0 : n < kNativeLanes ? n : kNativeLanes; }
#endif

/// Of n numbers those that a vector holds, and zeros; at the edges (kPart) fewer than it could.
template <bool kPart, typename T>
MOESAIC_INLINE NativeF32 Load(const T* p, std::int64_t n) {
  if constexpr (!kPart) return Load(p);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return LoadF32Part(p, LanesOf(n));
  } else {
    return LoadBf16Part(p, LanesOf(n));
  }
#else
  if (n >= kNativeLanes) return Load(p);
  T part[kNativeLanes] = {};
  for (int i = 0; i < kNativeLanes; ++i) {
    if (i < n) part[i] = p[i];
  }
  return Load(part);
#endif
}
template <bool kPart, typename T>
MOESAIC_INLINE NativeF32 LoadOperand(const T* p, std::int64_t n) {
  return AsOperand(p, Load<kPart>(p, n));
}
template <bool kPart, typename T>
MOESAIC_INLINE void Store(T* p, std::int64_t n, NativeF32 v) {
  if constexpr (!kPart) return Store(p, v);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    StoreF32Part(p, v, LanesOf(n));
  } else {
    StoreBf16Part(p, v, LanesOf(n));
  }
#else
  if (n >= kNativeLanes) return Store(p, v);
  T part[kNativeLanes];
  Store(part, v);
  for (int i = 0; i < kNativeLanes; ++i) {
    if (i < n) p[i] = part[i];
  }
#endif
}

/// a * b + c, rounded once where the machine can: the compiler would do so in some places and not in others.
MOESAIC_INLINE NativeF32 MultiplyAdd(NativeF32 a, NativeF32 b, NativeF32 c) {
#if defined(__AVX512F__)
  return (NativeF32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (NativeF32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
template <class V>
MOESAIC_INLINE Halves<V> MultiplyAdd(const Halves<V>& a, const Halves<V>& b, const Halves<V>& c) {
  return {MultiplyAdd(a.low, b.low, c.low), MultiplyAdd(a.high, b.high, c.high)};
}
/// x in every lane, as Broadcast.
MOESAIC_INLINE NativeF32 InAllLanes(float x) { return x - NativeF32{}; }

}  // namespace
