// The gate and up half of the backward: dX_e = dG W_g + dU W_u + s P A, and the sums over an expert's rows that run along H.
#include <algorithm>
#include <array>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {

void BackwardPass::GateUpLora(std::int64_t index, std::int64_t) {
  PhaseRange parent(Phase::kBackwardGateUp);
  const Job& job = jobs[index];
  BackwardBuffers buffers;
  {
    PhaseRange range(Phase::kGU0Prepare);
    buffers = BuffersOf(index);
  }
  const std::int32_t* slots = Slots(job);
  if (args_.d_weights.defined()) {
    PhaseRange range(Phase::kA1SiluBackward);
    const std::int64_t capacity = RoundUp(job.rows, kTileColumns);
    for (std::int64_t i = 0; i < job.rows; ++i) {
      float sum = 0.0f;
      for (std::int64_t unit = 0; unit < CeilDiv(InnerOf(job), kIntermediateUnit); ++unit) {
        sum += buffers.d_weight[unit * capacity + i];
      }
      if (shard_d_weights_ != nullptr) {
        shard_d_weights_[job.shard * tokens * top_k + slots[i]] = sum;
      } else {
        StoreFloat(args_.d_weights, slots[i] / top_k, slots[i] % top_k, 0, sum);
      }
    }
  }
  if (lora.input_rank() == 0 || !wants_gate_up()) return;
  PhaseRange pass(Phase::kGU3LoraPassGate);
  PhaseRange range(Phase::kGU3GateP);
  const ExpertLora& expert = LoraOf(job);
  const std::array segments{GemmSegment{expert.matrix[kLoraBGate], buffers.d_gate},
                            GemmSegment{expert.matrix[kLoraBUp], buffers.d_up}};
  const std::int64_t rank = lora.padded_input_rank(), panels = CeilDiv(job.rows, kPanelRows), ld = panels * kPanelRows;
  UnpackGemmArgs gemm;
  gemm.segments = segments;
  gemm.panels = panels;
  gemm.columns = rank / kTileColumns;
  const std::int64_t scratch = UnpackScratchElements(gemm.segments);
  Carver carver(ThreadScratch(2 * ld * rank * static_cast<std::int64_t>(sizeof(float)) + 2 * scratch + 192));
  float* p = carver.Take<float>(ld * rank);
  float* p_t = carver.Take<float>(ld * rank);
  gemm.c = p;
  gemm.ldc = rank;
  gemm.scratch = carver.Take<BFloat16>(scratch);
  kernels.unpack_gemm(gemm);
  const double flops = 2.0 * job.rows * lora.input_rank() * InnerOf(job);
  range.AddWork(flops, 0);
  range.Share(Phase::kGU3UpP, flops, 0);
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < rank; ++k) p[i * rank + k] *= lora.input_scale()[k];
  }
  if (buffers.p_t.hi.data != nullptr) {
    TransposeSmall(p, rank, job.rows, rank, p_t, ld);
    PackSplit(p_t, rank, job.rows, ld, TileKind::kOperand, buffers.p_t);
  }
  PackSplit(p, job.rows, rank, rank, TileKind::kOperand, buffers.p);
}

void BackwardPass::SumHidden(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  const Range columns = RangeOf(index, Cut::kHidden, part);
  SumRows(Phase::kGU2PackForLora, Phase::kGU3GateDA, job, kLoraA, buffers.p_t, hidden_, columns);
  SumRows(Phase::kD4LoraGrad, Phase::kD4LoraGrad, job, kLoraBDownT, {buffers.wv_t, {}}, d_out_, columns);
}

void BackwardPass::SumRows(Phase pack_phase, Phase phase, const Job& job, LoraMatrix m, const SplitTiles& left,
                           const RowSource& source, Range columns) {
  if (!lora.wants(m)) return;
  // A few tile columns of the source at a time: their row pairs are multiplied while they are in cache, and no copy of all the
  // job's rows takes cache from its other activations.
  constexpr std::int64_t kColumns = 4;
  TileMatrix right = TileMatrix::RowPairs(nullptr, job.rows, kColumns * kTileColumns);
  right.data = static_cast<BFloat16*>(ThreadScratch(right.size() * static_cast<std::int64_t>(sizeof(BFloat16))));
  const std::int32_t* slots = Slots(job);
  const void* rows[kMaxChunkRows];
  for (std::int64_t first = columns.begin; first < columns.end; first += kColumns) {
    const std::int64_t count = std::min(kColumns, columns.end - first), column = first * kTileColumns;
    {
      PhaseRange range(pack_phase);
      for (std::int64_t i = 0; i < job.rows; ++i) {
        rows[i] = static_cast<const char*>(source.Row(slots[i] / top_k)) + column * SizeOf(source.dtype);
      }
      PackRowsArgs pack;
      pack.rows = rows;
      pack.dtype = source.dtype;
      pack.count = job.rows;
      pack.columns = std::min(count * kTileColumns, config.hidden_size - column);
      pack.row_pairs = right;
      pack.panels = 2 * right.columns;
      pack.tile_columns = count;
      kernels.pack_rows(pack);
    }
    PhaseRange range(phase);
    right.panels = 2 * count;
    const std::array segments{GradientSegment{left.hi, right}, GradientSegment{left.lo, right}};
    GradientGemmArgs gemm;
    gemm.segments = {segments.data(), left.lo.data != nullptr ? std::size_t{2} : std::size_t{1}};
    gemm.panels = CeilDiv(lora.rows(m), kPanelRows);
    gemm.ldc = padded_hidden;
    gemm.c = LoraOf(job).gradient[m] + column;
    gemm.accumulate = job.previous >= 0;
    kernels.gradient_gemm(gemm);
    range.AddWork(
        2.0 * job.rows * lora.rows(m) * static_cast<double>(std::min(count * kTileColumns, config.hidden_size - column)), 0);
  }
}

