// The tile interface of amx_cell.h in plain C++: the portable tier, and the way to test the AMX code's blocking and edges on
// any host. Denormals are not flushed here, and each product is rounded before it is added unless the compiler contracts the
// two.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/simd.h"

namespace {

struct EmulatedTiles {
  struct Scope {};

  template <int kTile>
  void Zero() {
    std::memset(registers_[kTile], 0, sizeof(registers_[kTile]));
  }
  template <int kTile>
  void Load(const void* rows, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(registers_[kTile] + 16 * i, static_cast<const char*>(rows) + i * stride, 64);
  }
  template <int kTile>
  void Store(void* rows, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(rows) + i * stride, registers_[kTile] + 16 * i, 64);
  }
  template <int kC, int kA, int kB>
  void MultiplyAdd() {
    const std::uint32_t* a = registers_[kA];
    const std::uint32_t* b = registers_[kB];
    std::uint32_t* c = registers_[kC];
    // The right factor's pairs as two rows of fp32; then four rows of C at a time stay in vector registers.
    F32x16 b_even[16], b_odd[16];
    for (int p = 0; p < 16; ++p) {
      U32x16 pair;
      std::memcpy(&pair, b + 16 * p, sizeof(pair));
      const U32x16 even = pair << 16, odd = pair & 0xffff0000u;
      std::memcpy(&b_even[p], &even, sizeof(even));
      std::memcpy(&b_odd[p], &odd, sizeof(odd));
    }
    for (int i = 0; i < 16; i += kRows) {
      F32x16 sum[kRows];
      for (int r = 0; r < kRows; ++r) std::memcpy(&sum[r], c + 16 * (i + r), sizeof(F32x16));
      for (int p = 0; p < 16; ++p) {
        for (int r = 0; r < kRows; ++r) {
          const std::uint32_t pair = a[16 * (i + r) + p];
          sum[r] += Half(pair << 16) * b_even[p];
          sum[r] += Half(pair & 0xffff0000u) * b_odd[p];
        }
      }
      for (int r = 0; r < kRows; ++r) std::memcpy(c + 16 * (i + r), &sum[r], sizeof(F32x16));
    }
  }

 private:
#if defined(__AVX2__)
  static constexpr int kRows = 4;
#else
  static constexpr int kRows = 2;
#endif

  static F32x16 Half(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return Broadcast(value);
  }

  alignas(64) std::uint32_t registers_[8][256];
};

}  // namespace
