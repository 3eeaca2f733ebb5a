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

/// A and B as tiles, stored [r, K] and [N, r] with the ranks padded to whole tiles, and what a block of rows makes of them.
class LowRankTiles {
 public:
  /// Without memory. @param low_rank  checked, or undefined; it must outlive this object
  explicit LowRankTiles(const LowRank& low_rank);

  bool empty() const { return tasks() == 0; }
  const TileMatrix& a() const { return a_; }
  const TileMatrix& b() const { return b_; }

  /// Takes memory for the tiles.
  void Bind(Carver& carver);
  /// Packing is so many tasks, in any order.
  std::int64_t tasks() const { return tasks_of_a_ + tasks_of_b_; }
  void Pack(std::int64_t task, const KernelTier& kernels) const;

  /// Memory for L or P of a block: as a factor of its product, and fp32 on the way there.
  struct Block {
    SplitTiles low;
    float* values = nullptr;      ///< [rows][padded rank]
    float* transposed = nullptr;  ///< [padded rank][SumsPitch(rows)]; L alone
  };
  /// @param rows  of the largest block, a multiple of 16
  /// @param is_l  L, else P
  Block Take(Carver& carver, std::int64_t rows, bool is_l) const;

  /// Where a block's numbers of each rank go as well.
  struct Kept {
    float* low = nullptr;  ///< [r][stride]; null: nowhere
    std::int64_t stride = 0;
  };
  /// L = s x A^T as pairs, or as stored tiles where `row_count` says so (DirectGemmArgs); `x` is tiles of the same kind.
  void MultiplyByA(const KernelTier& kernels, const TileMatrix& x, std::int64_t rows, std::int64_t row_count, const Kept& kept,
                   Block& block) const;
  /// P = s d B as operand tiles; so is `d`.
  /// @param scratch  of an unpack GEMM whose weights have as many rows as B
  void MultiplyByB(const KernelTier& kernels, const TileMatrix& d, std::int64_t rows, BFloat16* scratch, const Kept& kept,
                   Block& block) const;

 private:
  std::int64_t padded_rank() const { return b_.columns * kTileColumns; }
  /// Scales a block's values, keeps them, and lays them out.
  void Finish(const KernelTier& kernels, std::int64_t rows, std::int64_t panels, TileKind kind, const Kept& kept,
              Block& block) const;

  const LowRank& low_rank_;
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
