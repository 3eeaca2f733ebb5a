// Functions of one number in 32 pieces of equal width, each a polynomial of degree 4: permutes of 32 coefficients find those of
// a piece, and a vector takes 14 instructions whatever the function is. (AVX-512; one polynomial for all of erf takes 22, with
// e^x in its derivative twice that.)
#pragma once

#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

#if defined(__AVX512F__)

/// e^x to 1e-13, while compiling.
constexpr double ConstantExp(double x) {
  constexpr int kHalvings = 10;
  const double small = x / (1 << kHalvings);
  double sum = 1.0, term = 1.0;
  for (int i = 1; i < 12; ++i) sum += term *= small / i;
  for (int i = 0; i < kHalvings; ++i) sum *= sum;
  return sum;
}

/// The normal density, and its integral by the series of odd powers, whose terms have one sign.
constexpr double NormalDensity(double x) { return 0.39894228040143268 * ConstantExp(-0.5 * x * x); }
constexpr double NormalIntegral(double x) {
  double sum = 0.0, term = x;
  for (int i = 1; i < 200; ++i) {
    sum += term;
    term *= x * x / (2 * i + 1);
  }
  return 0.5 + NormalDensity(x) * sum;
}

/// The pieces of a function that is 0 below -5.4 and 1 above 5.1, as what GELU multiplies x with is to within 2e-7, and its
/// derivative to within 5e-6.
struct alignas(64) QuarticPieces {
  static constexpr int kPieces = 32, kCentral = 16;
  /// Piece i + kCentral has its centre at i / kPerUnit; the first and the last one are constant.
  static constexpr float kPerUnit = 2.843f;

  float of_power[5][kPieces] = {};

  /// `function` interpolated at the zeros of the Chebyshev polynomial of degree 5.
  template <class Function>
  explicit constexpr QuarticPieces(Function function) {
    constexpr double kOuter = 0.47552825814757677, kInner = 0.29389262614623657;
    constexpr double kOuter2 = kOuter * kOuter, kInner2 = kInner * kInner;
    of_power[0][kPieces - 1] = 1.0f;
    for (int i = 1; i < kPieces - 1; ++i) {
      const auto at = [&](double t) { return function((i - kCentral + t) / kPerUnit); };
      const double middle = at(0.0);
      const double even_outer = ((at(kOuter) + at(-kOuter)) / 2 - middle) / kOuter2;
      const double even_inner = ((at(kInner) + at(-kInner)) / 2 - middle) / kInner2;
      const double odd_outer = (at(kOuter) - at(-kOuter)) / (2 * kOuter);
      const double odd_inner = (at(kInner) - at(-kInner)) / (2 * kInner);
      const double cube = (odd_outer - odd_inner) / (kOuter2 - kInner2);
      const double fourth = (even_outer - even_inner) / (kOuter2 - kInner2);
      of_power[0][i] = static_cast<float>(middle);
      of_power[1][i] = static_cast<float>(odd_inner - cube * kInner2);
      of_power[2][i] = static_cast<float>(even_inner - fourth * kInner2);
      of_power[3][i] = static_cast<float>(cube);
      of_power[4][i] = static_cast<float>(fourth);
    }
  }

  /// The function of x; NaN passes through.
  MOESAIC_INLINE F32x16 At(F32x16 x) const {
    constexpr float kLow = -16.4f / kPerUnit, kHigh = 15.4f / kPerUnit;
    // The second operand where one is NaN.
    const __m512 near = _mm512_max_ps(_mm512_set1_ps(kLow), _mm512_min_ps(_mm512_set1_ps(kHigh), (__m512)x));
    // Adding 1.5 * 2^23 rounds to the nearest integer; with kCentral more the last five bits are the piece's number.
    const __m512 per_unit = _mm512_set1_ps(kPerUnit), magic = _mm512_set1_ps(12582912.0f + kCentral);
    const __m512 piece = _mm512_fmadd_ps(near, per_unit, magic);
    const __m512 t = _mm512_fmsub_ps(near, per_unit, _mm512_sub_ps(piece, magic));
    const auto power = [&](int n) MOESAIC_INLINE_LAMBDA {
      return _mm512_permutex2var_ps(_mm512_load_ps(of_power[n]), _mm512_castps_si512(piece), _mm512_load_ps(of_power[n] + 16));
    };
    __m512 sum = _mm512_fmadd_ps(power(4), t, power(3));
    sum = _mm512_fmadd_ps(sum, t, power(2));
    sum = _mm512_fmadd_ps(sum, t, power(1));
    return (F32x16)_mm512_fmadd_ps(sum, t, power(0));
  }
};

#endif

}  // namespace
