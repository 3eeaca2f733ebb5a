// Low-rank changes of dense layers: what LoRA adds to a product with packed weights, and its gradients.
//
//   forward    L = s x A^T    x (W + s B A)^T = x W^T + L B^T
//   backward   P = s d B      d (W + s B A)   = d W + P A         d_A = P^T x    d_B = d^T L
//
// A and B are packed in each call into the tiles of the weights, which costs little beside those: they are trained, and nothing
// tells reliably that an optimizer wrote them. So L B^T is one more segment of the contraction, and no pass over the result. L
// and P enter it as two bf16 parts (SplitTiles); where these are one step of the contraction, A and B hold each rank twice.
#pragma once

#include <cstdint>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/gemm/split_tiles.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_view.h"
#include "threadpool/pool.h"

namespace moesaic::fused {

/// s B A, beside W [N, K]. Views are 2-D, fp32 or bf16, with contiguous columns, and rounded to bf16 where they are multiplied.
struct LowRank {
  TensorView a;  ///< [r, K]; both undefined: there is none
  TensorView b;  ///< [N, r]
  float scale = 1.0f;
  float* low = nullptr;  ///< [r, T]: L^T or P^T, kept for gradients; null: not wanted

  bool defined() const { return a.defined() || b.defined(); }
  std::int64_t rank() const { return a.shape[0]; }
};

/// Throws std::invalid_argument naming "lora_a" or "lora_b" unless they fit a matrix [rows, columns].
void CheckLowRank(const LowRank& low_rank, std::int64_t rows, std::int64_t columns);

/// A and B as tiles: stored [r, K] and [N, r], the ranks padded to whole tiles.
class LowRankTiles {
 public:
  /// @param low_rank  defined; it must outlive this object
  /// @param carver    where the memory comes from
  LowRankTiles(const LowRank& low_rank, Carver& carver);
  /// None.
  LowRankTiles() = default;

  const TileMatrix& a() const { return a_; }
  const TileMatrix& b() const { return b_; }
  std::int64_t padded_rank() const { return b_.columns * kTileColumns; }

  /// Packing is so many tasks, in any order.
  std::int64_t tasks() const { return tasks_of_a_ + tasks_of_b_; }
  void Pack(std::int64_t task, const KernelTier& kernels) const;

 private:
  const LowRank* low_rank_ = nullptr;
  TileMatrix a_, b_;
  std::int64_t tasks_of_a_ = 0, tasks_of_b_ = 0;
};

/// The gradients of both factors: d_a = P^T x and d_b = d^T L.
struct LowRankGradArgs {
  const float* p = nullptr;    ///< [r, T]: P^T
  const float* low = nullptr;  ///< [r, T]: L^T
  TensorView x;                ///< [T, K] bf16, contiguous columns
  TensorView d;                ///< [T, N] bf16, contiguous columns
  std::int64_t rank = 0;
  float* d_a = nullptr;  ///< [r, K], overwritten
  float* d_b = nullptr;  ///< [N, r], overwritten
};

/// Sums over blocks of rows, which depend on the shapes alone, are added up in order: bitwise the same for any number of
/// threads. Throws std::invalid_argument naming the argument, std::bad_alloc.
void LowRankGrad(const LowRankGradArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::fused
