// Loading logits, 16 at a time as fp32, and powers of them.
#pragma once

#include <type_traits>

#include "cpu_kernels/float16.h"
#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/sampling/sampling_kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

inline constexpr float kInfinity = __builtin_inff();
inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr std::int64_t kBlockVectors = kSamplingBlock / 16;

MOESAIC_INLINE F32x16 LoadLogits(const float* p) { return LoadF32(p); }
MOESAIC_INLINE F32x16 LoadLogits(const BFloat16* p) { return LoadBf16(p); }
MOESAIC_INLINE F32x16 LoadLogits(const Float16* p) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return {(NativeF32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          (NativeF32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
#else
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = ToFloat(p[i]);
  return LoadF32(values);
#endif
}

/// -infinity.
template <typename T>
MOESAIC_INLINE T LowestOf() {
  if constexpr (std::is_same_v<T, float>) {
    return -kInfinity;
  } else {
    return __builtin_bit_cast(T, static_cast<std::uint16_t>(std::is_same_v<T, BFloat16> ? 0xff80 : 0xfc00));
  }
}

/// The first n < 16; the others read as -infinity.
template <typename T>
MOESAIC_INLINE F32x16 LoadLogitsPart(const T* p, std::int64_t n) {
  T part[16] = {};
  std::memcpy(part, p, static_cast<std::size_t>(n) * sizeof(T));
  return Select(LanesBelow(n), LoadLogits(part), Broadcast(-kInfinity));
}

/// Logits [16 i, 16 i + 16) of `left` ones; -infinity where there are none.
template <typename T>
MOESAIC_INLINE F32x16 LoadLogitsAt(const T* p, std::int64_t i, std::int64_t left) {
  if (16 * i + 16 <= left) return LoadLogits(p + 16 * i);
  return 16 * i < left ? LoadLogitsPart(p + 16 * i, left - 16 * i) : Broadcast(-kInfinity);
}

/// sum + weight where x > high, and sum elsewhere.
MOESAIC_INLINE F32x16 AddAbove(F32x16 sum, F32x16 x, F32x16 high, F32x16 weight) {
#if defined(__AVX512F__)
  const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, (__m512)high, _CMP_GT_OQ);
  return (F32x16)_mm512_mask_add_ps((__m512)sum, above, (__m512)sum, (__m512)weight);
#else
  return sum + (F32x16)((I32x16)weight & (high < x));
#endif
}

/// e^(d / T) for d <= 0, as 2^(d c) with c = log2(e) / T in two parts, so that the argument is not rounded: relative error
/// below 2e-7, most of it in the last additions. -infinity gives less than 2e-38; NaN passes through.
class Power {
 public:
  MOESAIC_INLINE explicit Power(double inverse_temperature)
      : c_(static_cast<float>(inverse_temperature * kLog2E)),
        c_low_(static_cast<float>(inverse_temperature * kLog2E - static_cast<double>(c_))),
        least_(static_cast<float>(-126.0 / (inverse_temperature * kLog2E))) {}

  MOESAIC_INLINE F32x16 operator()(F32x16 d) const {
#if defined(__AVX512F__)
    const __m512 c = _mm512_set1_ps(c_), magic = _mm512_set1_ps(kMagic);
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(least_), (__m512)d);  // keeps a NaN
    const __m512 shifted = _mm512_fmadd_ps(y, c, magic);
    const __m512 r = _mm512_fmadd_ps(y, _mm512_set1_ps(c_low_), _mm512_fmsub_ps(y, c, _mm512_sub_ps(shifted, magic)));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return (F32x16)_mm512_add_epi32((__m512i)PowerOfTwo((F32x16)r), power);
#else
    const F32x16 y = Larger(Broadcast(least_), d), c = Broadcast(c_);  // keeps a NaN
    const F32x16 shifted = MultiplyAdd(y, c, Broadcast(kMagic));
    const F32x16 r = MultiplyAdd(y, Broadcast(c_low_), MultiplyAdd(y, c, kMagic - shifted));
    const auto scale = (F32x16)(((U32x16)shifted + 127u) << 23);
    return PowerOfTwo(r) * scale;  // exact, so contracted with a sum or not it is the same
#endif
  }

 private:
  /// 2^r on [-1/2, 1/2]: interpolation in Chebyshev's nodes, error 2.5e-9.
  MOESAIC_INLINE static F32x16 PowerOfTwo(F32x16 r) {
    F32x16 p = Broadcast(0.000154614447f);
    p = p * r + 0.00134004282f;
    p = p * r + 0.00961805668f;
    p = p * r + 0.0555032723f;
    p = p * r + 0.240226509f;
    p = p * r + 0.693147207f;
    return p * r + 1.0f;
  }

  /// 1.5 * 2^23: adding it rounds to the nearest integer, which then stands in the low bits.
  static constexpr float kMagic = 12582912.0f;

  float c_, c_low_, least_;
};

/// 2^(x c - m), c = log2(e) / T rounded to fp32 and m a whole number, for x c from m - 126, below which x counts as that, to
/// m + 126 and both below 2^21 in magnitude: four instructions fewer than Power, relative error below 3e-6. NaN passes through.
class CoarsePower {
 public:
  MOESAIC_INLINE CoarsePower(double inverse_temperature, float m)
      : c_(CoarseScale(inverse_temperature)), magic_(kMagic - m), least_((m - 126.0f) / c_) {}

  MOESAIC_INLINE F32x16 operator()(F32x16 x) const {
#if defined(__AVX512F__)
    const __m512 c = _mm512_set1_ps(c_), magic = _mm512_set1_ps(magic_);
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(least_), (__m512)x);  // keeps a NaN
    const __m512 shifted = _mm512_fmadd_ps(y, c, magic);
    const __m512 r = _mm512_fmsub_ps(y, c, _mm512_sub_ps(shifted, magic));
    return (F32x16)_mm512_add_epi32((__m512i)PowerOfTwo((F32x16)r), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
#else
    const F32x16 y = Larger(Broadcast(least_), x), c = Broadcast(c_);  // keeps a NaN
    const F32x16 shifted = MultiplyAdd(y, c, Broadcast(magic_));
    const F32x16 r = MultiplyAdd(y, c, magic_ - shifted);
    return PowerOfTwo(r) * (F32x16)(((U32x16)shifted + 127u) << 23);
#endif
  }

 private:
  /// 2^r on [-1/2, 1/2]: fitted to least maximal relative error (Lawson's iteration), 2.7e-6 with its roundings.
  MOESAIC_INLINE static F32x16 PowerOfTwo(F32x16 r) {
    F32x16 p = Broadcast(0.009570086f);
    p = p * r + 0.05591785f;
    p = p * r + 0.24024744f;
    p = p * r + 0.6931218f;
    return p * r + 0.9999993f;
  }

  static constexpr float kMagic = 12582912.0f;

  float c_, magic_, least_;
};

/// Calls function(const T* logits) with the row's own type.
template <typename Function>
MOESAIC_INLINE auto WithType(const LogitRow& row, Function function) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return function(static_cast<const BFloat16*>(row.data));
    case DType::kFloat16:
      return function(static_cast<const Float16*>(row.data));
    default:
      return function(static_cast<const float*>(row.data));
  }
}

}  // namespace
