// The oneDNN cell: tiles are unpacked to plain matrices, in fp32 or, where oneDNN has a bf16 product on this host, in bf16, and
// multiplied by one thread of oneDNN.
//
// The contraction is cut every 8 tiles of a run, wherever a call begins, and the products are added to C one after the other.
// All have one shape, with zeros beyond the panels, because oneDNN sums the rows at the end of a shape in another order.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/onednn_product.h"
#include "cpu_kernels/simd.h"

namespace {

struct OneDnnCell {
  static constexpr int kMaxA = 2;
  static constexpr int kMaxB = 2;
  static constexpr bool kVectorsIdle = false;
  static constexpr std::int64_t kSliceTiles = 0;
  using Product = void;
  using Scope = OneDnnOnThisThread;

  template <int NA, int NB, class Aside>
  static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
    static const bool has_bf16 = OneDnnHasBf16();
    typename Aside::Steps steps(aside);
    for (int r = 0; r < count; ++r) {
      steps.NextRun();
      for (std::int64_t k = 0; k < runs[r].length; k += kDepth) {
        const std::int64_t depth = runs[r].length - k < kDepth ? runs[r].length - k : kDepth;
        if (has_bf16) {
          Part<BFloat16, NA, NB>(runs[r], k, depth, c, ldc, accumulate);
        } else {
          Part<float, NA, NB>(runs[r], k, depth, c, ldc, accumulate);
        }
        accumulate = true;
        for (std::int64_t i = 0; i < depth; ++i) steps.Next();
      }
    }
  }

 private:
  static_assert(kPanelRows == kOneDnnRows && kMaxB * kPanelRows == kOneDnnColumns);

  /// Tiles of the contraction in one product: fp32 factors of 16 and 32 KB.
  static constexpr std::int64_t kDepth = 8;

  /// C (+)= the product of `depth` tiles from tile k of the run on.
  template <class Number, int NA, int NB>
  static void Part(const CellRun& run, std::int64_t k, std::int64_t depth, float* c, std::int64_t ldc, bool accumulate) {
    alignas(64) Number left[kOneDnnRows * kDepth * kTileColumns], right[kDepth * kTileColumns * kOneDnnColumns];
    alignas(64) float product[kOneDnnRows * kOneDnnColumns];
    if constexpr (NB == 1) std::memset(right, 0, sizeof(right));
    for (int b = 0; b < NB; ++b) UnpackRight(run.b[b] + k * run.b_stride, run.b_stride, depth, right + 16 * b);
    for (int a = 0; a < NA; ++a) {
      UnpackLeft(run.a[a] + k * run.a_stride, run.a_stride, depth, left);
      OneDnnProduct(left, right, product, static_cast<int>(depth * kTileColumns));
      for (int i = 0; i < 16; ++i) {
        for (int b = 0; b < NB; ++b) {
          float* sum = c + (16 * a + i) * ldc + 16 * b;
          const F32x16 part = LoadF32(product + i * kOneDnnColumns + 16 * b);
          StoreF32(sum, accumulate ? LoadF32(sum) + part : part);
        }
      }
    }
  }

  /// Rows of tiles, one after the other.
  template <class Number>
  static void UnpackLeft(const BFloat16* tiles, std::int64_t stride, std::int64_t depth, Number* left) {
    for (std::int64_t t = 0; t < depth; ++t) {
      for (int i = 0; i < 16; ++i) {
        const BFloat16* from = tiles + t * stride + kTileColumns * i;
        Number* to = left + (i * depth + t) * kTileColumns;
        if constexpr (sizeof(Number) == sizeof(BFloat16)) {
          std::memcpy(to, from, kTileColumns * sizeof(BFloat16));
        } else {
          StoreF32(to, LoadBf16(from));
          StoreF32(to + 16, LoadBf16(from + 16));
        }
      }
    }
  }

  /// The first numbers of a row of pairs, and below them the second ones.
  template <class Number>
  static void UnpackRight(const BFloat16* tiles, std::int64_t stride, std::int64_t depth, Number* right) {
    for (std::int64_t t = 0; t < depth; ++t) {
      for (int p = 0; p < 16; ++p, right += 2 * kOneDnnColumns) {
        const auto pairs = LoadVector<U32x16>(tiles + t * stride + 32 * p);
        if constexpr (sizeof(Number) == sizeof(BFloat16)) {
          StoreVector(right, LowWords(pairs));
          StoreVector(right + kOneDnnColumns, HighWords(pairs));
        } else {
          StoreVector(right, pairs << 16);
          StoreVector(right + kOneDnnColumns, pairs & 0xffff0000u);
        }
      }
    }
  }
};

}  // namespace
