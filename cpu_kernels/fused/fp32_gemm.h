// Fp32Gemm (fused_kernels.h has the contract): fused multiply-adds on broadcast numbers of A, in vectors of the machine.
//
// Not from bf16 products: three bf16 parts of each factor and their six products that count would reach fp32's precision, but
// cost three times this on AVX512-BF16 and six times on every tier without bf16 products. On AMX they would take about half the
// time of this.
#pragma once

#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

// As many sums as the registers hold.
inline constexpr int kFp32Rows = kNativeLanes == 16 ? 8 : kNativeLanes == 8 ? 6 : 2;
inline constexpr int kFp32Panels = kNativeLanes == 16 ? 3 : 1;

/// The numbers of W that come next, fetched into L2 a few lines beside each number of the contraction, in the order of memory:
/// a panel is read once for all rows, and what misses the cache then is waited for. (All lines of a block of rows at once: two
/// Zen 5 cores, 32 rows 1.2 times as long, 2,048 1.04.)
class Fp32Next {
 public:
  Fp32Next() = default;
  /// @param steps  calls of FetchSome()
  Fp32Next(const Fp32GemmArgs& args, std::int64_t depth_from, std::int64_t panel, std::int64_t steps) {
    const std::int64_t rest = args.k - depth_from;
    if (args.transposed || rest <= 0) return;
    const std::int64_t depth = rest < kFp32Depth ? rest : kFp32Depth;
    const std::int64_t panels = args.count - panel < kFp32Panels ? args.count - panel : kFp32Panels;
    panel_ = 16 * RoundUp(args.k, 16);
    gap_ = panel_ - 16 * depth;
    line_ = args.panels + (args.first + panel) * panel_ + 16 * depth_from;
    end_ = line_ + 16 * depth;
    last_ = end_ + (panels - 1) * panel_;
    each_ = (panels * depth + steps - 1) / steps;
  }

  MOESAIC_INLINE void FetchSome() {
    for (std::int64_t i = each_; i > 0 && line_ != last_; --i) {
      if (line_ == end_) {
        line_ += gap_;
        end_ += panel_;
      }
      __builtin_prefetch(line_, 0, 2);
      line_ += 16;
    }
  }

 private:
  const float *line_ = nullptr, *end_ = nullptr, *last_ = nullptr;
  std::int64_t panel_ = 0, gap_ = 0, each_ = 0;
};

/// Of a panel alone lines are fetched so far ahead.
inline constexpr std::int64_t kFp32Ahead = 32;

/// C (+)= A B for kRows rows and kPanels panels of 16 columns, `depth` numbers of the contraction.
template <int kRows, int kPanels>
[[gnu::noinline]] void Fp32Block(const float* a, std::int64_t lda, const float* const* b, std::int64_t depth, float* c,
                                 std::int64_t ldc, bool accumulate, Fp32Next& all_next) {
  constexpr int kVectors = kPanels * 16 / kNativeLanes;
  NativeF32 sum[kRows][kVectors] = {};
  Fp32Next next = all_next;  // in registers
  for (std::int64_t k = 0; k < depth; ++k) {
    next.FetchSome();
    if constexpr (kPanels == 1) __builtin_prefetch(b[0] + 16 * (k + kFp32Ahead));
    NativeF32 right[kVectors];
#pragma GCC unroll 12
    for (int j = 0; j < kVectors; ++j) right[j] = Load(b[j * kNativeLanes / 16] + 16 * k + j * kNativeLanes % 16);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const NativeF32 number = InAllLanes(a[i * lda + k]);
#pragma GCC unroll 12
      for (int j = 0; j < kVectors; ++j) sum[i][j] = MultiplyAdd(number, right[j], sum[i][j]);
    }
  }
  all_next = next;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kVectors; ++j) {
      float* to = c + i * ldc + j * kNativeLanes;
      Store(to, accumulate ? Load(to) + sum[i][j] : sum[i][j]);
    }
  }
}

using Fp32BlockFunction = void (*)(const float*, std::int64_t, const float* const*, std::int64_t, float*, std::int64_t, bool,
                                   Fp32Next&);

template <int kPanels, int kRows>
inline Fp32BlockFunction Fp32BlockFor(std::int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return Fp32BlockFor<kPanels, kRows - 1>(rows);
  }
  return Fp32Block<kRows, kPanels>;
}

template <int kPanels>
inline void Fp32Rows(const Fp32GemmArgs& args, std::int64_t depth_from, std::int64_t depth, const float* const* b, float* c,
                     Fp32Next next) {
  for (std::int64_t t = 0; t < args.rows; t += kFp32Rows) {
    const Fp32BlockFunction block = Fp32BlockFor<kPanels, kFp32Rows>(args.rows - t);
    block(args.a + t * args.lda + depth_from, args.lda, b, depth, c + t * args.ldc, args.ldc, depth_from > 0, next);
  }
}

/// Columns of up to kFp32Panels panels from p on, `depth` numbers of the contraction from k on.
inline void Fp32Part(const Fp32GemmArgs& args, std::int64_t k, std::int64_t depth, std::int64_t p, std::int64_t panels,
                     const Fp32Next& next) {
  const std::int64_t panel_floats = 16 * RoundUp(args.k, 16);
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
  float* c = args.c + 16 * p;
  if constexpr (kFp32Panels == 3) {
    if (panels == 3) return Fp32Rows<3>(args, k, depth, b, c, next);
    if (panels == 2) return Fp32Rows<2>(args, k, depth, b, c, next);
  }
  Fp32Rows<1>(args, k, depth, b, c, next);
}

/// Few rows: a panel after the other, so that W passes by in the order of memory. (Two Zen 5 cores, of the time of three panels
/// side by side, with what comes next fetched at once before: 1 and 8 rows 0.45 to 0.51 from L3, 0.75 to 0.82 from memory.)
inline void Fp32FewRows(const Fp32GemmArgs& args) {
  for (std::int64_t p = 0; p < args.count; ++p) {
    for (std::int64_t k = 0; k < args.k; k += kFp32Depth) {
      Fp32Part(args, k, args.k - k < kFp32Depth ? args.k - k : kFp32Depth, p, 1, {});
    }
  }
}

/// All columns for a part of the contraction before the next: so much of A's rows is small, and the caches have room for the
/// sums. Four parts of a panel at a time, whose sums are touched less often, were slower by 5 to 10%.
inline void Fp32Gemm(const Fp32GemmArgs& args) {
  if (!args.transposed && args.rows <= kFp32Rows) return Fp32FewRows(args);
  const std::int64_t depth = args.transposed ? args.n : args.k;
  for (std::int64_t k = 0; k < depth; k += kFp32Depth) {
    const std::int64_t now = depth - k < kFp32Depth ? depth - k : kFp32Depth;
    const std::int64_t steps = (args.rows + kFp32Rows - 1) / kFp32Rows * now;
    for (std::int64_t p = 0, panels; p < args.count; p += panels) {
      panels = args.count - p < kFp32Panels ? args.count - p : kFp32Panels;
      const bool last = p + panels == args.count;
      Fp32Part(args, k, now, p, panels, Fp32Next(args, last ? k + kFp32Depth : k, last ? 0 : p + panels, steps));
    }
  }
}

}  // namespace
