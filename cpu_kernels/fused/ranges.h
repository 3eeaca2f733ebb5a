// The stages of fused dense layers, as timers and NVTX ranges of the category "fused".
#pragma once

#include <cstdint>

#include "profiling/range.h"

namespace moesaic::fused {

enum class FusedStage : std::int8_t {
  kPack,                ///< pack: rows of x, and the factors of an adapter, become tiles
  kGemm,                ///< gemm; and turning its sums, 16 rows at a time
  kLowRank,             ///< low_rank: what an adapter makes of the input, L
  kEpilogue,            ///< epilogue: bias, activation, residual, rounding
  kNorm,                ///< norm: the same, with a norm
  kSiluMul,             ///< silu_mul
  kRotary,              ///< rotary
  kFewQueries,          ///< few_queries: attention of few queries, all of it
  kSoftmax,             ///< softmax: of attention's scores, and rounding them to tiles; statistics of logits
  kBackwardNorm,        ///< backward_norm
  kBackwardActivation,  ///< backward_activation
  kBackwardGemm,        ///< backward_gemm: the gradient of x; of attention and of losses all products, and storing them
  kBackwardLowRank,     ///< backward_low_rank: P, and an adapter's gradients
  kBackwardSiluMul,     ///< backward_silu_mul
  kBackwardRotary,      ///< backward_rotary
  kBackwardSoftmax,     ///< backward_softmax: probabilities again, and gradients of scores or logits
};

profiling::RangeId RangeOf(FusedStage stage);

/// The stage, for as long as it lives on this thread.
class FusedRange {
 public:
  FusedRange(FusedStage stage, double flops, double bytes) : range_(RangeOf(stage), {flops, bytes}) {}

 private:
  profiling::Range range_;
};

}  // namespace moesaic::fused
