// The frozen base weights of a layer: one packed copy, which forward and backward both read.
#pragma once

#include <span>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/gemm/pack.h"
#include "moe/config.h"
#include "moe/shards.h"
#include "threadpool/node_memory.h"
#include "threadpool/pool.h"

namespace moesaic::moe {

/// All three matrices are stored as rows of I with contiguous H: W_g and W_u [I, H] as they come, W_d as its transpose. Each
/// shard of I lies on its NUMA node.
class PackedWeights {
 public:
  /// @param gate_up [E, 2I, H], @param down [E, H, I]: bf16, fp16 or fp32 (rounded to bf16), validated. Throws std::bad_alloc.
  PackedWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool);

  /// [shard's size, H] each.
  TileMatrix gate(std::int64_t expert, std::int64_t shard = 0) const { return Matrix(shard, 3 * expert); }
  TileMatrix up(std::int64_t expert, std::int64_t shard = 0) const { return Matrix(shard, 3 * expert + 1); }
  TileMatrix down_transposed(std::int64_t expert, std::int64_t shard = 0) const { return Matrix(shard, 3 * expert + 2); }

  std::span<const Shard> shards() const { return shards_; }
  std::int64_t bytes() const;

  /// Writes the weights back to views of the constructor's shapes.
  void Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const;

 private:
  void PackShards(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool);
  std::int64_t MatrixElements(const Shard& shard) const;
  TileMatrix Matrix(std::int64_t shard, std::int64_t index) const;
  MatrixView Source(const Shard& shard, std::int64_t index, const TensorView& gate_up, const TensorView& down) const;
  void PackInto(std::int64_t shard, std::int64_t index, std::int64_t panel, const MatrixView& source) const;

  LayerConfig config_;
  std::vector<Shard> shards_;
  AlignedBuffer whole_;                          // of one shard
  std::vector<threadpool::NodeMemory> of_node_;  // of several
};

}  // namespace moesaic::moe
