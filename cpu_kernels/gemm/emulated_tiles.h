// The tile interface of amx_cell.h in plain C++: the portable tier, and the way to test the AMX code's blocking and edges on
// any host. Denormals are not flushed here, and each product is rounded before it is added unless the compiler contracts the
// two.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/tiles.h"

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
  void LoadPassing(const void* rows, std::int64_t stride) {
    Load<kTile>(rows, stride);
  }
  template <int kTile>
  void Store(void* rows, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(rows) + i * stride, registers_[kTile] + 16 * i, 64);
  }
  template <int kC, int kA, int kB>
  void MultiplyAdd() {
    const std::uint32_t* a = registers_[kA];
    float* c = reinterpret_cast<float*>(registers_[kC]);
    // The right factor's pairs as two rows of fp32.
    alignas(64) float b[32][16];
    for (int p = 0; p < 16; ++p) {
      for (int j = 0; j < 16; ++j) {
        const std::uint32_t pair = registers_[kB][16 * p + j];
        b[2 * p][j] = Half(pair << 16);
        b[2 * p + 1][j] = Half(pair & 0xffff0000u);
      }
    }
    // Four rows of C and two of the machine's vectors at a time: eight accumulators stay in registers.
    for (int j = 0; j < 16; j += 2 * kLanes) {
      for (int i = 0; i < 16; i += 4) {
        Vector sum[4][2];
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          std::memcpy(&sum[r][0], c + 16 * (i + r) + j, sizeof(Vector));
          std::memcpy(&sum[r][1], c + 16 * (i + r) + j + kLanes, sizeof(Vector));
        }
        for (int p = 0; p < 32; ++p) {
          Vector right[2];
          std::memcpy(&right, &b[p][j], sizeof(right));
#pragma GCC unroll 4
          for (int r = 0; r < 4; ++r) {
            const std::uint32_t pair = a[16 * (i + r) + p / 2];
            const float left = Half(p % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
            sum[r][0] += left * right[0];
            sum[r][1] += left * right[1];
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          std::memcpy(c + 16 * (i + r) + j, &sum[r][0], sizeof(Vector));
          std::memcpy(c + 16 * (i + r) + j + kLanes, &sum[r][1], sizeof(Vector));
        }
      }
    }
  }

 private:
  static constexpr int kLanes = 4;
  using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

  static float Half(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  alignas(64) std::uint32_t registers_[8][256];
};

}  // namespace
