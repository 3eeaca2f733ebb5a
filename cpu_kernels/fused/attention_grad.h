// Gradients of attention (attention.h) on a thread pool, from what its forward left: no matrix of all scores is kept.
//
// With p the probabilities, again from q and k, and the sums over the keys s, the queries t and, of d_k and d_v, the heads that
// share them:
//   d_p[t][s] = d_out[t] . v[s]      d_e[t][s] = scale p[t][s] (d_p[t][s] - d_out[t] . out[t])
//   d_q[t] = sum of d_e[t][s] k[s]   d_k[s] = sum of d_e[t][s] q[t]   d_v[s] = sum of p[t][s] d_out[t]
//
// (FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 4; of a query two numbers are kept instead of the logarithm of
// its sum, which would be lost beside a large score.) A task takes a head of such a part as forward has; the last one that is
// done with the heads that share keys adds their d_k and d_v up, in their order. How many threads there are changes no bit.
#pragma once

#include "cpu_kernels/fused/attention.h"

namespace moesaic::fused {

/// Views as in AttentionArgs, bf16. Results are overwritten and share no memory with anything else.
struct AttentionGradArgs {
  AttentionArgs forward;                ///< as it was, with out as it was rounded; its most and inverse_sums are not looked at
  const float* most = nullptr;          ///< what forward wrote: contiguous [B][heads][T]
  const float* inverse_sums = nullptr;  ///< [B][heads][T]
  TensorView d_out;                     ///< [B, T, heads D], T at least 1
  TensorView d_q;                       ///< [B, T, heads D]
  TensorView d_k;                       ///< [B, S, key heads D]
  TensorView d_v;                       ///< [B, S, key heads D]
};

/// Sums are fp32; p and d_e are rounded to bf16 where they are multiplied, and so are the results. The bias has no gradient.
/// NaN of a query reaches d_k and d_v of all keys of its block, as NaN of a key reaches d_q. Each thread packs a head's keys,
/// values and keys transposed; the heads under way, about as many as threads and those that share keys with them, have as many
/// rows of sums for d_k and for d_v as the longest part has keys. Waits for its end and may be called from several threads.
/// Throws std::invalid_argument naming the argument, before anything is computed; std::bad_alloc.
void AttentionGrad(const AttentionGradArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
