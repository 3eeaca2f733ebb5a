#include "moe/backward.h"

#include <algorithm>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {

std::int64_t BackwardBuffers::Bind(void* memory, std::int64_t rows, std::int64_t hidden, std::int64_t inner,
                                   const LoraCall& lora, bool in_chunks, bool keeps_z) {
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
  d = take(true, rows, hidden);
  q = SplitTiles::Take(carver, rows, lora.down_rank());
  d_gate = take(true, rows, inner);
  d_up = take(true, rows, inner);
  p = SplitTiles::Take(carver, rows, lora.input_rank());
  z = take(keeps_z, rows, inner);
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
  const std::int64_t count = routing[config.num_experts];
  const bool all = count == slots;  // each slot is there once
  std::fill(used, used + slots, all ? std::uint8_t{1} : std::uint8_t{0});
  for (std::int64_t s = 0; !all && s < count; ++s) used[routing[config.num_experts + 1 + s]] = 1;
  slot_used_ = used;
}

BackwardBuffers BackwardPass::BuffersOf(std::int64_t job) const {
  BackwardBuffers buffers;
  buffers.Bind(JobMemory(job), RoundUp(jobs[job].rows, kTileColumns), config.hidden_size, InnerOf(jobs[job]), lora, in_chunks_,
               keeps_z());
  return buffers;
}

void BackwardPass::LoadWeights(const Job& job, float* routing_weights) const {
  const std::int32_t* slots = Slots(job);
  for (std::int64_t i = 0; i < job.rows; ++i) routing_weights[i] = LoadFloat(args_.weights, slots[i] / top_k, slots[i] % top_k);
}

bool BackwardPass::wants_gate_up() const { return args_.d_hidden.defined() || adapters().wants(kLoraA); }
bool BackwardPass::keeps_z() const { return in_place && adapters().wants(kLoraADownT); }

TaskId BackwardPass::BeginInPlace() {
  const std::int64_t count = tokens * top_k;
  workspace->in_place.Ensure(in_place->BindBackward(nullptr, row_pitch(), count, args_.d_hidden.defined()));
  in_place->BindBackward(workspace->in_place.data(), row_pitch(), count, args_.d_hidden.defined());
  const TaskId low = AddSweep(this, Sweep<&BackwardPass::LoadLow>, static_cast<std::int64_t>(jobs.size()), -1);
  return AddSweep(this, Sweep<&BackwardPass::ContractDown>, in_place->Sweeps(kLoraBDownT), low);
}

std::int64_t BackwardPass::GateUpSweeps(LoraMatrix m) const {
  return wants_gate_up() || adapters().wants(m) ? in_place->Sweeps(m) : 0;
}

TaskId BackwardPass::EndInPlace(TaskId computed) {
  const TaskId swept = Swept();
  const TaskId gate = AddSweep(this, Sweep<&BackwardPass::ContractGate>, GateUpSweeps(kLoraBGate), swept);
  const TaskId up = AddSweep(this, Sweep<&BackwardPass::ContractUp>, GateUpSweeps(kLoraBUp), swept);
  return Join(computed, AddSweep(this, Sweep<&BackwardPass::InputInPlace>, config.num_experts, Join(gate, up)));
}

void BackwardPass::LoadLow(std::int64_t index) {
  const Job& job = jobs[index];
  PhaseRange range(Phase::kD4LoraGrad);
  float routing_weights[kMaxChunkRows];
  LoadWeights(job, routing_weights);
  const std::int64_t r1 = adapters().input_rank(), r2 = adapters().down_rank();
  in_place->LoadLow(job, args_.saved->gate_up_low + job.begin * r1, args_.saved->down_low + job.begin * r2, routing_weights);
  for (std::int64_t i = 0; i < job.rows; ++i) in_place->SetOutputRow(job, i, d_out_.Row(Slots(job)[i] / top_k));
}

