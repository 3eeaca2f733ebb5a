// Attention of many queries on a thread pool, forward (attention_grad.h has its gradients): scores, softmax and values, head by
// head, in one pass.
//
//   out[b][t][h] = sum over s of p[t][s] v[b][s][h / n]
//   p[t] = softmax over s of (scale q[b][t][h] . k[b][s][h / n] + bias[b][s])
//
// with n heads of queries to one of keys; causal, a query sees the keys up to its own.
//
// A task takes a head, or some of its queries, of a sequence or of a part of it that no others see: keys and values that these
// see become tiles, once for all heads that share them and come to the same thread one after the other, and a block of queries
// meets all keys, whose scores stay in its core's L2 cache. How work is cut changes no bit of the result.
#pragma once

#include <cstdint>

#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// bf16 views with contiguous columns; heads lie side by side in them.
struct AttentionArgs {
  TensorView q;  ///< [B, T, heads D]
  TensorView k;  ///< [B, S, key heads D]
  TensorView v;  ///< [B, S, key heads D]
  std::int64_t heads = 1;
  float scale = 1;
  const float* bias = nullptr;  ///< contiguous [B, S], or null: none. -infinity: a key that nobody sees; where a query sees
                                ///< none, its result is 0
  TensorView out;               ///< [B, T, heads D]
  std::int64_t key_heads = 0;   ///< a divisor of heads; 0: as many
  bool causal = false;          ///< the last query sees all keys, each one before it one less
  /// Written for attention_grad.h, contiguous [B][heads][T], or null: of each query the largest score, as SoftmaxRowsArgs::most
  /// has it, and the inverse of its powers' sum.
  float* most = nullptr;
  float* inverse_sums = nullptr;
  /// Contiguous [B, T], or null: the first key that each query sees, as sequences that share a row and windows have it; 0 or
  /// less: all. Where a query sees none, its result is 0. Causal rows are cut where sequences begin, and blocks of keys that a
  /// block of queries does not see are left out.
  const std::int32_t* first_keys = nullptr;
};

/// Scores and sums are fp32, p is rounded to bf16 before it is divided by its sum. NaN passes through; from a value that a
/// query does not see it may, for p is 0 there and is multiplied in whole tiles. Waits for its end and may be called from
/// several threads. Throws std::invalid_argument naming the argument, before anything is computed; std::bad_alloc.
void Attention(const AttentionArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
