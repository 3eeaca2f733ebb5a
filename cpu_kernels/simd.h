// Sixteen floats at a time, in GCC's vector types: the same source is compiled for each instruction set by the tier that
// includes it, inside an unnamed namespace so that no copy is shared between them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/gemm/tiles.h"

#include <immintrin.h>

/// Behind a lambda's parameters: a body that is called for whole vectors and for parts is compiled for each of them.
#define MOESAIC_INLINE_LAMBDA __attribute__((always_inline))

namespace {

using moesaic::BFloat16;

using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = std::int32_t __attribute__((vector_size(64)));
using U32x16 = std::uint32_t __attribute__((vector_size(64)));
using U16x16 = std::uint16_t __attribute__((vector_size(32)));
using F32x8 = float __attribute__((vector_size(32)));
using U32x8 = std::uint32_t __attribute__((vector_size(32)));

// Vectors of the machine's own width: GCC spills longer ones.
#if defined(__AVX512F__)
inline constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kNativeLanes = 8;
#else
inline constexpr int kNativeLanes = 4;
#endif
using NativeF32 = float __attribute__((vector_size(4 * kNativeLanes)));
using NativeI32 = std::int32_t __attribute__((vector_size(4 * kNativeLanes)));
using NativeU32 = std::uint32_t __attribute__((vector_size(4 * kNativeLanes)));
using NativeU16 = std::uint16_t __attribute__((vector_size(2 * kNativeLanes)));

#if !defined(__AVX512BF16__)
/// Some floats rounded to bf16, as the high halves of dwords; the low halves hold rubbish. In vectors of the machine's own
/// width: of longer ones GCC compares the elements one by one.
MOESAIC_INLINE NativeU32 RoundToHigh(const float* p) {
  NativeF32 v;
  NativeU32 bits;
  std::memcpy(&v, p, sizeof(v));
  std::memcpy(&bits, p, sizeof(bits));
  const NativeU32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const auto is_nan = (NativeU32)(v != v);
  return (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
}
#endif

#if defined(__AVX512F__)
/// The same for sixteen at once.
MOESAIC_INLINE __m512i RoundedToHigh(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
#endif

MOESAIC_INLINE F32x16 LoadF32(const float* p) {
  F32x16 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

MOESAIC_INLINE void StoreF32(float* p, F32x16 v) { std::memcpy(p, &v, sizeof(v)); }

/// Not left to the operators: of vectors longer than the machine's GCC writes the lanes one by one.
MOESAIC_INLINE F32x16 Broadcast(float x) {
  const NativeF32 part = x - NativeF32{};
  F32x16 v;
  for (int i = 0; i < 16; i += kNativeLanes) std::memcpy(reinterpret_cast<char*>(&v) + 4 * i, &part, sizeof(part));
  return v;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
MOESAIC_INLINE F32x16 TwoHalves(__m256i low, __m256i high) {
  const __m256i halves[2] = {low, high};
  F32x16 v;
  std::memcpy(&v, halves, sizeof(v));
  return v;
}
#endif

MOESAIC_INLINE F32x16 Widen(U16x16 bits) {
#if defined(__AVX512F__)  // GCC makes six instructions of the conversion below, in halves
  return (F32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
  const auto all = (__m256i)bits;
  return TwoHalves(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)), 16),
                   _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1)), 16));
#else
  const U32x16 wide = __builtin_convertvector(bits, U32x16) << 16;
  F32x16 v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
#endif
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
#elif defined(__AVX512F__)
  return (U16x16)_mm512_cvtepi32_epi16(_mm512_srli_epi32(RoundedToHigh((__m512)v), 16));
#elif defined(__AVX2__)
  float values[16];
  std::memcpy(values, &v, sizeof(values));
  const __m256i low = (__m256i)(RoundToHigh(values) >> 16), high = (__m256i)(RoundToHigh(values + 8) >> 16);
  return (U16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
  float values[16];
  U16x16 result;
  std::memcpy(values, &v, sizeof(values));
  for (int i = 0; i < 16; i += kNativeLanes) {
    const auto narrow = __builtin_convertvector(RoundToHigh(values + i) >> 16, NativeU16);
    std::memcpy(reinterpret_cast<char*>(&result) + 2 * i, &narrow, sizeof(narrow));
  }
  return result;
#endif
}

MOESAIC_INLINE void StoreBf16(BFloat16* p, F32x16 v) {
  const U16x16 bits = NarrowToBf16(v);
  std::memcpy(p, &bits, sizeof(bits));
}

/// The first n < 16 lanes; the others read as zero, and are not touched in memory.
MOESAIC_INLINE F32x16 LoadF32Part(const float* p, std::int64_t n) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#else
  F32x16 v{};
  std::memcpy(&v, p, static_cast<std::size_t>(n) * sizeof(float));
  return v;
#endif
}
MOESAIC_INLINE void StoreF32Part(float* p, F32x16 v, std::int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#else
  std::memcpy(p, &v, static_cast<std::size_t>(n) * sizeof(float));
#endif
}
MOESAIC_INLINE F32x16 LoadBf16Part(const BFloat16* p, std::int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return Widen((U16x16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#else
  U16x16 bits{};
  std::memcpy(&bits, p, static_cast<std::size_t>(n) * sizeof(BFloat16));
  return Widen(bits);
#endif
}
MOESAIC_INLINE void StoreBf16Part(BFloat16* p, F32x16 v, std::int64_t n) {
  const U16x16 bits = NarrowToBf16(v);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)bits);
#else
  std::memcpy(p, &bits, static_cast<std::size_t>(n) * sizeof(BFloat16));
#endif
}

