#include "moe/backward.h"

#include <algorithm>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {

std::int64_t BackwardBuffers::Bind(void* memory, std::int64_t rows, std::int64_t hidden, std::int64_t inner,
                                   const LoraCall& lora, bool in_chunks) {
  Carver carver(memory);
  const auto place = [&](bool wanted, TileMatrix tiles) {
    if (!wanted) return TileMatrix{};
    tiles.data = carver.Take<BFloat16>(tiles.size());
    return tiles;
  };
  const auto take = [&](bool wanted, std::int64_t r, std::int64_t c) {
    return place(wanted, TileMatrix::Activations(nullptr, r, c));
  };
  const std::int64_t r1 = lora.padded_input_rank();
  const bool d_b = lora.wants(kLoraBGate) || lora.wants(kLoraBUp);
  const auto take_split = [&](std::int64_t rank) {
    return SplitTiles{take(rank > 0, rows, rank), take(!LoraCall::IsTwice(rank), rows, rank)};
  };
  d = take(true, rows, hidden);
  q = take_split(lora.down_rank());
  d_gate = take(true, rows, inner);
  d_up = take(true, rows, inner);
  p = take_split(lora.input_rank());
  d_weight = carver.Take<float>(CeilDiv(inner, kIntermediateUnit) * rows);
  p_t = {take(lora.wants(kLoraA), r1, rows), take(lora.wants(kLoraA), r1, rows)};
  const TileMatrix by_rank1 = TileMatrix::RowPairs(nullptr, rows, lora.input_rank());
  const TileMatrix by_rank2 = TileMatrix::RowPairs(nullptr, rows, lora.down_rank());
  low = place(d_b, by_rank1);
  wv = place(lora.wants(kLoraBDownT), by_rank2);
  wq = {place(lora.wants(kLoraADownT), by_rank2), place(lora.wants(kLoraADownT), by_rank2)};
  for (const LoraMatrix m : kIntermediateSums) {
    const bool wanted = in_chunks && lora.wants(m);
    partial[m] = wanted ? carver.Take<float>(RoundUp(inner, kTileColumns) * lora.gradient_columns(m)) : nullptr;
  }
  return carver.used();
}

BackwardPass::BackwardPass(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args,
                           const threadpool::Pool& pool)
    : Pass(Phase::kBackward, config, weights, args.lora, args.d_lora, args.weights.shape[0], args.weights.shape[1], pool),
      args_(args) {
  routing = args.saved->routing;
  const std::int64_t slots = tokens * top_k;
  const std::int64_t parts = shards.size() > 1 && args.d_weights.defined() ? static_cast<std::int64_t>(shards.size()) : 0;
  Carver sizes;
  sizes.Take<std::uint8_t>(slots);
  sizes.Take<float>(parts * slots);
  workspace->tokens.Ensure(sizes.used());
  Carver carver(workspace->tokens.data());
  auto* used = carver.Take<std::uint8_t>(slots);
  if (parts > 0) shard_d_weights_ = carver.Take<float>(parts * slots);
  std::fill(used, used + slots, std::uint8_t{0});
  const std::int32_t* offsets = routing;
  for (std::int64_t s = 0; s < offsets[config.num_experts]; ++s) used[routing[config.num_experts + 1 + s]] = 1;
  slot_used_ = used;
}

BackwardBuffers BackwardPass::BuffersOf(std::int64_t job) const {
  BackwardBuffers buffers;
  buffers.Bind(JobMemory(job), RoundUp(jobs[job].rows, kTileColumns), config.hidden_size, InnerOf(jobs[job]), lora, in_chunks_);
  return buffers;
}

void BackwardPass::LoadWeights(const Job& job, float* routing_weights) const {
  const std::int32_t* slots = Slots(job);
  for (std::int64_t i = 0; i < job.rows; ++i) routing_weights[i] = LoadFloat(args_.weights, slots[i] / top_k, slots[i] % top_k);
}

bool BackwardPass::wants_gate_up() const { return args_.d_hidden.defined() || lora.wants(kLoraA); }

void BackwardPass::Run(threadpool::Pool& pool) {
  Plan();
  in_chunks_ = std::any_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.previous >= 0; });
  hidden_ = MakeRowSource(args_.hidden, workspace->dense_hidden);
  d_out_ = MakeRowSource(args_.d_out, workspace->dense);
  if (args_.d_hidden.defined()) workspace->rows.Ensure(RowBytes());
  if (args_.d_weights.defined()) {
    for (std::int64_t s = 0; s < tokens * top_k; ++s) {
      if (slot_used_[s] == 0) StoreFloat(args_.d_weights, s / top_k, s % top_k, 0, 0.0f);
    }
  }
  BackwardBuffers measure;
  Allocate(measure.Bind(nullptr, most_rows, config.hidden_size, LargestShard(shards), lora, in_chunks_));

  std::vector<Stage> stages;
  stages.push_back({Task<&BackwardPass::ScatterAndPack>, Cut::kWhole});
  stages.push_back({Task<&BackwardPass::DownBase>, Cut::kIntermediate});
  if (in_chunks_ && (lora.wants(kLoraBGate) || lora.wants(kLoraBUp) || lora.wants(kLoraADownT))) {
    stages.push_back({Task<&BackwardPass::SumIntermediate>, Cut::kIntermediate, true});
  }
  stages.push_back({Task<&BackwardPass::GateUpLora>, Cut::kWhole});
  if (lora.wants(kLoraA) || lora.wants(kLoraBDownT)) {
    stages.push_back({Task<&BackwardPass::SumHidden>, Cut::kHidden, true});
  }
  if (args_.d_hidden.defined()) stages.push_back({Task<&BackwardPass::GateUpBase>, Cut::kHidden});
  const TaskId computed = AddJobs(this, stages);
  if (args_.d_hidden.defined() || shard_d_weights_ != nullptr) {
    for (std::int64_t t = 0; t < tokens; t += blocking.tokens_per_merge) {
      graph.AddEdge(computed, graph.Add([](void* self, std::int64_t i, int) { Self(self).Merge(i); }, this, t));
    }
  }
  pool.Run(graph);
}

void RunBackward(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args, threadpool::Pool& pool) {
  PhaseRange range(Phase::kBackward);
  BackwardPass pass(config, weights, args, pool);
  pass.Run(pool);
}

}  // namespace moesaic::moe
