// The down half of the backward: D_e W_d, the gradients of silu and of the routing weights, and the sums over an expert's rows
// that run along I.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {

void BackwardPass::ScatterAndPack(std::int64_t index, std::int64_t) {
  PhaseRange parent(Phase::kBackwardDown);
  const Job& job = jobs[index];
  const void* rows[kMaxChunkRows];
  BackwardBuffers buffers;
  {
    PhaseRange range(Phase::kD0Prepare);
    buffers = BuffersOf(index);
  }
  {
    PhaseRange range(Phase::kD1Scatter);
    const std::int32_t* slots = Slots(job);
    for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = d_out_.Row(slots[i] / top_k);
  }
  {
    PhaseRange range(Phase::kD2Pack);
    PackRowsArgs pack;
    pack.rows = rows;
    pack.dtype = d_out_.dtype;
    pack.count = job.rows;
    pack.columns = config.hidden_size;
    pack.pairs = buffers.d;
    pack.stored = buffers.d_stored;
    pack.panels = buffers.d.panels;
    pack.tile_columns = buffers.d.columns;
    kernels.pack_rows(pack);
  }
  PhaseRange range(Phase::kD4LoraGrad);
  DownLoraLow(job, buffers);
}

void BackwardPass::DownLoraLow(const Job& job, const BackwardBuffers& buffers) {
  const std::int64_t r1 = lora.input_rank(), r2 = lora.down_rank();
  const std::int64_t rank = lora.padded_down_rank(), panels = CeilDiv(job.rows, kPanelRows), ld = panels * kPanelRows;
  float routing_weights[kMaxChunkRows];
  LoadWeights(job, routing_weights);
  const void* rows[kMaxChunkRows];
  if (buffers.low_stored.data != nullptr) {
    PackRowsArgs pack;
    for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = args_.saved->gate_up_low + (job.begin + i) * r1;
    pack.rows = rows;
    pack.dtype = DType::kBFloat16;
    pack.count = job.rows;
    pack.columns = r1;
    pack.stored = buffers.low_stored;
    pack.panels = buffers.low_stored.panels;
    pack.tile_columns = buffers.low_stored.columns;
    kernels.pack_rows(pack);
  }
  if (r2 == 0) return;
  Carver carver(ThreadScratch(2 * rank * ld * static_cast<std::int64_t>(sizeof(float)) + 128));
  float* q_t = carver.Take<float>(rank * ld);
  float* q = carver.Take<float>(rank * ld);
  const GemmSegment segment{LoraOf(job).matrix[kLoraBDownT], buffers.d};
  DirectGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = rank / kPanelRows;
  gemm.activation_panels = panels;
  gemm.c = q_t;
  gemm.ldc = ld;
  kernels.direct_gemm(gemm);
  TransposeSmall(q_t, ld, rank, job.rows, q, rank);
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < rank; ++k) q[i * rank + k] *= lora.down_scale()[k];
  }
  if (buffers.wq_stored.hi.data != nullptr) {
    float* wq = q_t;
    for (std::int64_t i = 0; i < job.rows; ++i) {
      for (std::int64_t k = 0; k < rank; ++k) wq[i * rank + k] = routing_weights[i] * q[i * rank + k];
    }
    PackSplit(wq, job.rows, r2, rank, TileKind::kStored, buffers.wq_stored);
  }
  PackSplit(q, job.rows, r2, rank, TileKind::kPairs, buffers.q);
  if (buffers.wv_t.data == nullptr) return;
  // (w s V)^T: the saved s V, one row for each rank.
  float* wv_t = q_t;
  for (std::int64_t i = 0; i < job.rows; ++i) {
    const BFloat16* v = args_.saved->down_low + (job.begin + i) * r2;
    for (std::int64_t k = 0; k < r2; ++k) wv_t[k * ld + i] = routing_weights[i] * ToFloat(v[k]);
  }
  std::vector<const void*> ranks(static_cast<std::size_t>(r2));
  for (std::int64_t k = 0; k < r2; ++k) ranks[k] = wv_t + k * ld;
  PackRowsArgs transposed;
  transposed.rows = ranks.data();
  transposed.count = r2;
  transposed.columns = job.rows;
  transposed.operand = buffers.wv_t;
  transposed.panels = buffers.wv_t.panels;
  transposed.tile_columns = buffers.wv_t.columns;
  kernels.pack_rows(transposed);
}

