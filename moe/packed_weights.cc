#include "moe/packed_weights.h"

#include <algorithm>

#include "moe/workspace.h"
#include "threadpool/topology.h"

namespace moesaic::moe {

PackedWeights::PackedWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down,
                             threadpool::Pool& pool)
    : config_(config), shards_(ShardIntermediate(config.intermediate_size, pool.topology())) {
  if (shards_.size() > 1) {
    PackShards(gate_up, down, pool);
    return;
  }
  whole_ = AlignedBuffer(3 * config.num_experts * MatrixElements(shards_[0]) * static_cast<std::int64_t>(sizeof(BFloat16)));
  const std::int64_t panels = CeilDiv(config.intermediate_size, kPanelRows);
  pool.ParallelFor(3 * config.num_experts * panels, [&](std::int64_t task, int) {
    const std::int64_t index = task / panels;
    PackInto(0, index, task % panels, Source(shards_[0], index, gate_up, down));
  });
}

/// Every page is touched first by a thread of its node, whether or not the system lets us bind it there.
void PackedWeights::PackShards(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) {
  struct Context {
    PackedWeights& self;
    const TensorView& gate_up;
    const TensorView& down;
    std::int64_t matrices;
  } context{*this, gate_up, down, 3 * config_.num_experts};
  const threadpool::Topology& machine = pool.topology();
  threadpool::TaskGraph graph;
  graph.KeepOnNodes();
  for (std::size_t s = 0; s < shards_.size(); ++s) {
    const Shard& shard = shards_[s];
    of_node_.emplace_back(context.matrices * MatrixElements(shard) * static_cast<std::int64_t>(sizeof(BFloat16)),
                          machine.is_host ? machine.nodes[static_cast<std::size_t>(shard.node)].os_index : -1);
    for (std::int64_t index = 0; index < context.matrices; ++index) {
      const auto pack = [](void* data, std::int64_t task, int) {
        const Context& call = *static_cast<const Context*>(data);
        const std::int64_t at = task / call.matrices, matrix = task % call.matrices;
        const Shard& of = call.self.shards_[static_cast<std::size_t>(at)];
        const MatrixView source = call.self.Source(of, matrix, call.gate_up, call.down);
        for (std::int64_t panel = 0; panel < CeilDiv(of.size, kPanelRows); ++panel) {
          call.self.PackInto(at, matrix, panel, source);
        }
      };
      graph.AddOnNode(pack, &context, static_cast<std::int64_t>(s) * context.matrices + index, shard.node);
    }
  }
  pool.Run(graph);
}

/// A panel of W_d^T is 16 columns of W_d: read 16 contiguous elements at a time, so fp32 scratch holds the transposed panel.
void PackedWeights::PackInto(std::int64_t shard, std::int64_t index, std::int64_t panel, const MatrixView& source) const {
  const std::int64_t bytes = kPanelRows * RoundUp(config_.hidden_size, kTileColumns) * static_cast<std::int64_t>(sizeof(float));
  PackPanel(source, panel, Matrix(shard, index), static_cast<float*>(ThreadScratch(bytes)));
}

void PackedWeights::Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const {
  std::int64_t first = 0;
  std::vector<std::int64_t> first_panel;  // of each shard
  for (const Shard& shard : shards_) {
    first_panel.push_back(first);
    first += CeilDiv(shard.size, kPanelRows);
  }
  pool.ParallelFor(3 * config_.num_experts * first, [&, panels = first](std::int64_t task, int) {
    const std::int64_t index = task / panels, panel = task % panels;
    const auto shard = std::upper_bound(first_panel.begin(), first_panel.end(), panel) - first_panel.begin() - 1;
    const MatrixView target = Source(shards_[static_cast<std::size_t>(shard)], index, gate_up, down);
    UnpackPanel(Matrix(shard, index), panel - first_panel[static_cast<std::size_t>(shard)], target);
  });
}

std::int64_t PackedWeights::bytes() const {
  std::int64_t bytes = whole_.bytes();
  for (const threadpool::NodeMemory& memory : of_node_) bytes += memory.bytes();
  return bytes;
}

std::int64_t PackedWeights::MatrixElements(const Shard& shard) const {
  return TileMatrix::Weights(nullptr, shard.size, config_.hidden_size).size();
}

TileMatrix PackedWeights::Matrix(std::int64_t shard, std::int64_t index) const {
  const Shard& of = shards_[static_cast<std::size_t>(shard)];
  void* data = of_node_.empty() ? whole_.data() : of_node_[static_cast<std::size_t>(shard)].data();
  return TileMatrix::Weights(static_cast<BFloat16*>(data) + index * MatrixElements(of), of.size, config_.hidden_size);
}

MatrixView PackedWeights::Source(const Shard& shard, std::int64_t index, const TensorView& gate_up,
                                 const TensorView& down) const {
  const std::int64_t expert = index / 3, kind = index % 3;
  if (kind < 2) return MatrixAt(gate_up, expert, kind * config_.intermediate_size + shard.begin, shard.size);
  MatrixView rows = MatrixAt(down, expert, 0, config_.hidden_size).Transposed();
  rows.data = static_cast<char*>(rows.data) + shard.begin * rows.row_stride * SizeOf(rows.dtype);
  rows.rows = shard.size;
  return rows;
}

}  // namespace moesaic::moe
