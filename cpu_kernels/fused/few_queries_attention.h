// Attention of few queries on a thread pool, as decoding has it, forward alone: groups of heads share keys and values.
//
//   out[b][t][h] = sum over s of p[t][s] v[b][h / n][s]
//   p[t] = softmax over s of (scale q[b][h][t] . k[b][h / n][s] + bias[b][s])
//
// with n heads of queries to one of keys. A task takes 128 keys, so that few heads and many keys are work for all threads; the
// last one that is done with a head adds its parts up, in their order. Nothing of it depends on the number of threads.
#pragma once

#include <cstdint>

#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// bf16 views with contiguous columns, D a multiple of 32; heads of all sequences follow each other.
struct FewQueriesAttentionArgs {
  TensorView q;  ///< [B heads, T, D]
  TensorView k;  ///< [B key heads, S, D]: as many heads as q, or a divisor of them
  TensorView v;  ///< as k
  float scale = 1;
  const float* bias = nullptr;  ///< contiguous [B, S], 0 or -infinity; null: 0
  bool causal = false;          ///< the last query sees all keys, each one before it one less
  TensorView out;               ///< [B, T, heads D]
};

/// In fp32, but for powers, which are within 1e-4, and the result, which is rounded. Where a query sees no key its result is 0.
/// NaN passes through, also from a value that a query does not see. Work grows with T, memory with T, heads, sequences and keys
/// / 128; attention.h is for many queries. Waits for its end and may be called from several threads. Throws
/// std::invalid_argument naming the argument, before anything is computed; std::bad_alloc.
void FewQueriesAttention(const FewQueriesAttentionArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