void BackwardPass::GateUpBase(std::int64_t index, std::int64_t part) {
  PhaseRange parent(Phase::kBackwardGateUp);
  PhaseRange range(Phase::kGU1BasePassGate);
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  std::array<GemmSegment, 4> segments{GemmSegment{weights.gate(job.expert, job.shard), buffers.d_gate},
                                      GemmSegment{weights.up(job.expert, job.shard), buffers.d_up}};
  const bool with_lora = lora.input_rank() > 0;
  if (with_lora) {
    const TileMatrix& a = LoraOf(job).matrix[kLoraA];
    segments[2] = {a, buffers.p.hi};
    segments[3] = {a, buffers.p.lo};
  }
  BFloat16* rows[kMaxChunkRows] = {};
  const std::int32_t* slots = Slots(job);
  for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = RowOf(job.shard, slots[i]);
  const Range columns = RangeOf(index, Cut::kHidden, part);
  UnpackGemmArgs gemm;
  gemm.segments = {segments.data(), with_lora ? std::size_t{4} : std::size_t{2}};
  gemm.panels = CeilDiv(job.rows, kPanelRows);
  gemm.first_column = columns.begin;
  gemm.columns = columns.end - columns.begin;
  gemm.rows = rows;
  gemm.scratch = static_cast<BFloat16*>(ThreadScratch(UnpackScratchElements(gemm.segments) * 2));
  kernels.unpack_gemm(gemm);
  const double columns_done = static_cast<double>(gemm.columns * kTileColumns), inner = InnerOf(job);
  range.AddWork(2.0 * job.rows * inner * columns_done, 2.0 * inner * columns_done);
  range.Share(Phase::kGU1BasePassUp, 2.0 * job.rows * inner * columns_done, 2.0 * inner * columns_done);
  if (with_lora) range.Share(Phase::kGU3GateDXLora, 2.0 * job.rows * lora.input_rank() * columns_done, 0);
}

void BackwardPass::Merge(std::int64_t first) {
  PhaseRange range(Phase::kGU4Merge);
  const std::int64_t end = std::min(first + blocking.tokens_per_merge, tokens);
  if (shard_d_weights_ != nullptr) MergeWeights(first, end);
  if (!args_.d_hidden.defined()) return;
  std::vector<const BFloat16*> rows(static_cast<std::size_t>(top_k) * shards.size());
  const std::vector<float> ones(rows.size(), 1.0f);
  for (std::int64_t t = first; t < end; ++t) {
    MergeRowsArgs merge;
    for (std::int64_t j = 0; j < top_k; ++j) {
      if (slot_used_[t * top_k + j] == 0) continue;
      for (std::size_t shard = 0; shard < shards.size(); ++shard) {
        rows[merge.count++] = RowOf(static_cast<std::int64_t>(shard), t * top_k + j);
      }
    }
    merge.rows = rows.data();
    merge.weights = ones.data();
    merge.columns = config.hidden_size;
    merge.out = static_cast<char*>(args_.d_hidden.data) + t * args_.d_hidden.stride[0] * SizeOf(args_.d_hidden.dtype);
    merge.dtype = args_.d_hidden.dtype;
    merge.out_stride = args_.d_hidden.stride[1];
    kernels.merge_rows(merge);
  }
}

void BackwardPass::MergeWeights(std::int64_t first, std::int64_t end) {
  for (std::int64_t slot = first * top_k; slot < end * top_k; ++slot) {
    if (slot_used_[slot] == 0) continue;
    float sum = 0.0f;
    for (std::size_t shard = 0; shard < shards.size(); ++shard) {
      sum += shard_d_weights_[static_cast<std::int64_t>(shard) * tokens * top_k + slot];
    }
    StoreFloat(args_.d_weights, slot / top_k, slot % top_k, 0, sum);
  }
}

}  // namespace moesaic::moe