using U16x32 = std::uint16_t __attribute__((vector_size(64)));

/// Both, rounded to bf16, one after the other.
MOESAIC_INLINE U16x32 NarrowBoth(F32x16 first, F32x16 second) {
#if defined(__AVX512BF16__)
  return (U16x32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  const U16x16 halves[2] = {NarrowToBf16(first), NarrowToBf16(second)};
  U16x32 both;
  std::memcpy(&both, halves, sizeof(both));
  return both;
#endif
}

/// (a[0], b[0], a[1], b[1], ...) of what NarrowBoth(a, b) gives.
MOESAIC_INLINE U16x32 InterleaveHalves(U16x32 both) {
#if defined(__AVX512BW__)
  const U16x32 order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (U16x32)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
#elif defined(__AVX2__)
  __m256i halves[2];
  std::memcpy(halves, &both, sizeof(both));
  const __m256i even = _mm256_unpacklo_epi16(halves[0], halves[1]), odd = _mm256_unpackhi_epi16(halves[0], halves[1]);
  return (U16x32)TwoHalves(_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31));
#else
  U16x16 halves[2];
  std::memcpy(halves, &both, sizeof(both));
  const U32x16 pairs = __builtin_convertvector(halves[0], U32x16) | (__builtin_convertvector(halves[1], U32x16) << 16);
  U16x32 result;
  std::memcpy(&result, &pairs, sizeof(result));
  return result;
#endif
}

/// Writes a 64-byte aligned line past the caches: for what nobody reads soon. StreamFence() comes before another thread may
/// read it.
MOESAIC_INLINE void StreamLine(BFloat16* p, U16x32 v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  __m256i halves[2];
  std::memcpy(halves, &v, sizeof(v));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), halves[0]);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + 1, halves[1]);
#else
  std::memcpy(p, &v, sizeof(v));
#endif
}

/// The same for sixteen floats, where they are a line; else an ordinary store.
MOESAIC_INLINE void StreamF32(float* p, F32x16 v) {
#if defined(__AVX512F__)
  if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) return _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) {
    __m256 halves[2];
    std::memcpy(halves, &v, sizeof(v));
    _mm256_stream_ps(p, halves[0]);
    _mm256_stream_ps(p + 8, halves[1]);
    return;
  }
