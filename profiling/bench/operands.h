// Numbers for kernels to compute with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "cpu_kernels/bfloat16.h"

namespace moesaic::bench {

/// bf16 values between -2 and 2 with all bits in use: a tile unit computes slower with them than with zeros.
inline void FillOperands(std::span<std::byte> memory) {
  static const std::vector<BFloat16> kValues = [] {
    std::minstd_rand random;
    std::vector<BFloat16> values(4099);  // a prime: no two tiles are alike
    for (BFloat16& value : values) value = ToBFloat16(static_cast<float>(random()) / static_cast<float>(1u << 29) - 2.0f);
    return values;
  }();
  while (!memory.empty()) {
    const std::size_t bytes = std::min(memory.size(), kValues.size() * sizeof(BFloat16));
    std::memcpy(memory.data(), kValues.data(), bytes);
    memory = memory.subspan(bytes);
  }
}

}  // namespace moesaic::bench
