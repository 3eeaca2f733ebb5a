// Sixteen floats at a time, in GCC's vector types or halves of them: the same source is compiled for each instruction set by
// the tier that includes it, inside an unnamed namespace so that no copy is shared between them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/halves.h"

#include <immintrin.h>

/// Behind a lambda's parameters: a body that is called for whole vectors and for parts is compiled for each of them.
#define MOESAIC_INLINE_LAMBDA __attribute__((always_inline))

namespace {

using moesaic::BFloat16;

using F32x8 = float __attribute__((vector_size(32)));
using U32x8 = std::uint32_t __attribute__((vector_size(32)));

// Vectors of the machine's own width.
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

#if defined(__AVX512F__)
using F32x16 = NativeF32;
using I32x16 = NativeI32;
using U32x16 = NativeU32;
using U16x16 = NativeU16;
using U16x32 = std::uint16_t __attribute__((vector_size(64)));
#elif defined(__AVX2__)
using F32x16 = Halves<NativeF32>;
using I32x16 = Halves<NativeI32>;
using U32x16 = Halves<NativeU32>;
using U16x16 = std::uint16_t __attribute__((vector_size(32)));
using U16x32 = Halves<U16x16>;
#else
using U16x8 = std::uint16_t __attribute__((vector_size(16)));
using F32x16 = Halves<Halves<NativeF32> >;
using I32x16 = Halves<Halves<NativeI32> >;
using U32x16 = Halves<Halves<NativeU32> >;
using U16x16 = Halves<U16x8>;
using U16x32 = Halves<U16x16>;
#endif

#if !defined(__AVX512BF16__)
/// Floats rounded to bf16, as the high halves of dwords; the low halves hold rubbish.
MOESAIC_INLINE NativeU32 RoundToHigh(NativeF32 v) {
  const auto bits = (NativeU32)v;
  const NativeU32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
#if defined(__AVX512F__)
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  return (NativeU32)_mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
#else
  const auto is_nan = (NativeU32)(v != v);
  return (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
#endif
}
template <class V>
MOESAIC_INLINE auto RoundToHigh(const Halves<V>& v) {
  return Halves{RoundToHigh(v.low), RoundToHigh(v.high)};
}
#endif

MOESAIC_INLINE F32x16 LoadF32(const float* p) { return LoadVector<F32x16>(p); }

MOESAIC_INLINE void StoreF32(float* p, const F32x16& v) { StoreVector(p, v); }

/// x in every lane. (0 + x would be an addition, for it turns -0 into 0; x - 0 is none.)
MOESAIC_INLINE F32x16 Broadcast(float x) { return x - F32x16{}; }

MOESAIC_INLINE F32x16 Widen(const U16x16& bits) {
#if defined(__AVX512F__)  // GCC makes six instructions of __builtin_convertvector and a shift
  return (F32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
  const auto all = (__m256i)bits;
  return {(NativeF32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)), 16),
          (NativeF32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1)), 16)};
#else
  const auto eight = [](U16x8 half) {
    return Halves{(NativeF32)__builtin_shufflevector(U16x8{}, half, 0, 8, 1, 9, 2, 10, 3, 11),
                  (NativeF32)__builtin_shufflevector(U16x8{}, half, 4, 12, 5, 13, 6, 14, 7, 15)};
  };
  return {eight(bits.low), eight(bits.high)};
#endif
}

MOESAIC_INLINE F32x16 LoadBf16(const BFloat16* p) { return Widen(LoadVector<U16x16>(p)); }

/// The upper 16 bits of each dword: the second numbers of pairs.
MOESAIC_INLINE U16x16 HighWords(const U32x16& pairs) {
#if defined(__AVX512F__)
  return (U16x16)_mm512_cvtepi32_epi16((__m512i)(pairs >> 16));
#elif defined(__AVX2__)
  const auto low = (__m256i)(pairs.low >> 16), high = (__m256i)(pairs.high >> 16);
  return (U16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
  const auto eight = [](const Halves<NativeU32>& half) {
    return __builtin_shufflevector((U16x8)half.low, (U16x8)half.high, 1, 3, 5, 7, 9, 11, 13, 15);
  };
  return {eight(pairs.low), eight(pairs.high)};
#endif
}
/// The lower ones: the first numbers.
MOESAIC_INLINE U16x16 LowWords(const U32x16& pairs) { return HighWords(pairs << 16); }

/// Nearest, ties to even; NaN stays NaN. VCVTNEPS2BF16 flushes denormals, as the products do that consume the result.
MOESAIC_INLINE U16x16 NarrowToBf16(const F32x16& v) {
#if defined(__AVX512BF16__)
  return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  return HighWords(RoundToHigh(v));
#endif
}

MOESAIC_INLINE void StoreBf16(BFloat16* p, const F32x16& v) { StoreVector(p, NarrowToBf16(v)); }

/// The first n <= 16 lanes; the others read as zero, and are not touched in memory.
MOESAIC_INLINE F32x16 LoadF32Part(const float* p, std::int64_t n) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#else
  float part[16] = {};
  std::memcpy(part, p, static_cast<std::size_t>(n) * sizeof(float));
  return LoadF32(part);
#endif
}
MOESAIC_INLINE void StoreF32Part(float* p, const F32x16& v, std::int64_t n) {
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
  std::uint16_t part[16] = {};
  std::memcpy(part, p, static_cast<std::size_t>(n) * sizeof(BFloat16));
  return Widen(LoadVector<U16x16>(part));
#endif
}
MOESAIC_INLINE void StoreBf16Part(BFloat16* p, const F32x16& v, std::int64_t n) {
  const U16x16 bits = NarrowToBf16(v);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)bits);
