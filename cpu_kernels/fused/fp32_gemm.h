// Fp32Gemm (fused_kernels.h has the contract): fused multiply-adds on broadcast numbers of A, in vectors of the machine.
//
// Not from bf16 products: three bf16 parts of each factor and their six products that count would reach fp32's precision, but
// cost three times this on AVX512-BF16 and six times on every tier without bf16 products. On AMX they would take about half the
// time of this.
#pragma once

#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

#if defined(__AVX512F__)
inline constexpr int kFp32Lanes = 16, kFp32Rows = 8, kFp32Panels = 3;
using Fp32Vector = F32x16;
#elif defined(__AVX2__)
inline constexpr int kFp32Lanes = 8, kFp32Rows = 6, kFp32Panels = 1;
using Fp32Vector = float __attribute__((vector_size(32)));
#else
inline constexpr int kFp32Lanes = 4, kFp32Rows = 2, kFp32Panels = 1;
using Fp32Vector = float __attribute__((vector_size(16)));
#endif

/// Numbers of the contraction in one part of the sum.
inline constexpr std::int64_t kFp32Depth = 128;

/// C (+)= A B for kRows rows and kPanels panels of 16 columns, `depth` numbers of the contraction.
template <int kRows, int kPanels>
[[gnu::noinline]] void Fp32Block(const float* a, std::int64_t lda, const float* const* b, std::int64_t depth, float* c,
                                 std::int64_t ldc, bool accumulate) {
  constexpr int kVectors = kPanels * 16 / kFp32Lanes;
  Fp32Vector sum[kRows][kVectors] = {};
  for (std::int64_t k = 0; k < depth; ++k) {
    Fp32Vector right[kVectors];
#pragma GCC unroll 12
    for (int j = 0; j < kVectors; ++j) {
      std::memcpy(&right[j], b[j * kFp32Lanes / 16] + 16 * k + j * kFp32Lanes % 16, sizeof(right[j]));
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const float number = a[i * lda + k];
#pragma GCC unroll 12
      for (int j = 0; j < kVectors; ++j) sum[i][j] += number * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kVectors; ++j) {
      Fp32Vector before{};
      if (accumulate) std::memcpy(&before, c + i * ldc + j * kFp32Lanes, sizeof(before));
      before += sum[i][j];
      std::memcpy(c + i * ldc + j * kFp32Lanes, &before, sizeof(before));
    }
  }
}

using Fp32BlockFunction = void (*)(const float*, std::int64_t, const float* const*, std::int64_t, float*, std::int64_t, bool);

template <int kPanels, int kRows>
inline Fp32BlockFunction Fp32BlockFor(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return Fp32BlockFor<kPanels, kRows - 1>(rows);
  }
  return Fp32Block<kRows, kPanels>;
}

template <int kPanels>
inline void Fp32Rows(const Fp32GemmArgs& args, std::int64_t depth_from, std::int64_t depth, const float* const* b, float* c) {
  for (std::int64_t t = 0; t < args.rows; t += kFp32Rows) {
    const Fp32BlockFunction block = Fp32BlockFor<kPanels, kFp32Rows>(args.rows - t);
    block(args.a + t * args.lda + depth_from, args.lda, b, depth, c + t * args.ldc, args.ldc, depth_from > 0);
  }
}

/// Columns from panel p on, parts [from, to) of the contraction.
inline void Fp32Panels(const Fp32GemmArgs& args, std::int64_t from, std::int64_t to, std::int64_t p) {
  const std::int64_t panel_floats = 16 * RoundUp(args.k, 16);
  const std::int64_t panels = args.count - p < kFp32Panels ? args.count - p : kFp32Panels;
  for (std::int64_t k = from; k < to; k += kFp32Depth) {
    const std::int64_t now = to - k < kFp32Depth ? to - k : kFp32Depth;
    const float* b[kFp32Panels] = {};
    for (std::int64_t j = 0; j < panels; ++j) {
      const std::int64_t panel = args.first + p + j;
      if (!args.transposed) {
        b[j] = args.panels + panel * panel_floats + 16 * k;
        continue;
      }
      // Blocks of 16 x 16: W[n][k], where k lies along memory's rows, becomes rows of n.
      float* block = args.scratch + j * 16 * kFp32Depth;
      for (std::int64_t n = 0; n < now; n += 16) {
        const float* lies = args.panels + (k + n) / 16 * panel_floats + 256 * panel;
        Transpose16x16(reinterpret_cast<const BFloat16*>(lies), reinterpret_cast<BFloat16*>(block + 16 * n));
      }
      b[j] = block;
    }
    float* c = args.c + 16 * p;
    if constexpr (kFp32Panels == 3) {
      if (panels == 3) {
        Fp32Rows<3>(args, k, now, b, c);
        continue;
      }
      if (panels == 2) {
        Fp32Rows<2>(args, k, now, b, c);
        continue;
      }
    }
    Fp32Rows<1>(args, k, now, b, c);
  }
}

inline void Fp32Gemm(const Fp32GemmArgs& args) {
  const std::int64_t depth = args.transposed ? args.n : args.k;
  for (std::int64_t step = 0; step < depth; step += kFp32GemmStep) {
    const std::int64_t end = depth - step < kFp32GemmStep ? depth : step + kFp32GemmStep;
    for (std::int64_t p = 0; p < args.count; p += kFp32Panels) Fp32Panels(args, step, end, p);
  }
}

}  // namespace