#endif
  StoreF32(p, v);
}

MOESAIC_INLINE void StreamFence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

MOESAIC_INLINE bool IsAligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

// Of vectors longer than the machine's GCC compares and selects the elements one by one: there comparisons are made in parts.
#if defined(__AVX512F__)
MOESAIC_INLINE I32x16 Less(F32x16 a, F32x16 b) { return a < b; }
MOESAIC_INLINE I32x16 Less(I32x16 a, I32x16 b) { return a < b; }
MOESAIC_INLINE F32x16 Select(I32x16 mask, F32x16 yes, F32x16 no) { return mask ? yes : no; }
#else
template <class Part, class Whole>
MOESAIC_INLINE I32x16 LessInParts(const Whole& a, const Whole& b) {
  std::int32_t mask[16];
  for (int i = 0; i < 16; i += kNativeLanes) {
    Part x, y;
    std::memcpy(&x, reinterpret_cast<const char*>(&a) + 4 * i, sizeof(x));
    std::memcpy(&y, reinterpret_cast<const char*>(&b) + 4 * i, sizeof(y));
    const auto less = x < y;
    std::memcpy(mask + i, &less, sizeof(less));
  }
  I32x16 all;
  std::memcpy(&all, mask, sizeof(all));
  return all;
}
MOESAIC_INLINE I32x16 Less(const F32x16& a, const F32x16& b) { return LessInParts<NativeF32>(a, b); }
MOESAIC_INLINE I32x16 Less(const I32x16& a, const I32x16& b) { return LessInParts<NativeI32>(a, b); }
MOESAIC_INLINE F32x16 Select(const I32x16& mask, const F32x16& yes, const F32x16& no) {
  return (F32x16)((mask & (I32x16)yes) | (~mask & (I32x16)no));
}
#endif

/// Of sixteen lanes the first n.
MOESAIC_INLINE I32x16 LanesBelow(std::int64_t n) {
  constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Less(kLanes, (I32x16)Broadcast(__builtin_bit_cast(float, static_cast<std::int32_t>(n))));
}

/// f of each part of x that is a vector of the machine.
template <class Function>
MOESAIC_INLINE F32x16 InParts(const F32x16& x, Function f) {
  float values[16];
  std::memcpy(values, &x, sizeof(values));
  for (int i = 0; i < 16; i += kNativeLanes) {
    NativeF32 v;
    std::memcpy(&v, values + i, sizeof(v));
    v = f(v);
    std::memcpy(values + i, &v, sizeof(v));
  }
  return LoadF32(values);
}

/// e^x with a relative error below 2e-7 for x in [-87, 88], by 2^n times a polynomial of degree 6 (Cephes' expf coefficients);
/// 0 below, infinity above; NaN passes through.
MOESAIC_INLINE NativeF32 NativeExp(NativeF32 x) {
  const NativeF32 zero{}, low = zero - 87.0f, high = zero + 88.0f;
  NativeF32 y = x < low ? low : x;
  y = y > high ? high : y;
  // Adding 1.5 * 2^23 rounds to the nearest integer.
  const NativeF32 magic = zero + 12582912.0f;
  const NativeF32 n = (y * 1.44269504088896341f + magic) - magic;
  NativeF32 r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  NativeF32 p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const NativeF32 safe = n == n ? n : zero;
  const NativeI32 power = (__builtin_convertvector(safe, NativeI32) + 127) << 23;
  NativeF32 scale;
  std::memcpy(&scale, &power, sizeof(scale));
  const NativeF32 power_of_e = x < low ? zero : p * scale;
  return x > high ? zero + __builtin_inff() : power_of_e;
}
MOESAIC_INLINE F32x16 Exp(const F32x16& x) { return InParts(x, NativeExp); }