#else
  std::memcpy(p, &bits, static_cast<std::size_t>(n) * sizeof(BFloat16));
#endif
}

/// Both, rounded to bf16, one after the other.
MOESAIC_INLINE U16x32 NarrowBoth(const F32x16& first, const F32x16& second) {
#if defined(__AVX512BF16__)
  return (U16x32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#elif defined(__AVX512F__)
  const U16x16 halves[2] = {NarrowToBf16(first), NarrowToBf16(second)};
  return LoadVector<U16x32>(halves);
#else
  return {NarrowToBf16(first), NarrowToBf16(second)};
#endif
}

#if !defined(__AVX512F__)
/// Of each 16 bytes of a and b the first four words, a's and b's in turn; and the last four.
#if defined(__AVX2__)
MOESAIC_INLINE U16x16 InterleavedLows(U16x16 a, U16x16 b) { return (U16x16)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
MOESAIC_INLINE U16x16 InterleavedHighs(U16x16 a, U16x16 b) { return (U16x16)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
#else
MOESAIC_INLINE U16x8 InterleavedLows(U16x8 a, U16x8 b) { return (U16x8)_mm_unpacklo_epi16((__m128i)a, (__m128i)b); }
MOESAIC_INLINE U16x8 InterleavedHighs(U16x8 a, U16x8 b) { return (U16x8)_mm_unpackhi_epi16((__m128i)a, (__m128i)b); }
#endif
template <class V>
MOESAIC_INLINE Halves<V> InterleavedLows(const Halves<V>& a, const Halves<V>& b) {
  return {InterleavedLows(a.low, b.low), InterleavedLows(a.high, b.high)};
}
template <class V>
MOESAIC_INLINE Halves<V> InterleavedHighs(const Halves<V>& a, const Halves<V>& b) {
  return {InterleavedHighs(a.low, b.low), InterleavedHighs(a.high, b.high)};
}
#endif

/// (a[0], b[0], a[1], b[1], ...) of what NarrowBoth(a, b) gives.
MOESAIC_INLINE U16x32 InterleaveHalves(const U16x32& both) {
#if defined(__AVX512BW__)
  const U16x32 order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (U16x32)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
#elif defined(__AVX2__)
  const auto even = (__m256i)InterleavedLows(both.low, both.high), odd = (__m256i)InterleavedHighs(both.low, both.high);
  return {(U16x16)_mm256_permute2x128_si256(even, odd, 0x20), (U16x16)_mm256_permute2x128_si256(even, odd, 0x31)};
#else
  const U16x16 even = InterleavedLows(both.low, both.high), odd = InterleavedHighs(both.low, both.high);
  return {{even.low, odd.low}, {even.high, odd.high}};
#endif
}

/// Pairs of both, rounded: (first[0], second[0], first[1], ...).
MOESAIC_INLINE U16x32 NarrowPairs(const F32x16& first, const F32x16& second) {
#if defined(__AVX512BF16__)
  return InterleaveHalves(NarrowBoth(first, second));
#elif defined(__AVX512F__)
  // Bits of `second` in the upper halves, of `first` in the others.
  const auto low = (__m512i)(RoundToHigh(first) >> 16), high = (__m512i)RoundToHigh(second);
  return (U16x32)_mm512_ternarylogic_epi32(_mm512_set1_epi32(-65536), high, low, 0xca);
#else
  return (U16x32)((RoundToHigh(first) >> 16) | (RoundToHigh(second) & 0xffff0000u));
#endif
}

/// Writes a 64-byte aligned line past the caches: for what nobody reads soon. StreamFence() comes before another thread may
/// read it.
MOESAIC_INLINE void StreamLine(BFloat16* p, const U16x32& v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v.low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + 1, (__m256i)v.high);
#else
  StoreVector(p, v);
#endif
}

/// The same for sixteen floats, where they are a line; else an ordinary store.
MOESAIC_INLINE void StreamF32(float* p, const F32x16& v) {
#if defined(__AVX512F__)
  if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) return _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  if (reinterpret_cast<std::uintptr_t>(p) % 64 == 0) {
    _mm256_stream_ps(p, (__m256)v.low);
    return _mm256_stream_ps(p + 8, (__m256)v.high);
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

#if !defined(__AVX512F__)
MOESAIC_INLINE NativeI32 IsNan(NativeF32 v) { return v != v; }
template <class V>
MOESAIC_INLINE auto IsNan(const Halves<V>& v) {
  return Halves{IsNan(v.low), IsNan(v.high)};
}

/// Bit i: whether lane i of a mask is set.
MOESAIC_INLINE std::uint32_t BitsOf(NativeI32 mask) {
#if defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  return static_cast<std::uint32_t>(_mm_movemask_ps((__m128)mask));
#endif
}
template <class V>
MOESAIC_INLINE std::uint32_t BitsOf(const Halves<V>& mask) {
  return BitsOf(mask.low) | BitsOf(mask.high) << sizeof(V) / 4;
}
#endif

MOESAIC_INLINE NativeF32 Select(NativeI32 mask, NativeF32 yes, NativeF32 no) { return mask ? yes : no; }
template <class M, class V>
MOESAIC_INLINE Halves<V> Select(const Halves<M>& mask, const Halves<V>& yes, const Halves<V>& no) {
  return {Select(mask.low, yes.low, no.low), Select(mask.high, yes.high, no.high)};
}

/// a where it is larger than b, else b: of a NaN and a number what stands there as b.
MOESAIC_INLINE NativeF32 Larger(NativeF32 a, NativeF32 b) {
#if defined(__AVX512F__)
  return (NativeF32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (NativeF32)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return (NativeF32)_mm_max_ps((__m128)a, (__m128)b);
#endif
}
template <class V>
MOESAIC_INLINE Halves<V> Larger(const Halves<V>& a, const Halves<V>& b) {
  return {Larger(a.low, b.low), Larger(a.high, b.high)};
}

/// a where it is smaller than b, else b: of a NaN and a number what stands there as b.
MOESAIC_INLINE NativeF32 Smaller(NativeF32 a, NativeF32 b) {
#if defined(__AVX512F__)
  return (NativeF32)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (NativeF32)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return (NativeF32)_mm_min_ps((__m128)a, (__m128)b);
#endif
}
template <class V>
MOESAIC_INLINE Halves<V> Smaller(const Halves<V>& a, const Halves<V>& b) {
  return {Smaller(a.low, b.low), Smaller(a.high, b.high)};
}

/// Of sixteen lanes the first n.
MOESAIC_INLINE I32x16 LanesBelow(std::int64_t n) {
  alignas(64) static constexpr std::int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return LoadVector<I32x16>(kLanes) < I32x16{} + static_cast<std::int32_t>(n);
}

/// f of each part of x that is a vector of the machine.
template <class Function>
MOESAIC_INLINE NativeF32 InParts(NativeF32 x, Function f) {
  return f(x);
}
template <class V, class Function>
MOESAIC_INLINE Halves<V> InParts(const Halves<V>& x, Function f) {
  return {InParts(x.low, f), InParts(x.high, f)};
}

MOESAIC_INLINE float FirstLane(NativeF32 v) { return v[0]; }
template <class V>
MOESAIC_INLINE float FirstLane(const Halves<V>& v) {
  return FirstLane(v.low);
}

/// The sum of the lanes: halves are added until one is left.
MOESAIC_INLINE float SumOfLanes(NativeF32 v) {
#if defined(__AVX512DQ__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const auto four = (__m128)v;
#endif
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
template <class V>
MOESAIC_INLINE float SumOfLanes(const Halves<V>& v) {
  return SumOfLanes(v.low + v.high);
}

/// Eight lanes of a, then eight of b.
MOESAIC_INLINE F32x16 FirstEights(const F32x16& a, const F32x16& b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
#else
  return {a.low, b.low};
#endif
}

/// The sums of lanes 2 i and 2 i + 1: of a, then of b.
#if defined(__AVX512F__)
MOESAIC_INLINE NativeF32 SumsOfNeighbours(NativeF32 a, NativeF32 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#else
#if defined(__AVX2__)
MOESAIC_INLINE NativeF32 SumsOfNeighbours(NativeF32 a, NativeF32 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
#else
MOESAIC_INLINE NativeF32 SumsOfNeighbours(NativeF32 a, NativeF32 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
#endif
template <class V>
MOESAIC_INLINE Halves<V> SumsOfNeighbours(const Halves<V>& a, const Halves<V>& b) {
  return {SumsOfNeighbours(a.low, a.high), SumsOfNeighbours(b.low, b.high)};
}
#endif

/// The largest lane, but for NaN: as Larger of halves, until one is left.
MOESAIC_INLINE float LargestOfLanes(NativeF32 v) {
#if defined(__AVX512DQ__)
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX2__)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const auto four = (__m128)v;
#endif
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
template <class V>
MOESAIC_INLINE float LargestOfLanes(const Halves<V>& v) {
  return LargestOfLanes(Larger(v.low, v.high));
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
  const NativeF32 power_of_e = x < low ? zero : p * (NativeF32)power;
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
    // 1 / 2^127 is 0 for VRCPPS, so that nothing is left of x * sigma(x) for large -x.
    const NativeF32 zero{}, exponent = Smaller(zero + 127.0f, v * -1.44269504088896341f);
    const auto t = (__m256)Larger(zero - 126.0f, exponent);
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

}  // namespace
