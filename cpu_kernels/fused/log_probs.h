// Log-probabilities of tokens from the last hidden states: the projection to the vocabulary and the softmax behind it, without
// the logits in memory; or from logits that are there.
//
//   z = scale (x W^T + bias)    log_prob = z[target] - log(sum over the vocabulary of e^z)
//
// Logits are made for blocks of rows and 512 tokens of the vocabulary, fp32, and met while they are in cache; backward makes
// them again. Their gradient is rounded to bf16 where x is bf16, and that of x is summed up in fp32.
//
// Every function waits for its end and may be called from several threads. Results are bitwise the same for any number of
// threads. Throws std::invalid_argument naming the argument, before anything is computed; std::bad_alloc.
#pragma once

#include <cstdint>

#include "cpu_kernels/fused/packed_matrix.h"
#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// Rows of x, and what they are projected by. Views are 2-D with contiguous columns.
struct LogProbsArgs {
  TensorView x;                          ///< [T, K] bf16 or fp32; without a weight [T, V], which stands for x W^T
  const PackedMatrix* weight = nullptr;  ///< [V, K] of x's type, or null
  const float* bias = nullptr;           ///< [V], or null
  float scale = 1;
  const std::int64_t* targets = nullptr;  ///< [T], below V; of a row with a negative one all results and its gradient are 0
};

/// What is wanted of each row: arrays [T], or null.
struct LogProbsResults {
  float* log_probs = nullptr;
  float* log_sums = nullptr;         ///< log of the sum of e^z
  float* entropies = nullptr;        ///< -sum of p log p, with p = e^(z - log_sum)
  float* log_squares = nullptr;      ///< log of the sum of p^2
  float* mean_logits = nullptr;      ///< of z
  std::uint8_t* are_top1 = nullptr;  ///< whether the target is the first of the largest z
};

void LogProbs(const LogProbsArgs& args, const LogProbsResults& results, threadpool::Pool& pool);

/// d_x = scale (the gradient of z) W, or without a weight scale (the gradient of z). Rows of which all gradients are 0 cost
/// nothing, whatever is in x.
struct LogProbsGradArgs {
  LogProbsArgs forward;
  const float* log_sums = nullptr;     ///< [T], as LogProbs gave it
  const float* entropies = nullptr;    ///< [T], with d_entropies
  const float* d_log_probs = nullptr;  ///< [T], or null: zeros
  const float* d_entropies = nullptr;  ///< [T], or null: zeros
  TensorView d_x;                      ///< [T, K] of x's type
};

void LogProbsGrad(const LogProbsGradArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
