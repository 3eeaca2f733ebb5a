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

/// The numbers of W that come next, fetched into L2 a few lines with each block of rows: a panel is read once for all rows, and
/// what misses the cache then is waited for. It took a tenth of the time.
class Fp32Next {
 public:
  Fp32Next(const Fp32GemmArgs& args, std::int64_t depth_from, std::int64_t panel) {
    const std::int64_t depth = args.k - depth_from;
    if (args.transposed || depth <= 0) return;
    const std::int64_t panels = args.count - panel < kFp32Panels ? args.count - panel : kFp32Panels;
    panel_floats_ = 16 * RoundUp(args.k, 16);
    from_ = args.panels + (args.first + panel) * panel_floats_ + 16 * depth_from;
    depth_ = depth < kFp32Depth ? depth : kFp32Depth;
    lines_ = panels * depth_;
    share_ = (lines_ * kFp32Rows + args.rows - 1) / args.rows;
  }

  MOESAIC_INLINE void FetchSome() {
    const std::int64_t end = line_ + share_ < lines_ ? line_ + share_ : lines_;
    for (; line_ < end; ++line_) __builtin_prefetch(from_ + line_ / depth_ * panel_floats_ + 16 * (line_ % depth_), 0, 2);
  }

 private:
  const float* from_ = nullptr;
  std::int64_t panel_floats_ = 0, depth_ = 1, lines_ = 0, share_ = 0, line_ = 0;
};

template <int kPanels>
inline void Fp32Rows(const Fp32GemmArgs& args, std::int64_t depth_from, std::int64_t depth, const float* const* b, float* c,
                     Fp32Next next) {
  for (std::int64_t t = 0; t < args.rows; t += kFp32Rows) {
    next.FetchSome();
    const Fp32BlockFunction block = Fp32BlockFor<kPanels, kFp32Rows>(args.rows - t);
    block(args.a + t * args.lda + depth_from, args.lda, b, depth, c + t * args.ldc, args.ldc, depth_from > 0);
  }
}

/// Columns from panel p on, `depth` numbers of the contraction from k on.
inline void Fp32Part(const Fp32GemmArgs& args, std::int64_t k, std::int64_t depth, std::int64_t p) {
  const std::int64_t panel_floats = 16 * RoundUp(args.k, 16);
  const std::int64_t panels = args.count - p < kFp32Panels ? args.count - p : kFp32Panels;
  const float* b[kFp32Panels] = {};
  for (std::int64_t j = 0; j < panels; ++j) {
    const std::int64_t panel = args.first + p + j;
    if (!args.transposed) {
      b[j] = args.panels + panel * panel_floats + 16 * k;
      continue;
    }
    // Blocks of 16 x 16: W[n][k], where k lies along memory's rows, becomes rows of n.
    float* block = args.scratch + j * 16 * kFp32Depth;
    for (std::int64_t n = 0; n < depth; n += 16) {
      const float* lies = args.panels + (k + n) / 16 * panel_floats + 256 * panel;
      Transpose16x16(reinterpret_cast<const BFloat16*>(lies), reinterpret_cast<BFloat16*>(block + 16 * n));
    }
    b[j] = block;
  }
  const bool last = p + kFp32Panels >= args.count;
  const Fp32Next next(args, last ? k + kFp32Depth : k, last ? 0 : p + kFp32Panels);
  float* c = args.c + 16 * p;
  if constexpr (kFp32Panels == 3) {
    if (panels == 3) return Fp32Rows<3>(args, k, depth, b, c, next);
    if (panels == 2) return Fp32Rows<2>(args, k, depth, b, c, next);
  }
  Fp32Rows<1>(args, k, depth, b, c, next);
}

/// All columns for a part of the contraction before the next: so much of A's rows is small, and the caches have room for the
/// sums. Four parts of a panel at a time, whose sums are touched less often, were slower by 5 to 10%.
inline void Fp32Gemm(const Fp32GemmArgs& args) {
  const std::int64_t depth = args.transposed ? args.n : args.k;
  for (std::int64_t k = 0; k < depth; k += kFp32Depth) {
    const std::int64_t now = depth - k < kFp32Depth ? depth - k : kFp32Depth;
    for (std::int64_t p = 0; p < args.count; p += kFp32Panels) Fp32Part(args, k, now, p);
  }
}

}  // namespace
