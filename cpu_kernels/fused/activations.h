// GELU, SiLU's sigmoid and powers of 2 on sixteen floats. `T` is what the result is stored as: for bf16 what is faster will do,
// with an error that is a small part of the rounding's.
#pragma once

#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/fused/quartic_pieces.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

inline constexpr float kLog2OfE = 1.44269504088896341f;

/// 2^t for what is rounded to bf16: on AVX-512 2^n times a polynomial of degree 3 in the fraction (least maximal relative
/// error, 7.5e-5, by Lawson's iteration), 0 and infinity at the ends, NaN passes through; elsewhere in full precision.
MOESAIC_INLINE F32x16 RoughExp2(F32x16 t) {
#if defined(__AVX512DQ__)
  const __m512 f = _mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07802433f), f, _mm512_set1_ps(0.22606729f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583356f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999252f));
  return (F32x16)_mm512_scalef_ps(p, (__m512)t);
#else
  return Exp(t * 0.693147180559945309f);
#endif
}

/// x kept in [-bound, bound]; NaN passes through.
MOESAIC_INLINE F32x16 Clamp(F32x16 x, float bound) { return Larger(Broadcast(-bound), Smaller(Broadcast(bound), x)); }

/// erf(x / sqrt(2)) within 3.2e-7, and exactly 1 from 5.2 on: x times a polynomial of degree 14 in u = 2 (x / 5.2)^2 - 1,
/// fitted to least maximal error (Lawson's iteration on Chebyshev nodes) to erf + 2e-7 (x / 5.2)^12, which the last clamp takes
/// off. In u its coefficients are small: the sum loses nothing.
MOESAIC_INLINE F32x16 ErfOfRoot2(F32x16 x) {
  const F32x16 z = Clamp(x, 5.2f);
  const F32x16 u = z * z * 7.396449704e-2f - 1.0f;
  F32x16 p = Broadcast(4.047830007e-04f);
  p = p * u - 1.124582137e-03f;
  p = p * u + 1.201508450e-03f;
  p = p * u - 1.957027242e-03f;
  p = p * u + 5.324899219e-03f;
  p = p * u - 1.013474073e-02f;
  p = p * u + 1.602016948e-02f;
  p = p * u - 2.470671572e-02f;
  p = p * u + 3.626784682e-02f;
  p = p * u - 4.952689633e-02f;
  p = p * u + 6.392465532e-02f;
  p = p * u - 7.985078543e-02f;
  p = p * u + 1.000522301e-01f;
  p = p * u - 1.354876012e-01f;
  p = p * u + 2.718999684e-01f;
  return Clamp(z * p, 1.0f);
}

template <typename T>
MOESAIC_INLINE F32x16 SigmoidFor(F32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) return 1.0f / (1.0f + Exp(-x));
  return Sigmoid(x);
}

/// 2 sqrt(2 / pi) (x + 0.044715 x^3): x / 2 (1 + tanh(y / 2)) = x sigma(y).
MOESAIC_INLINE F32x16 TanhArgument(F32x16 x) { return x * (x * x * 0.0713548162726f + 1.5957691216057f); }
/// Its derivative.
MOESAIC_INLINE F32x16 TanhSlope(F32x16 x) { return x * x * 0.2140644488178f + 1.5957691216057f; }

#if defined(__AVX512F__)
constexpr double TanhFactor(double x) { return 1.0 / (1.0 + ConstantExp(-x * (x * x * 0.0713548162726 + 1.5957691216057))); }
constexpr double TanhDerivative(double x) {
  const double s = TanhFactor(x);
  return s + x * s * (1.0 - s) * (x * x * 0.2140644488178 + 1.5957691216057);
}
inline constexpr QuarticPieces kGeluFactor([](double x) { return NormalIntegral(x); });
inline constexpr QuarticPieces kGeluTanhFactor([](double x) { return TanhFactor(x); });
inline constexpr QuarticPieces kGeluDerivative([](double x) { return NormalIntegral(x) + x * NormalDensity(x); });
inline constexpr QuarticPieces kGeluTanhDerivative([](double x) { return TanhDerivative(x); });
#endif

template <Activation kActivation>
MOESAIC_INLINE F32x16 Activate(F32x16 x) {
#if defined(__AVX512F__)
  if constexpr (kActivation == Activation::kGelu) return x * kGeluFactor.At(x);
  if constexpr (kActivation == Activation::kGeluTanh) return x * kGeluTanhFactor.At(x);
#else
  if constexpr (kActivation == Activation::kGelu) return x * 0.5f * (1.0f + ErfOfRoot2(x));
  if constexpr (kActivation == Activation::kGeluTanh) return x * SigmoidFor<float>(TanhArgument(x));
#endif
  return x;
}

/// The derivative of the activation: for bf16 within 5e-6.
template <typename T, Activation kActivation>
MOESAIC_INLINE F32x16 ActivateGrad(F32x16 x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    return (kActivation == Activation::kGelu ? kGeluDerivative : kGeluTanhDerivative).At(x);
  }
#endif
  // Beyond 13 the density is below 1e-37, the sigmoid 0 or 1, and x^3 must not overflow.
  const F32x16 z = Clamp(x, 13.0f);
  if constexpr (kActivation == Activation::kGelu) {
    return 0.5f + 0.5f * ErfOfRoot2(x) + z * 0.398942280401f * Exp(z * z * -0.5f);
  }
  const F32x16 s = SigmoidFor<float>(TanhArgument(z));
  return s + z * s * (1.0f - s) * TanhSlope(z);
}

}  // namespace
