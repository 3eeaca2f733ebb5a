// Loading, storing and walking rows of bf16 or fp32, sixteen values at a time.
#pragma once

#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// n <= 16 values; what lies beyond them reads as zero.
MOESAIC_INLINE F32x16 Load(const float* p, std::int64_t n) { return n == 16 ? LoadF32(p) : LoadF32Part(p, n); }
MOESAIC_INLINE F32x16 Load(const BFloat16* p, std::int64_t n) { return n == 16 ? LoadBf16(p) : LoadBf16Part(p, n); }

MOESAIC_INLINE void Store(float* p, const F32x16& v, std::int64_t n) {
  if (n == 16) return StoreF32(p, v);
  StoreF32Part(p, v, n);
}
MOESAIC_INLINE void Store(BFloat16* p, const F32x16& v, std::int64_t n) {
  if (n == 16) return StoreBf16(p, v);
  StoreBf16Part(p, v, n);
}

/// Sixteen values past the caches, to an address aligned to their size.
MOESAIC_INLINE void StreamVector(float* p, const F32x16& v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v.low);
  _mm256_stream_ps(p + 8, (__m256)v.high);
#else
  StoreF32(p, v);
#endif
}
MOESAIC_INLINE void StreamVector(BFloat16* p, const F32x16& v) {
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
  const auto both = LoadVector<U32x16>(p);
  return {(F32x16)(both << 16), (F32x16)(both & 0xffff0000u)};
}

MOESAIC_INLINE U16x32 NarrowEvenOdd(const EvenOdd& v) { return NarrowPairs(v.even, v.odd); }

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

/// v, with all that made it done: no product in it becomes part of a sum that follows.
MOESAIC_INLINE F32x16 Done(const F32x16& v) {
  return InParts(v, [](NativeF32 part) MOESAIC_INLINE_LAMBDA {
#if defined(__AVX512F__)
    asm("" : "+v"(part));
#else
    asm("" : "+x"(part));
#endif
    return part;
  });
}

/// Zero in the lanes from n on.
MOESAIC_INLINE F32x16 FirstLanes(const F32x16& v, std::int64_t n) {
  if (n == 16) return v;
#if defined(__AVX512F__)
  return (F32x16)_mm512_maskz_mov_ps(static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#else
  return (F32x16)((I32x16)v & LanesBelow(n));
#endif
}

}  // namespace
