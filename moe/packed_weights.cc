#include "moe/packed_weights.h"

#include "moe/workspace.h"

namespace moesaic::moe {
namespace {

std::int64_t MatrixElements(const LayerConfig& config) {
  return TileMatrix::Weights(nullptr, config.intermediate_size, config.hidden_size).size();
}

}  // namespace

PackedWeights::PackedWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down,
                             threadpool::Pool& pool)
    : config_(config), buffer_(3 * config.num_experts * MatrixElements(config) * static_cast<std::int64_t>(sizeof(BFloat16))) {
  const std::int64_t panels = CeilDiv(config.intermediate_size, kPanelRows);
  // A panel of W_d^T is 16 columns of W_d: read 16 contiguous elements at a time, so fp32 scratch holds the transposed panel.
  const std::int64_t scratch_bytes =
      kPanelRows * RoundUp(config.hidden_size, kTileColumns) * static_cast<std::int64_t>(sizeof(float));
  pool.ParallelFor(3 * config.num_experts * panels, [&](std::int64_t task, int) {
    const std::int64_t index = task / panels;
    PackPanel(Source(index, gate_up, down), task % panels, Matrix(index), static_cast<float*>(ThreadScratch(scratch_bytes)));
  });
}

void PackedWeights::Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const {
  const std::int64_t panels = CeilDiv(config_.intermediate_size, kPanelRows);
  pool.ParallelFor(3 * config_.num_experts * panels, [&](std::int64_t task, int) {
    const std::int64_t index = task / panels;
    UnpackPanel(Matrix(index), task % panels, Source(index, gate_up, down));
  });
}

TileMatrix PackedWeights::Matrix(std::int64_t index) const {
  return TileMatrix::Weights(static_cast<BFloat16*>(buffer_.data()) + index * MatrixElements(config_),
                             config_.intermediate_size, config_.hidden_size);
}

MatrixView PackedWeights::Source(std::int64_t index, const TensorView& gate_up, const TensorView& down) const {
  const std::int64_t expert = index / 3, kind = index % 3, inner = config_.intermediate_size;
  if (kind == 2) return MatrixAt(down, expert, 0, config_.hidden_size).Transposed();
  return MatrixAt(gate_up, expert, kind * inner, inner);
}

}  // namespace moesaic::moe
