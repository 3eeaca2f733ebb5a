// Loading, storing and walking rows of bf16 or fp32, sixteen values at a time.
#pragma once

#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// n <= 16 values; what lies beyond them reads as zero.
MOESAIC_INLINE F32x16 Load(const float* p, std::int64_t n) { return n == 16 ? LoadF32(p) : LoadF32Part(p, n); }
MOESAIC_INLINE F32x16 Load(const BFloat16* p, std::int64_t n) { return n == 16 ? LoadBf16(p) : LoadBf16Part(p, n); }

MOESAIC_INLINE void Store(float* p, F32x16 v, std::int64_t n) {
  if (n == 16) return StoreF32(p, v);
  StoreF32Part(p, v, n);
}
MOESAIC_INLINE void Store(BFloat16* p, F32x16 v, std::int64_t n) {
  if (n == 16) return StoreBf16(p, v);
  StoreBf16Part(p, v, n);
}

/// Sixteen values past the caches, to an address aligned to their size.
MOESAIC_INLINE void StreamVector(float* p, F32x16 v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &v, sizeof(v));
  _mm256_stream_ps(p, halves[0]);
  _mm256_stream_ps(p + 8, halves[1]);
#else
  StoreF32(p, v);
#endif
}
MOESAIC_INLINE void StreamVector(BFloat16* p, F32x16 v) {
#if defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)NarrowToBf16(v));
#else
  StoreBf16(p, v);
#endif
}

/// 32 values: the even and the odd ones. Widening them takes one instruction each, narrowing two in all, where whole vectors
/// side by side take twice that.
struct EvenOdd {
  F32x16 even, odd;
};

MOESAIC_INLINE EvenOdd LoadEvenOdd(const BFloat16* p) {
  U32x16 both;
  std::memcpy(&both, p, sizeof(both));
  return {(F32x16)(both << 16), (F32x16)(both & 0xffff0000u)};
}

MOESAIC_INLINE U16x32 NarrowEvenOdd(const EvenOdd& v) {
#if defined(__AVX512BW__) && !defined(__AVX512BF16__)
  const __m512i even = _mm512_srli_epi32(RoundedToHigh((__m512)v.even), 16);
  return (U16x32)_mm512_mask_blend_epi16(0xaaaaaaaau, even, RoundedToHigh((__m512)v.odd));
#else
  return InterleaveHalves(NarrowBoth(v.even, v.odd));
#endif
}

/// body(first column, how many <= kStep, whether to stream) over a row: with `stream` whole cache lines, wherever the row
/// begins. A line that is half streamed and half stored would go to memory and back.
template <std::int64_t kStep = 16, typename T, class Body>
MOESAIC_INLINE void ForVectors(const T* out, std::int64_t columns, bool stream, Body body) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  static_assert(kLine % kStep == 0);
  std::int64_t c = 0;
  if (stream) {
    const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out) % 64 / sizeof(T));
    const std::int64_t before = beyond == 0 ? 0 : kLine - beyond, end = before < columns ? before : columns;
    while (c < end) {
      const std::int64_t n = end - c < kStep ? end - c : kStep;
      body(c, n, false);
      c += n;
    }
    for (const std::int64_t last = c + (columns - c) / kLine * kLine; c < last; c += kStep) body(c, kStep, true);
  }
  for (; c + kStep <= columns; c += kStep) body(c, kStep, false);
  if (c < columns) body(c, columns - c, false);
}

/// Fetches what a later step of a row reads, for work that memory limits: the hardware's own prefetchers stop at each page.
template <std::int64_t kBytes = 2048, typename T>
MOESAIC_INLINE void FetchAhead(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kBytes);
}

#if !defined(__AVX512F__)
/// As of vectors of the machine's own width: rows have the same bits however they are walked.
MOESAIC_INLINE F32x16 MultiplyAdd(F32x16 a, F32x16 b, F32x16 c) {
  constexpr int kParts = 16 / kNativeLanes;
  NativeF32 x[kParts], y[kParts], z[kParts];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  std::memcpy(z, &c, sizeof(c));
  for (int i = 0; i < kParts; ++i) z[i] = MultiplyAdd(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof(c));
  return c;
}
#endif

/// v, with all that made it done: no product in it becomes part of a sum that follows.
MOESAIC_INLINE F32x16 Done(F32x16 v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#else
  asm("" : "+m"(v));
#endif
  return v;
}

/// The sum of sixteen values, in one order: halves onto each other.
MOESAIC_INLINE float SumOf(F32x16 v) {
#if defined(__AVX512F__)
  v += (F32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
  v += (F32x16)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  v += (F32x16)_mm512_permute_ps((__m512)v, 0x4e);
  v += (F32x16)_mm512_permute_ps((__m512)v, 0xb1);
  return v[0];
#else
  float x[16];
  StoreF32(x, v);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
#endif
}

/// Zero in the lanes from n on.
MOESAIC_INLINE F32x16 FirstLanes(F32x16 v, std::int64_t n) {
  if (n == 16) return v;
#if defined(__AVX512F__)
  return (F32x16)_mm512_maskz_mov_ps(static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#else
  float x[16];
  StoreF32(x, v);
  for (std::int64_t i = n; i < 16; ++i) x[i] = 0.0f;
  return LoadF32(x);
#endif
}

}  // namespace
