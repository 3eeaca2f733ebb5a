// The AVX512-BF16 cell: one panel of left tiles (as two halves of 8 rows) by up to three panels of right tiles, 24
// accumulators. A step over one pair of the contraction loads 3 vectors, broadcasts 8 pairs and issues 24 VDPBF16PS: 11 loads
// in 12 cycles where two products and two loads start each cycle (Zen 4, Zen 5).
#pragma once

#include <immintrin.h>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/few_rows.h"
#include "cpu_kernels/simd.h"

namespace {

/// Figures: GB/s of two Zen 5 cores, memory of 75 to 82.
struct Avx512Bf16Product {
  /// GFLOP/s with 24, 32, 34, 42 rows in parts 869, 907, 758, 784; of transposed weights 780, 848, 851, 882.
  static constexpr std::int64_t kMostInParts = 32, kMostStored = kMostStoredRows;
  /// Two Zen 4 cores, memory of 34, 10, 12 rows 31, 30; in fours 26, 27. Intel, 16 threads, memory of 112 to 149, 61, 57; in
  /// fours 52, 55.
  static constexpr bool kTwelveInFours = false;
  /// 1 row, direct form: 73; every fourth line 66.
  static constexpr int kLinesFetchedAhead = 1;
  /// 4, 8 rows, direct form, 73, 65; to L2 61, 57. Unpack form, 8, 24 rows, 75, 37; 65, 28.
  static constexpr int kDirectFetchedTo = 3, kUnpackFetchedTo = 3;
  /// 9, 12 rows 72, 63; column by column 58, 58.
  static constexpr int kRowsInOrder = 12, kRowsInSuperblock = 12;
  using Vector = F32x16;
  using Left = BFloat16;
  MOESAIC_INLINE static F32x16 Add(F32x16 sum, U32x16 a, U32x16 b) {
    return (F32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};

/// Figures: GB/s of two Zen 4 cores.
struct Zen4Product : Avx512Bf16Product {
  /// Memory of 34, 34, 40, 48, 56 rows: 11.9, 10.2, 8.6, 7.4; transposed 11.2, 9.9, 8.4, 7.3.
  static constexpr std::int64_t kMostInParts = 48;
  /// The hardware, which sees lines met in their order, brings the others, and more of them at a time. (Memory of 60, direct
  /// form, 2 rows: 43; all lines prefetched 32.)
  static constexpr int kLinesFetchedAhead = 4;
  /// Into L1 each prefetch would hold one of a core's few line buffers as long as memory takes: 2, 4, 8 rows 31, 31, 28; to L2
  /// all lines 32, 44, 47.
  static constexpr int kDirectFetchedTo = 2, kUnpackFetchedTo = 2;
  /// Memory of 52 to 60: 8, 10, 12, 16 rows 44, 36, 33, 26; in order with 8 rows, of two superblocks with more 37, 33, 30, 25.
  static constexpr int kRowsInOrder = 6, kRowsInSuperblock = 20;
};

template <class ProductOfHost>
struct Avx512Bf16Cell {
  static constexpr int kMaxA = 1;
  static constexpr int kMaxB = 3;
  static constexpr bool kVectorsIdle = false;
  /// Longer contractions do not stay in L2, where pages of 4 KB share sets by chance. (One Zen 4 core, weights from memory,
  /// 64, 96, 128 rows x 7,168, of the ceiling 0.55, 0.83, 0.76; in slices of 24 tiles 0.90, 0.88, 0.91, of 32 0.91 all three,
  /// of 48 0.91, 0.94, 0.89.)
  static constexpr std::int64_t kSliceTiles = 32;
  using Product = ProductOfHost;
  struct Scope {};

  template <int NA, int NB, class Aside>
  static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
    static_assert(NA == 1);
    Half<NB>(runs, count, 0, c, ldc, accumulate, aside);
    Half<NB>(runs, count, 8, c + 8 * ldc, ldc, accumulate, aside);
  }

 private:
  static __m512bh Pairs(const BFloat16* p) { return (__m512bh)_mm512_load_si512(p); }

  /// Not inlined, so that the loop has all registers for itself. (Within a caller of two products GCC 12 kept one of 24 sums on
  /// the stack: fused layers took 1.13 to 1.18 times as long on two Zen 5 cores.)
  template <int NB, class Aside>
  [[gnu::noinline]] static void Half(const CellRun* runs, int count, int first_row, float* c, std::int64_t ldc, bool accumulate,
                                     Aside& aside) {
    __m512 sum[8][NB];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 3
      for (int j = 0; j < NB; ++j) sum[i][j] = accumulate ? _mm512_load_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    }
    typename Aside::Steps steps(aside);
    for (int r = 0; r < count; ++r) {
      const CellRun& run = runs[r];
      if (first_row == 0) steps.NextRun();
      for (std::int64_t k = 0; k < run.length; ++k) {
        const BFloat16* a = run.a[0] + k * run.a_stride + 32 * first_row;
        const BFloat16* b[NB];
#pragma GCC unroll 3
        for (int j = 0; j < NB; ++j) b[j] = run.b[j] + k * run.b_stride;
        for (int p = 0; p < 16; ++p) {
          __m512bh right[NB];
#pragma GCC unroll 3
          for (int j = 0; j < NB; ++j) right[j] = Pairs(b[j] + 32 * p);
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) {
            int pair;
            __builtin_memcpy(&pair, a + 32 * i + 2 * p, sizeof(pair));
            const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
            for (int j = 0; j < NB; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
          }
        }
        if (first_row == 0) steps.Next();
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 3
      for (int j = 0; j < NB; ++j) _mm512_store_ps(c + i * ldc + 16 * j, sum[i][j]);
    }
  }
};

}  // namespace
