// The weights of a dense layer, packed once. One copy serves forward and backward.
#pragma once

#include <cstdint>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// W [N, K], as torch's Linear has it. bf16 is kept as stored tiles, rows of N with contiguous K: x W^T contracts along their
/// columns (the direct form, the faster one), dY W along their rows (the unpack form). fp32 is kept in panels (Fp32GemmArgs).
///
/// Threads: constant after construction.
class PackedMatrix {
 public:
  /// @param weight  [N, K] bf16 or fp32, any strides; it may be freed afterwards
  /// Throws std::invalid_argument naming "weight" on another shape or type or an empty one, std::bad_alloc.
  PackedMatrix(const TensorView& weight, threadpool::Pool& pool);

  DType dtype() const { return dtype_; }
  std::int64_t rows() const { return rows_; }        ///< N
  std::int64_t columns() const { return columns_; }  ///< K
  std::int64_t bytes() const { return data_.bytes(); }

  /// Of bf16.
  const TileMatrix& tiles() const { return tiles_; }
  /// Of fp32.
  const float* panels() const { return static_cast<const float*>(data_.data()); }

  /// Writes W back.
  /// @param weight  [N, K] of dtype(), any strides. Throws std::invalid_argument on another shape or type.
  void Unpack(const TensorView& weight, threadpool::Pool& pool) const;

 private:
  DType dtype_;
  std::int64_t rows_;
  std::int64_t columns_;
  AlignedBuffer data_;
  TileMatrix tiles_;
};

}  // namespace moesaic::fused