/// 1 / (1 + e^-x), from AVX2 on with a relative error below 2^-18 (2^-17 for x < -20; 0 below -87.3), a small part of what
/// rounding its products to bf16 does, for half the instructions of full precision. 2^f on [0, 1) is a polynomial (error below
/// 3e-6) that AVX-512's VSCALEFPS scales by a power of two, to 0 and infinity at the ends, where VREDUCEPS gives f = 0: nothing
/// is clamped. VRCP14PS or VRCPPS and a Newton step take the place of a division, which would cost as much as the rest.
/// Elsewhere in full precision.
MOESAIC_INLINE F32x16 Sigmoid(F32x16 x) {
#if defined(__AVX512DQ__)
  const auto t = (__m512)(x * -1.44269504088896341f);
  const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0135341669f), f, _mm512_set1_ps(0.0520114601f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241442755f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693003833f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000262f));
  const __m512 d = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_scalef_ps(p, t));
  const __m512 r = _mm512_rcp14_ps(d);
  // At d = infinity the step would be 0 * infinity.
  const __mmask16 finite = _mm512_cmp_ps_mask(d, _mm512_set1_ps(__builtin_inff()), _CMP_NEQ_UQ);
  return (F32x16)_mm512_maskz_mul_ps(finite, r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.0f)));
#elif defined(__AVX2__)
  return InParts(x, [](NativeF32 v) MOESAIC_INLINE_LAMBDA {
    auto t = (__m256)(v * -1.44269504088896341f);
    // 1 / 2^127 is 0 for VRCPPS, so that nothing is left of x * sigma(x) for large -x.
    t = _mm256_max_ps(_mm256_set1_ps(-126.0f),
                      _mm256_min_ps(_mm256_set1_ps(127.0f), t));  // the second operand where one is NaN
    const __m256 n = _mm256_floor_ps(t), f = _mm256_sub_ps(t, n);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(0.0135341669f), f, _mm256_set1_ps(0.0520114601f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.241442755f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.693003833f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.00000262f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 d = _mm256_fmadd_ps(p, _mm256_castsi256_ps(power), _mm256_set1_ps(1.0f));
    const __m256 r = _mm256_rcp_ps(d);
    return (NativeF32)_mm256_mul_ps(r, _mm256_fnmadd_ps(d, r, _mm256_set1_ps(2.0f)));
  });
#else
  return InParts(x, [](NativeF32 v) MOESAIC_INLINE_LAMBDA { return 1.0f / (1.0f + NativeExp(-v)); });
#endif
}

