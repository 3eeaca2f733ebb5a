// Fused dense layers on a thread pool: a GEMM over packed weights, and all that follows it on its rows while they are in cache.
//
//   v = activation(x (W + s B A)^T + bias + addend) + residual        out = norm(v)
//
// A task takes a block of rows whose sums stay in its core's L2 cache: x is read once, out written once. With few rows the
// columns are divided too; then a norm waits for all of them.
//
// Every function waits for its end and may be called from several threads. Results are bitwise the same for any number of
// threads. Throws std::invalid_argument naming the argument, before anything is computed; std::bad_alloc.
#pragma once

#include <cstdint>

#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/fused/low_rank.h"
#include "cpu_kernels/fused/packed_matrix.h"
#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// Views are 2-D [T, columns] with contiguous columns, of the type of x; vectors are fp32 and contiguous.
struct LinearArgs {
  TensorView x;                          ///< [T, K]; [T, N] if transposed
  const PackedMatrix* weight = nullptr;  ///< of x's type; null: v = x, and nothing before the norm may be given
  bool transposed = false;               ///< x W instead of x W^T: a gradient going back
  LowRank low_rank;                      ///< of bf16 weights; or none
  const float* bias = nullptr;           ///< [N], or null
  TensorView addend;                     ///< [T, N], or undefined
  Activation activation = Activation::kNone;
  TensorView residual;  ///< [T, N], or undefined
  Norm norm = Norm::kNone;
  const float* gamma = nullptr;  ///< [N]; null: ones
  const float* beta = nullptr;   ///< [N]; null: zeros
  float epsilon = 0;
  TensorView out;                ///< [T, N]; may be x where there is no weight, or the residual. Undefined, without a norm:
                                 ///< only low_rank.low is wanted
  TensorView pre;                ///< contiguous [T, N], or undefined: what the activation takes, kept for backward
  TensorView normalized;         ///< contiguous [T, N], or undefined: out without gamma and beta, kept for backward
  float* inverse_std = nullptr;  ///< [T], with normalized
};

void Linear(const LinearArgs& args, threadpool::Pool& pool);

/// Of `norm` (NormBackwardArgs has the formula). All views contiguous [T, columns] of one type.
struct NormGradArgs {
  Norm norm = Norm::kLayerNorm;
  TensorView d_out;
  TensorView normalized;
  const float* inverse_std = nullptr;  ///< [T]
  const float* gamma = nullptr;        ///< [columns]; null: ones
  TensorView d_in;
  float* d_gamma = nullptr;  ///< [columns], overwritten
  float* d_beta = nullptr;   ///< [columns], overwritten
};

/// Column sums are taken over blocks of 64 rows, and these are added up in order.
void NormGrad(const NormGradArgs& args, threadpool::Pool& pool);

/// d_pre = d_out * activation'(pre). All views contiguous and of one type and shape; d_pre may be d_out.
void ActivationGrad(Activation activation, const TensorView& d_out, const TensorView& pre, const TensorView& d_pre,
                    threadpool::Pool& pool);

/// out = silu(x[:, :I]) * x[:, I:].
/// @param x    [T, 2I] with contiguous columns
/// @param out  [T, I] with contiguous columns, of x's type; may be x[:, :I]
void SiluMulRows(const TensorView& x, const TensorView& out, threadpool::Pool& pool);

/// d_x [T, 2I] from d_out [T, I]; contiguous columns, one type.
void SiluMulGrad(const TensorView& d_out, const TensorView& x, const TensorView& d_x, threadpool::Pool& pool);

}  // namespace moesaic::fused
