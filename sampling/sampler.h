// Tokens from logits: what is kept of a distribution, what is drawn from it, and how sure that was.
//
// A row holds V logits x. With a temperature T > 0 the distribution is p = softmax(x' / T), where x' are the logits after the
// penalties. Filters cut it in this order, that of transformers, each on what the ones before left, renormalised:
//   top_k: the k most probable tokens
//
//   top_p: the fewest most probable tokens whose probabilities reach it; a token stays while those before it sum up to less
//
//   min_p: tokens at least so many times as probable as the most probable one
//
//   typical_p: the fewest tokens nearest to the entropy, |-log p - H| ascending, whose probabilities reach it
//
// Order and ties: larger logits first, of equal ones (-0 = +0) the lower column first; so top_k keeps exactly k. typical_p:
// equal distances by column. The sets are exact: where the sums of the fast passes leave a doubt, the row is summed again in
// double precision.
//
// Values that are no numbers: a token of -infinity is never kept. +infinity: such tokens share the probability evenly, and no
// other has any. A row with a NaN, or of -infinity alone, is an error.
//
// T = 0 is greedy: the first token of the largest logit is kept; its probability is that of softmax(x').
//
// Random numbers are Philox4x32-10's, named by (seed, offset, row id, column): the token of a row depends on its logits, the
// options, these three numbers and the instruction set alone; not on the threads, nor on the rows beside it.
#pragma once

#include <cstdint>

#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::sampling {

struct Options {
  double temperature = 1;         ///< 0: greedy
  std::int64_t top_k = 0;         ///< 0, or V and more: off
  double top_p = 1;               ///< in (0, 1]; 1: off
  double min_p = 0;               ///< in [0, 1]; 0: off
  double typical_p = 1;           ///< in (0, 1]; 1: off
  double repetition_penalty = 1;  ///< > 0: x' = x / r where x >= 0, else x r, for tokens of the context; 1: off
  double frequency_penalty = 0;   ///< x' = x - f times the token's number in the context, after the repetition penalty
  double presence_penalty = 0;    ///< x' = x - q for tokens of the context
};

enum class Confidence {
  kProbability,  ///< of the chosen token, in the distribution that it was drawn from
  kMargin,       ///< the largest probability of that distribution less the second largest
  kEntropy,      ///< of that distribution, in nats
};

struct SampleArgs {
  TensorView logits;  ///< [rows, V] bf16, fp16 or fp32, any strides; only read, unless `scores` is the same memory
  Options options;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;  ///< which draw: the number of the step, say
  TensorView row_ids;        ///< [rows] int64 or int32 in [0, 2^32); undefined: 0, 1, 2, ...
  TensorView context;        ///< [rows, n] int64 or int32; numbers outside [0, V) count as padding; undefined: no penalties
  Confidence confidence_kind = Confidence::kProbability;
  // Results; null or undefined: not wanted.
  std::int64_t* ids = nullptr;   ///< [rows]
  float* confidence = nullptr;   ///< [rows]
  std::uint8_t* kept = nullptr;  ///< [rows, V], 1: kept
  TensorView scores;             ///< [rows, V] of the type of `logits`: x' / T where kept, else -infinity
};

/// Computes the results asked for. Rows in parallel; where there are fewer of them than threads, the passes over a row are
/// split. Throws std::invalid_argument naming the argument (shape, type, option, row id, a row without a distribution),
/// std::bad_alloc.
void Sample(const SampleArgs& args, threadpool::Pool& pool);

/// Gives the scratch memory that calls left behind for the next one back to the system.
void ReleaseScratch();

}  // namespace moesaic::sampling