#if !defined(__AVX512F__)
/// columns[j][i] = rows[i][j] for 8 x 8 dwords in rows `pitch` dwords apart.
MOESAIC_INLINE void LoadTransposed(const float* rows, std::int64_t pitch, U32x8 (&columns)[8]) {
  U32x8 r[8], t[8];
  for (int i = 0; i < 8; ++i) std::memcpy(&r[i], rows + pitch * i, sizeof(r[i]));
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 2; ++k) {
      r[i + 2 * k] = __builtin_shufflevector(t[i + k], t[i + 2 + k], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * k + 1] = __builtin_shufflevector(t[i + k], t[i + 2 + k], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    columns[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    columns[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#endif

#if defined(__AVX512F__)
/// out[j][i] = r[i][j] of 16 x 16 dwords; `r` is overwritten.
MOESAIC_INLINE void StoreTransposed(__m512i (&r)[16], float* out, std::int64_t out_pitch) {
  __m512i t[16];
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
    _mm512_storeu_si512(out + out_pitch * i, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(out + out_pitch * (4 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(out + out_pitch * (8 + i), _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(out + out_pitch * (12 + i), _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
}
#endif

/// Transposes 16 x 16 floats: out[j][i] = in[i][j]; rows are `in_pitch` and `out_pitch` floats apart. In place where these are
/// equal.
inline void Transpose16x16(const float* in, std::int64_t in_pitch, float* out, std::int64_t out_pitch) {
#if defined(__AVX512F__)
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + in_pitch * i);
  StoreTransposed(r, out, out_pitch);
#else
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j <= i; j += 8) {
      U32x8 block[8], mirrored[8];
      LoadTransposed(in + in_pitch * i + j, in_pitch, block);
      LoadTransposed(in + in_pitch * j + i, in_pitch, mirrored);
      for (int k = 0; k < 8; ++k) {
        std::memcpy(out + out_pitch * (j + k) + i, &block[k], sizeof(block[k]));
        std::memcpy(out + out_pitch * (i + k) + j, &mirrored[k], sizeof(mirrored[k]));
      }
    }
  }
#endif
}

#if defined(__AVX512F__)
/// rows[r][c] = in[c * pitch + r] for eight rows of 16 columns.
MOESAIC_INLINE void LoadEightTransposed(const float* in, std::int64_t pitch, F32x16 (&rows)[8]) {
  // Lanes of z[c]: rows 0 to 3 and 4 to 7 of column c, then of column c + 8.
  __m512 z[8];
  for (int c = 0; c < 8; ++c) {
    const __m512d low = _mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(in + pitch * c)));
    z[c] = _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(_mm256_loadu_ps(in + pitch * (c + 8))), 1));
  }
  __m512d quad[8];  // lanes of quad[h + r]: row r and row 4 + r of columns h to h + 3, then of h + 8 to h + 11
  for (int h = 0; h < 8; h += 4) {
    const auto ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(z[h], z[h + 1]));
    const auto ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(z[h], z[h + 1]));
    const auto cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(z[h + 2], z[h + 3]));
    const auto cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(z[h + 2], z[h + 3]));
    quad[h] = _mm512_unpacklo_pd(ab_low, cd_low);
    quad[h + 1] = _mm512_unpackhi_pd(ab_low, cd_low);
    quad[h + 2] = _mm512_unpacklo_pd(ab_high, cd_high);
    quad[h + 3] = _mm512_unpackhi_pd(ab_high, cd_high);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int r = 0; r < 4; ++r) {
    rows[r] = (F32x16)_mm512_permutex2var_pd(quad[r], low, quad[4 + r]);
    rows[4 + r] = (F32x16)_mm512_permutex2var_pd(quad[r], high, quad[4 + r]);
  }
}
#endif

/// The same for dwords in rows of 64 bytes.
inline void Transpose16x16(const BFloat16* in, BFloat16* out) {
  Transpose16x16(reinterpret_cast<const float*>(in), 16, reinterpret_cast<float*>(out), 16);
}

/// Interleaves rows (0, 1), (2, 3), ... of a stored tile: row p of `low` holds the pairs of rows 2p and 2p + 1 for columns
/// 0..15, `high` for columns 16..31. This is the right factor of a product over the tile's rows.
template <int kPairs>
MOESAIC_INLINE void InterleaveRowPairs(const BFloat16* rows, BFloat16* low, BFloat16* high) {
  for (int p = 0; p < kPairs; ++p) {
    const BFloat16* first = rows + 64 * p;
    BFloat16* to_low = low + 32 * p;
    BFloat16* to_high = high + 32 * p;
#if defined(__AVX512BW__)
    const __m512i x = _mm512_load_si512(first);
    const __m512i y = _mm512_load_si512(first + 32);
    _mm512_store_si512(to_low, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(to_high, _mm512_unpackhi_epi16(x, y));
#else
    for (int lane = 0; lane < 32; lane += 8) {
      const __m128i x = _mm_load_si128(reinterpret_cast<const __m128i*>(first + lane));
      const __m128i y = _mm_load_si128(reinterpret_cast<const __m128i*>(first + 32 + lane));
      _mm_store_si128(reinterpret_cast<__m128i*>(to_low + lane), _mm_unpacklo_epi16(x, y));
      _mm_store_si128(reinterpret_cast<__m128i*>(to_high + lane), _mm_unpackhi_epi16(x, y));
    }
#endif
  }
}

}  // namespace
