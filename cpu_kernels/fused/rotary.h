// Rotary embeddings on a thread pool: each head's queries or keys are turned by the angles of their position (Su et al.,
// "RoFormer: Enhanced Transformer with Rotary Position Embedding", https://arxiv.org/abs/2104.09864; halves of a head make the
// pairs, as in transformers). PyTorch has five passes for it, and one more for each in its gradient.
#pragma once

#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// bf16 or fp32, all of one type, with contiguous columns.
struct RotaryArgs {
  TensorView x;       ///< [T, heads D], D a multiple of 32
  TensorView cos;     ///< [R, D], R a divisor of T: row t of x has row t modulo R
  TensorView sin;     ///< [R, D]
  TensorView out;     ///< [T, heads D]; may be x
  bool back = false;  ///< by the negative angles: of out's gradient x's
};

/// Rounded as RotateArgs has it. Waits for its end and may be called from several threads. Throws std::invalid_argument naming
/// the argument, before anything is computed.
void Rotary(const RotaryArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
