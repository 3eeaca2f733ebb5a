// bfloat16: the upper half of an IEEE fp32.
#pragma once

#include <cstdint>
#include <cstring>

namespace moesaic {

/// A bf16 number: 1 sign, 8 exponent and 7 fraction bits.
struct BFloat16 {
  std::uint16_t bits;
};

inline float ToFloat(BFloat16 value) {
  const std::uint32_t wide = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
}

/// Rounds to the nearest bf16, ties to even. A NaN stays a (quiet) NaN.
inline BFloat16 ToBFloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace moesaic
