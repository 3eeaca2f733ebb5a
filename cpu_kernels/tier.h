// Builds a tier's table from its cell. Included once by each tier file, which is compiled with the flags of its instruction
// set; everything below it lies in an unnamed namespace, so that no code above the baseline is shared with other files.
#pragma once

#include <type_traits>

#include "cpu_kernels/elementwise/low_rank.h"
#include "cpu_kernels/elementwise/merge_rows.h"
#include "cpu_kernels/elementwise/pack_columns.h"
#include "cpu_kernels/elementwise/pack_rows.h"
#include "cpu_kernels/elementwise/store.h"
#include "cpu_kernels/elementwise/swiglu.h"
#include "cpu_kernels/elementwise/transpose_pairs.h"
#include "cpu_kernels/fused/few_queries.h"
#include "cpu_kernels/fused/fp32_gemm.h"
#include "cpu_kernels/fused/logits.h"
#include "cpu_kernels/fused/rotate.h"
#include "cpu_kernels/fused/row_epilogue.h"
#include "cpu_kernels/fused/silu_mul.h"
#include "cpu_kernels/fused/softmax_grad.h"
#include "cpu_kernels/fused/softmax_rows.h"
#include "cpu_kernels/gemm/direct_gemm.h"
#include "cpu_kernels/gemm/few_rows.h"
#include "cpu_kernels/gemm/gradient_gemm.h"
#include "cpu_kernels/gemm/register_direct.h"
#include "cpu_kernels/gemm/register_unpack.h"
#include "cpu_kernels/gemm/unpack_gemm.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/sampling/table.h"

namespace {

template <class Cell>
void Direct(const DirectGemmArgs& args) {
  if constexpr (!std::is_void_v<typename Cell::Product>) {
    using Product = typename Cell::Product;
    // The forms of stored rows take one product at a time.
    if (args.row_count > 0 && !args.twin.segments.empty()) {
      DirectGemmArgs one = args;
      one.twin = {};
      const TileMatrix& then = args.twin.segments[0].weights;
      one.prefetch = {then, args.first_panel, args.panels, 0, then.columns};
      Direct<Cell>(one);
      static_cast<DirectProduct&>(one) = args.twin;
      one.prefetch = args.prefetch;
      return Direct<Cell>(one);
    }
    if constexpr (Product::kMostStored > Product::kMostInParts) {
      if (args.row_count > Product::kMostInParts) return DirectInRegisters<Product>(args);
    }
    if (args.row_count > 0) {
      if constexpr (kIsShort<Product>)
        return FewRowsDirectAs<RowByRow<Product>>(args);
      else
        return FewRowsDirect<Product>(args);
    }
  }
  DirectGemm<Cell>(args);
}

template <class Cell>
void Unpack(const UnpackGemmArgs& args) {
  if constexpr (!std::is_void_v<typename Cell::Product>) {
    UnpackInRegisters<typename Cell::Product>(args);
  } else {
    UnpackGemm<Cell>(args);
  }
}

template <class Cell>
void Gradient(const GradientGemmArgs& args) {
  if constexpr (!std::is_void_v<typename Cell::Product>) {
    using Product = typename Cell::Product;
    if (args.few_rows > 0) {
      if constexpr (kIsShort<Product>)
        return ShortGradient(args);
      else
        return FewRowsGradient<Product>(args);
    }
  }
  GradientGemm<Cell>(args);
}

/// Of a cell that does it all.
struct NoStoredRows {
  static constexpr std::int64_t kMostInParts = 0, kMostStored = 0;
};

/// @tparam kLogitStreams  of the sampler's scans (sampling/table.h)
template <class Cell, int kLogitStreams = 1>
constexpr KernelTier MakeTier(const char* name, bool (*runs_here)()) {
  constexpr bool kAlone = std::is_void_v<typename Cell::Product>;
  using Stored = std::conditional_t<kAlone, NoStoredRows, typename Cell::Product>;
  return {name,
          Cell::kMaxA,
          Cell::kMaxB,
          Stored::kMostInParts,
          Stored::kMostStored,
          kAlone ? 0 : kMostGradientRows,
          Cell::kVectorsIdle,
          runs_here,
          Direct<Cell>,
          Unpack<Cell>,
          Gradient<Cell>,
          PackRows,
          TransposePairs,
          SwigluForward,
          SwigluBackward,
          MergeRows,
          Transpose,
          PackColumns,
          StoreColumns,
          StoreRows,
          ExpandAcrossExperts,
          ContractAcrossExperts,
          ContractAlongFeatures,
          ExpandAlongFeatures,
          OuterAlongFeatures,
          {TurnPanel, RowEpilogue, NormBackward, ActivationBackward, SiluMul, SiluMulBackward, Rotate, SoftmaxRows, SoftmaxGrad,
           RowDots, FoldLogits, LogitGrad, AttendFew, MergeAttended, Fp32Gemm},
          &kSamplingKernels<kLogitStreams>};
}

}  // namespace