void BackwardPass::ContractDown(std::int64_t sweep) {
  const double flops = in_place->SweepFlops(kLoraBDownT);
  PhaseRange range(Phase::kD4LoraGrad, {.flops = adapters().wants(kLoraBDownT) ? 2 * flops : flops});
  in_place->ContractDown(sweep, d_out_.dtype);
}

void BackwardPass::ContractGate(std::int64_t sweep) { ContractGateUp(kLoraBGate, sweep, Phase::kGU3GateP, Phase::kGU3GateDB); }
void BackwardPass::ContractUp(std::int64_t sweep) { ContractGateUp(kLoraBUp, sweep, Phase::kGU3UpP, Phase::kGU3UpDB); }

void BackwardPass::ContractGateUp(LoraMatrix m, std::int64_t sweep, Phase p, Phase d_b) {
  const double flops = in_place->SweepFlops(m);
  PhaseRange range(p, {.flops = wants_gate_up() ? flops : 0}, {{d_b, {.flops = adapters().wants(m) ? flops : 0}}});
  in_place->ContractGateUp(m, sweep);
}

void BackwardPass::InputInPlace(std::int64_t expert) {
  const void* rows[kMostLowRankRows];
  const std::int32_t *offsets = routing, *slots = routing + config.num_experts + 1;
  for (std::int64_t r = offsets[expert]; r < offsets[expert + 1]; ++r)
    rows[r - offsets[expert]] = hidden_.Row(slots[r] / top_k);
  const double flops =
      2.0 * (offsets[expert + 1] - offsets[expert]) * adapters().input_rank() * static_cast<double>(config.hidden_size);
  PhaseRange range(Phase::kGU3GateDXLora, {.flops = args_.d_hidden.defined() ? flops : 0},
                   {{Phase::kGU3GateDA, {.flops = adapters().wants(kLoraA) ? flops : 0}}});
  in_place->InputGradients(expert, rows, hidden_.dtype);
}

void BackwardPass::Run(threadpool::Pool& pool) {
  {
    PhaseRange range(Phase::kD0Prepare);
    AllocateAndBuild();
  }
  pool.Run(graph);
}

void BackwardPass::AllocateAndBuild() {
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
  Allocate(measure.Bind(nullptr, most_rows, config.hidden_size, LargestShard(shards), lora, in_chunks_, keeps_z()));

  std::vector<Stage> stages;
  stages.push_back({Task<&BackwardPass::ScatterAndPack>, Cut::kWhole});
  stages.push_back({Task<&BackwardPass::DownBase>, Cut::kIntermediate, false, true});
  if (in_chunks_ && (lora.wants(kLoraBGate) || lora.wants(kLoraBUp) || lora.wants(kLoraADownT))) {
    stages.push_back({Task<&BackwardPass::SumIntermediate>, Cut::kIntermediate, true});
  }
  stages.push_back({Task<&BackwardPass::GateUpLora>, Cut::kWhole});
  if (lora.wants(kLoraA) || lora.wants(kLoraBDownT)) {
    stages.push_back({Task<&BackwardPass::SumHidden>, Cut::kHidden, true});
  }
  if (args_.d_hidden.defined()) stages.push_back({Task<&BackwardPass::GateUpBase>, Cut::kHidden});
  TaskId computed = AddJobs(this, stages, in_place ? BeginInPlace() : -1);
  if (in_place) computed = EndInPlace(computed);
  if (args_.d_hidden.defined() || shard_d_weights_ != nullptr) {
    for (std::int64_t t = 0; t < tokens; t += blocking.tokens_per_merge) {
      graph.AddEdge(computed, graph.Add([](void* self, std::int64_t i, int) { Self(self).Merge(i); }, this, t));
    }
  }
}

void RunBackward(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args, threadpool::Pool& pool) {
  PhaseRange range(Phase::kBackward);
  BackwardPass pass(config, weights, args, pool);
  pass.Run(pool);
}

}  // namespace moesaic::moe
