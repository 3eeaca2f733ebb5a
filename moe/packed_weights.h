// The frozen base weights of a layer: one packed copy, which forward and backward both read.
#pragma once

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/gemm/pack.h"
#include "moe/config.h"
#include "threadpool/pool.h"

namespace moesaic::moe {

/// All three matrices are stored as rows of I with contiguous H: W_g and W_u [I, H] as they come, W_d as its transpose.
class PackedWeights {
 public:
  /// @param gate_up [E, 2I, H], @param down [E, H, I]: bf16, fp16 or fp32 (rounded to bf16), validated. Throws std::bad_alloc.
  PackedWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool);

  TileMatrix gate(std::int64_t expert) const { return Matrix(3 * expert); }
  TileMatrix up(std::int64_t expert) const { return Matrix(3 * expert + 1); }
  TileMatrix down_transposed(std::int64_t expert) const { return Matrix(3 * expert + 2); }

  std::int64_t bytes() const { return buffer_.bytes(); }

  /// Writes the weights back to views of the constructor's shapes.
  void Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const;

 private:
  TileMatrix Matrix(std::int64_t index) const;
  MatrixView Source(std::int64_t index, const TensorView& gate_up, const TensorView& down) const;

  LayerConfig config_;
  AlignedBuffer buffer_;
};

}  // namespace moesaic::moe
