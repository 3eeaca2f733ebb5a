// A plain, slow, readable forward and backward of the experts of one layer: what every faster path is compared with.
//
// Everything is computed in double from the tensors as they are (nothing is rounded to bf16), one expert after the other, on
// the calling thread. Results are contiguous, row-major doubles, so that a comparison loses nothing in them. Formulas: layer.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/tensor_view.h"
#include "moe/config.h"

namespace moesaic::moe {

/// A row-major matrix of doubles.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols) : rows(rows), cols(cols), values(static_cast<std::size_t>(rows * cols)) {}
  double& operator()(std::int64_t i, std::int64_t j) { return values[static_cast<std::size_t>(i * cols + j)]; }
  double operator()(std::int64_t i, std::int64_t j) const { return values[static_cast<std::size_t>(i * cols + j)]; }
};

/// The base weights as a checkpoint has them, not packed: bf16, fp16 or fp32, any strides.
struct ReferenceWeights {
  TensorView gate_up;  ///< [E, 2I, H], gate rows first
  TensorView down;     ///< [E, H, I]
  Gate activation = Gate::kSilu;
};

/// The inputs of forward, as in ForwardArgs.
struct ReferenceInputs {
  TensorView hidden;                  ///< [T, H]
  TensorView ids;                     ///< [T, k] int32 or int64; -1 or E: skip
  TensorView weights;                 ///< [T, k]
  std::span<const LoraAdapter> lora;  ///< active adapters; they add up
};

/// Gradients of one pair: one matrix an expert; empty where the pair is not there.
struct ReferencePairGrad {
  std::vector<Matrix> a;  ///< E times [r, in]
  std::vector<Matrix> b;  ///< E times [out, r]
};

struct ReferenceAdapterGrad {
  ReferencePairGrad gate_up;
  ReferencePairGrad gate;
  ReferencePairGrad up;
  ReferencePairGrad down;
};

struct ReferenceGradients {
  Matrix hidden;                           ///< [T, H]
  Matrix weights;                          ///< [T, k]; exactly 0 for a skipped slot
  std::vector<ReferenceAdapterGrad> lora;  ///< one for each adapter
};

/// out [T, H]. Arguments must be valid (see validate.h).
Matrix ReferenceForward(const ReferenceWeights& weights, const ReferenceInputs& inputs);

/// Gradients of <d_out, out> with respect to hidden, the routing weights and every LoRA matrix. Recomputes the forward.
/// @param d_out  [T, H]
ReferenceGradients ReferenceBackward(const ReferenceWeights& weights, const ReferenceInputs& inputs, const TensorView& d_out);

}  // namespace moesaic::moe
