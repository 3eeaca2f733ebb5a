// The cell for hosts without a bf16 product: bf16 is widened to fp32 and multiplied by fused multiply-adds, in vectors of
// kLanes floats. Written in vector types, so the same source serves AVX-512, AVX2 and the baseline, and is
// tested on every host.
//
// Left tiles are widened once for all right panels, to L1: each of their numbers is then one broadcast load. Right tiles are
// widened in registers, a shift or a mask for a vector that kGroup rows of products use.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/few_rows.h"
#include "cpu_kernels/simd.h"

namespace {

/// A vector of the machine: 4, 8 or 16 floats, and its bits. Spelled out, for GCC drops a vector_size that depends on a
/// template.
template <int kLanes>
struct VectorOf;
template <>
struct VectorOf<4> {
  using Float = float __attribute__((vector_size(16)));
  using Bits = std::uint32_t __attribute__((vector_size(16)));
};
template <>
struct VectorOf<8> {
  using Float = F32x8;
  using Bits = U32x8;
};
template <>
struct VectorOf<16> {
  using Float = F32x16;
  using Bits = U32x16;
};

/// Figures: GB/s of Intel hosts.
struct WidenProduct {
  /// One core of a 5th generation Xeon, 768 x 2,048 from memory, 10, 12, 13, 16, 20 rows in parts 338, 344, 450, 450, 576 us;
  /// of transposed weights 395, 437, 367, 409, 487. From caches, of the ceiling, 17, 33, 60, 100 rows in parts or by cells
  /// 0.54, 0.55, 0.59, 0.71; of transposed weights 0.66, 0.73, 0.76, 0.77.
  static constexpr std::int64_t kMostInParts = 12, kMostStored = kMostStoredRows;
  /// 16 threads, 10, 11, 12 rows 63, 64, 64; as 8 and a rest 55, 49, 44.
  static constexpr bool kTwelveInFours = true;
  /// 16 threads, memory of 198, 1 row, direct and unpack, into L1: 168 and 147; every fourth to L2 152 and 125.
  static constexpr int kLinesFetchedAhead = 1;
  /// 4 rows 137; to L2 128.
  static constexpr int kDirectFetchedTo = 3;
  /// 2, 8 rows, memory of 105, 93, 73; into L1 90, 72.
  static constexpr int kUnpackFetchedTo = 2;
  /// 9, 12 rows, memory of 100 to 130, 68, 60; column by column 60, 55.
  static constexpr int kRowsInOrder = 12, kRowsInSuperblock = 12;
  /// Widened once for all that they meet. (The same core, unpack form, 8, 16, 256 rows 0.54, 0.55, 0.56; widened 0.71, 0.75,
  /// 0.79.)
  using Vector = F32x16;
  using Left = float;
  /// The first or the second numbers of pairs.
  MOESAIC_INLINE static F32x16 Widened(U32x16 pairs, int half) {
    return (F32x16)(half == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
  MOESAIC_INLINE static F32x16 Add(F32x16 sum, U32x16 a, U32x16 b) {
    return sum + (F32x16)(a << 16) * (F32x16)(b << 16) + (F32x16)(a & 0xffff0000u) * (F32x16)(b & 0xffff0000u);
  }
};

/// The same in vectors of 8 floats (short_vectors.h). Figures: one Zen 3 core, of the time of others.
struct ShortProduct {
  /// Cells compute whole panels: 16, 24, 33, 48, 64 rows by rows or by cells 0.94, 0.81, 0.77, 1.12, 1.12.
  static constexpr std::int64_t kMostInParts = 56, kMostStored = kMostInParts;
  static constexpr int kLinesFetchedAhead = 1;
  /// 1 to 64 rows from memory, to L1 0.94 to 1.06, in no order; in the unpack form 0.94 to 1.15.
  static constexpr int kDirectFetchedTo = 2, kUnpackFetchedTo = 2;
  /// No more than are in registers with a whole line; one superblock at a time or two 0.93 to 1.07, in no order.
  static constexpr int kRowsInOrder = 2, kRowsInSuperblock = 6;
  using Vector = F32x8;
  using Left = float;
};

/// @tparam kLanes   floats in a vector of the machine: 4, 8 or 16
/// @tparam kPanels  right panels multiplied at a time: kPanels * 16 / kLanes vectors of each row of C are in registers
/// @tparam kGroup   rows of C in registers at a time
template <int kLanes, int kPanels, int kGroup>
struct WidenCell {
  static constexpr int kMaxA = 1;
  static constexpr int kMaxB = 3;
  static constexpr bool kVectorsIdle = false;
  /// As of the other cell of AVX-512. (128 rows x 7,168, of the ceiling: 0.64, in slices 0.79.)
  static constexpr std::int64_t kSliceTiles = 32;
  using Product = std::conditional_t<kLanes == 16, WidenProduct, std::conditional_t<kLanes == 8, ShortProduct, void>>;
  struct Scope {};

  template <int NA, int NB, class Aside>
  static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
    static_assert(NA == 1);
    alignas(64) float left[16 * kRowFloats];
    typename Aside::Steps steps(aside);
    for (int r = 0; r < count; ++r) {
      const CellRun& run = runs[r];
      steps.NextRun();
      for (std::int64_t k = 0; k < run.length; k += kDepth) {
        const std::int64_t depth = run.length - k < kDepth ? run.length - k : kDepth;
        WidenLeft(run.a[0] + k * run.a_stride, run.a_stride, depth, left);
        Panels<NB, 0>(run, k, depth, left, c, ldc, accumulate);
        accumulate = true;
        for (std::int64_t i = 0; i < depth; ++i) steps.Next();
      }
    }
  }

 private:
  using Vector = typename VectorOf<kLanes>::Float;
  using Bits = typename VectorOf<kLanes>::Bits;

  /// Tiles of the contraction between two visits of C: 8 KB of left tiles and 4 KB of each right panel stay in L1. (Twice as
  /// many took an eighth longer with 256 rows, avx512.)
  static constexpr std::int64_t kDepth = kSuperblock / 2;
  static constexpr std::int64_t kRowFloats = kDepth * kTileColumns;

  /// Of each row of a tile, the 16 first numbers of its pairs and then the 16 second ones.
  static void WidenLeft(const BFloat16* tiles, std::int64_t stride, std::int64_t depth, float* left) {
    for (std::int64_t t = 0; t < depth; ++t) {
      for (int i = 0; i < 16; ++i) {
        for (int v = 0; v < 16; v += kLanes) {
          Bits pairs;
          std::memcpy(&pairs, tiles + t * stride + 32 * i + 2 * v, sizeof(pairs));
          const Bits first = pairs << 16, second = pairs & 0xffff0000u;
          std::memcpy(left + i * kRowFloats + 32 * t + v, &first, sizeof(first));
          std::memcpy(left + i * kRowFloats + 32 * t + 16 + v, &second, sizeof(second));
        }
      }
    }
  }

  template <int NB, int kFirst>
  MOESAIC_INLINE static void Panels(const CellRun& run, std::int64_t k, std::int64_t depth, const float* left, float* c,
                                    std::int64_t ldc, bool accumulate) {
    if constexpr (kFirst < NB) {
      constexpr int kCount = NB - kFirst < kPanels ? NB - kFirst : kPanels;
      const BFloat16* right[kCount];
      for (int b = 0; b < kCount; ++b) right[b] = run.b[kFirst + b] + k * run.b_stride;
      Rows<kCount, 16>(right, run.b_stride, depth, left, c + 16 * kFirst, ldc, accumulate);
      Panels<NB, kFirst + kPanels>(run, k, depth, left, c, ldc, accumulate);
    }
  }

  /// The last kRows rows of a panel, in groups of even size.
  template <int kCount, int kRows>
  MOESAIC_INLINE static void Rows(const BFloat16* const* right, std::int64_t stride, std::int64_t depth, const float* left,
                                  float* c, std::int64_t ldc, bool accumulate) {
    if constexpr (kRows > 0) {
      constexpr int kGroups = (kRows + kGroup - 1) / kGroup;
      constexpr int kNow = (kRows + kGroups - 1) / kGroups;
      Block<kNow, kCount>(right, stride, depth, left + (16 - kRows) * kRowFloats, c + (16 - kRows) * ldc, ldc, accumulate);
      Rows<kCount, kRows - kNow>(right, stride, depth, left, c, ldc, accumulate);
    }
  }

  /// kRows rows of kCount panels of C, in registers along `depth` tiles.
  template <int kRows, int kCount>
  [[gnu::noinline]] static void Block(const BFloat16* const* right, std::int64_t stride, std::int64_t depth, const float* left,
                                      float* c, std::int64_t ldc, bool accumulate) {
    constexpr int kVectors = kCount * 16 / kLanes;
    Vector sum[kRows][kVectors] = {};
    if (accumulate) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) std::memcpy(&sum[i][j], c + i * ldc + j * kLanes, sizeof(Vector));
      }
    }
    for (std::int64_t t = 0; t < depth; ++t) {
      const BFloat16* b[kCount];
#pragma GCC unroll 3
      for (int j = 0; j < kCount; ++j) b[j] = right[j] + t * stride;
      const float* a = left + 32 * t;
      for (int p = 0; p < 16; ++p) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Vector wide[kVectors];
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j) {
            Bits pairs;
            std::memcpy(&pairs, b[j * kLanes / 16] + 32 * p + 2 * (j * kLanes % 16), sizeof(pairs));
            pairs = half == 0 ? pairs << 16 : pairs & 0xffff0000u;
            std::memcpy(&wide[j], &pairs, sizeof(pairs));
          }
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
            const float number = a[i * kRowFloats + 16 * half + p];
#pragma GCC unroll 8
            for (int j = 0; j < kVectors; ++j) sum[i][j] += number * wide[j];
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) std::memcpy(c + i * ldc + j * kLanes, &sum[i][j], sizeof(Vector));
    }
  }
};

}  // namespace
