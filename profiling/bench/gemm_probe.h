// One call of a GEMM kernel, repeated and timed on the calling thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/gemm/pack.h"
#include "cpu_kernels/kernels.h"

namespace moesaic::bench {

/// C [rows, columns] = activations [rows, contraction] times weights, in one of the forms of kernels.h. Not thread safe.
class GemmProbe {
 public:
  /// kGradient: the "weights" are activations too, laid out as row pairs.
  enum class Form { kDirect, kUnpack, kGradient };

  /// Packs the operands.
  /// @param tier         must run here
  /// @param activations  [rows, contraction], bf16, rows contiguous
  /// @param weights      direct: [columns, contraction]; else [contraction, columns]; bf16, rows contiguous
  /// @param copies       of the packed weights, used in turn: as many as exceed the caches, and each call reads memory; 1: the
  ///                     weights stay in whatever cache holds them
  /// Throws std::invalid_argument for sizes that do not fit together, std::bad_alloc.
  GemmProbe(const KernelTier& tier, Form form, const MatrixView& activations, const MatrixView& weights, int copies);

  /// Microseconds of each of `count` calls.
  std::vector<double> Measure(int count);

  /// The result of the last call. @param out  [rows, columns] fp32
  void Result(const MatrixView& out) const;

 private:
  void Call();

  void PackWeights(const MatrixView& weights);

  const KernelTier& tier_;
  const Form form_;
  const std::int64_t rows_;
  const std::int64_t columns_;
  const std::int64_t row_count_;  ///< as the layer has it: KernelTier::StoredRows()
  std::vector<AlignedBuffer> weight_buffers_;
  std::vector<TileMatrix> weights_;
  AlignedBuffer activation_buffer_;
  TileMatrix activations_;
  AlignedBuffer c_;
  std::int64_t ldc_ = 0;
  AlignedBuffer scratch_;
  std::size_t next_ = 0;
};

}  // namespace moesaic::bench