void BackwardPass::DownBase(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  const std::int64_t inner = config.intermediate_size;
  const TileMatrix down = weights.down_transposed(job.expert);
  std::array<GemmSegment, 3> segments{GemmSegment{down, buffers.d}};
  const bool with_lora = lora.down_rank() > 0;
  if (with_lora) {
    const TileMatrix& a = LoraOf(job).matrix[kLoraADownT];
    segments = {segments[0], {a, buffers.q.hi}, {a, buffers.q.lo}};
  }
  float routing_weights[kMaxChunkRows];
  LoadWeights(job, routing_weights);

  DirectGemmArgs gemm;
  gemm.segments = {segments.data(), with_lora ? std::size_t{3} : std::size_t{1}};
  gemm.activation_panels = CeilDiv(job.rows, kPanelRows);
  gemm.ldc = gemm.activation_panels * kPanelRows;
  gemm.c = static_cast<float*>(ThreadScratch(kTileColumns * gemm.ldc * static_cast<std::int64_t>(sizeof(float))));
  const std::int64_t capacity = RoundUp(job.rows, kTileColumns);
  const Range blocks = RangeOf(index, Cut::kIntermediate, part);
  for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
    gemm.first_panel = 2 * block;
    gemm.panels = std::min<std::int64_t>(2, down.panels - gemm.first_panel);
    gemm.prefetch = {};
    if (block + 1 < blocks.end) {
      const std::int64_t next = gemm.first_panel + 2;
      gemm.prefetch = {down, next, std::min<std::int64_t>(2, down.panels - next), 0, down.columns};
    }
    {
      PhaseRange parent(Phase::kBackwardDown);
      PhaseRange range(Phase::kD3Gemm);
      kernels.direct_gemm(gemm);
      range.AddWork(2.0 * job.rows * kPanelRows * gemm.panels * config.hidden_size,
                    2.0 * kPanelRows * gemm.panels * config.hidden_size);
      if (with_lora) range.Share(Phase::kD4LoraGrad, 2.0 * job.rows * kPanelRows * gemm.panels * lora.down_rank(), 0);
    }
    PhaseRange parent(Phase::kBackwardActivation);
    PhaseRange range(Phase::kA1SiluBackward);
    const std::int64_t unit = block * kTileColumns / kIntermediateUnit;
    float* d_weight = buffers.d_weight + unit * capacity;
    if (block * kTileColumns % kIntermediateUnit == 0) std::fill(d_weight, d_weight + capacity, 0.0f);
    SwigluBackwardArgs swiglu;
    swiglu.d_z = gemm.c;
    swiglu.ld = gemm.ldc;
    swiglu.tokens = job.rows;
    swiglu.rows = std::min(kTileColumns, inner - block * kTileColumns);
    swiglu.saved_gate = args_.saved->gate + job.begin * inner + block * kTileColumns * job.rows;
    swiglu.saved_up = args_.saved->up + job.begin * inner + block * kTileColumns * job.rows;
    swiglu.routing_weight = routing_weights;
    swiglu.d_weight = d_weight;
    swiglu.block = block;
    swiglu.d_gate = buffers.d_gate;
    swiglu.d_up = buffers.d_up;
    swiglu.d_gate_t = buffers.d_gate_t;
    swiglu.d_up_t = buffers.d_up_t;
    swiglu.z_t = buffers.z_t;
    kernels.swiglu_backward(swiglu);
  }
}

void BackwardPass::SumIntermediate(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  const ExpertLora& expert = LoraOf(job);
  const Range blocks = RangeOf(index, Cut::kIntermediate, part);
  const auto sum = [&](Phase phase, LoraMatrix m, const TileMatrix& left, const SplitTiles& right_parts) {
    if (!lora.wants(m)) return;
    PhaseRange range(phase);
    const TileMatrix& right = right_parts.hi;
    const std::array segments{GemmSegment{right, left}, GemmSegment{right_parts.lo, left}};
    UnpackGemmArgs gemm;
    gemm.segments = {segments.data(), right_parts.lo.data != nullptr ? std::size_t{2} : std::size_t{1}};
    gemm.first_panel = 2 * blocks.begin;
    gemm.panels = std::min(2 * blocks.end, left.panels) - gemm.first_panel;
    gemm.columns = right.columns;
    gemm.ldc = right.columns * kTileColumns;
    gemm.c = expert.gradient[m] + gemm.first_panel * kPanelRows * gemm.ldc;
    gemm.accumulate = job.previous >= 0;
    gemm.scratch = static_cast<BFloat16*>(ThreadScratch(UnpackScratchElements(gemm.segments, 1) * 2));
    kernels.unpack_gemm(gemm);
    range.AddWork(2.0 * job.rows * gemm.panels * kPanelRows * gemm.ldc, 0);
  };
  sum(Phase::kD4LoraGrad, kLoraADownT, buffers.z_t, buffers.wq_stored);
  sum(Phase::kGU3GateDB, kLoraBGate, buffers.d_gate_t, {buffers.low_stored, {}});
  sum(Phase::kGU3UpDB, kLoraBUp, buffers.d_up_t, {buffers.low_stored, {}});
}

}  // namespace moesaic::moe
