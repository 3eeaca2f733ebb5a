// Sixteen floats at a time, in GCC's vector types: the same source is compiled for each instruction set by the tier that
// includes it, inside an unnamed namespace so that no copy is shared between them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/gemm/tiles.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using moesaic::BFloat16;

using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = std::int32_t __attribute__((vector_size(64)));
using U32x16 = std::uint32_t __attribute__((vector_size(64)));
using U16x16 = std::uint16_t __attribute__((vector_size(32)));

MOESAIC_INLINE F32x16 LoadF32(const float* p) {
  F32x16 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

MOESAIC_INLINE void StoreF32(float* p, F32x16 v) { std::memcpy(p, &v, sizeof(v)); }

MOESAIC_INLINE F32x16 Broadcast(float x) { return F32x16{} + x; }

MOESAIC_INLINE F32x16 Widen(U16x16 bits) {
  const U32x16 wide = __builtin_convertvector(bits, U32x16) << 16;
  F32x16 v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}

MOESAIC_INLINE F32x16 LoadBf16(const BFloat16* p) {
  U16x16 bits;
  std::memcpy(&bits, p, sizeof(bits));
  return Widen(bits);
}

/// Nearest, ties to even; NaN stays NaN. VCVTNEPS2BF16 flushes denormals, as the products do that consume the result.
MOESAIC_INLINE U16x16 NarrowToBf16(F32x16 v) {
#if defined(__AVX512BF16__)
  return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  U32x16 bits;
  std::memcpy(&bits, &v, sizeof(bits));
  const U32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32x16 quiet = (bits >> 16) | 0x40u;
  const U32x16 is_nan = (U32x16)(v != v);
  return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), U16x16);
#endif
}

MOESAIC_INLINE void StoreBf16(BFloat16* p, F32x16 v) {
  const U16x16 bits = NarrowToBf16(v);
  std::memcpy(p, &bits, sizeof(bits));
}

/// The first n < 16 lanes; the others read as zero, and are not touched in memory.
MOESAIC_INLINE F32x16 LoadBf16Part(const BFloat16* p, std::int64_t n) {
  U16x16 bits{};
  std::memcpy(&bits, p, static_cast<std::size_t>(n) * sizeof(BFloat16));
  return Widen(bits);
}
MOESAIC_INLINE void StoreBf16Part(BFloat16* p, F32x16 v, std::int64_t n) {
  const U16x16 bits = NarrowToBf16(v);
  std::memcpy(p, &bits, static_cast<std::size_t>(n) * sizeof(BFloat16));
}

MOESAIC_INLINE F32x16 Select(I32x16 mask, F32x16 yes, F32x16 no) { return mask ? yes : no; }

/// e^x with a relative error below 2e-7 for x in [-87, 88], by 2^n times a polynomial of degree 6 (Cephes' expf coefficients);
/// 0 to within 1.2e-38 below, infinity above; NaN passes through.
MOESAIC_INLINE F32x16 Exp(F32x16 x) {
  const F32x16 low = Broadcast(-87.0f), high = Broadcast(88.0f);
  F32x16 y = Select(x < low, low, x);
  y = Select(y > high, high, y);
  // Adding 1.5 * 2^23 rounds to the nearest integer.
  const F32x16 magic = Broadcast(12582912.0f);
  const F32x16 n = (y * 1.44269504088896341f + magic) - magic;
  F32x16 r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F32x16 p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const F32x16 safe = Select(n == n, n, F32x16{});
  const I32x16 power = (__builtin_convertvector(safe, I32x16) + 127) << 23;
  F32x16 scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return Select(x > high, Broadcast(__builtin_inff()), p * scale);
}

/// 1 / (1 + e^-x). A division takes as long as the rest of silu together: AVX-512 has a 14-bit reciprocal, which one Newton
/// step brings to 2^-23 or so.
MOESAIC_INLINE F32x16 Sigmoid(F32x16 x) {
#if defined(__AVX512F__)
  const F32x16 d = 1.0f + Exp(-x);
  const F32x16 r = (F32x16)_mm512_rcp14_ps((__m512)d);
  // d = infinity (x below -88): the step would be 0 * infinity.
  return Select(x < Broadcast(-88.0f), F32x16{}, r * (2.0f - d * r));
#else
  return 1.0f / (1.0f + Exp(-x));
#endif
}

/// Transposes 16 x 16 dwords: out[j][i] = in[i][j]; rows are 64 bytes apart in both, and in == out is allowed.
inline void Transpose16x16(const BFloat16* in, BFloat16* out) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + 32 * i);
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + 32 * i, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(out + 32 * (4 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(out + 32 * (8 + i), _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(out + 32 * (12 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
#else
  std::uint32_t source[16][16], target[16][16];
  std::memcpy(source, in, sizeof(source));
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) target[j][i] = source[i][j];
  }
  std::memcpy(out, target, sizeof(target));
#endif
}

/// Interleaves the rows of two stored tiles, (0, 1), (2, 3), ... of `even` and then of `odd`: row p of `low` holds the pairs of
/// rows 2p and 2p+1 for columns 0..15, `high` for columns 16..31. This is the right factor of a product over the tiles' rows.
inline void InterleaveRowPairs(const BFloat16* even, const BFloat16* odd, BFloat16* low, BFloat16* high) {
  for (int half = 0; half < 2; ++half) {
    const BFloat16* source = half == 0 ? even : odd;
    for (int p = 0; p < 8; ++p) {
      const BFloat16* first = source + 64 * p;
      BFloat16* to_low = low + 32 * (8 * half + p);
      BFloat16* to_high = high + 32 * (8 * half + p);
#if defined(__AVX512BW__)
      const __m512i x = _mm512_load_si512(first);
      const __m512i y = _mm512_load_si512(first + 32);
      _mm512_store_si512(to_low, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(to_high, _mm512_unpackhi_epi16(x, y));
#else
      for (int lane = 0; lane < 4; ++lane) {
        for (int c = 0; c < 4; ++c) {
          to_low[8 * lane + 2 * c] = first[8 * lane + c];
          to_low[8 * lane + 2 * c + 1] = first[32 + 8 * lane + c];
          to_high[8 * lane + 2 * c] = first[8 * lane + 4 + c];
          to_high[8 * lane + 2 * c + 1] = first[32 + 8 * lane + 4 + c];
        }
      }
#endif
    }
  }
}

}  // namespace
