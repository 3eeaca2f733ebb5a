// The gate and up half of the backward: dX_e = dG W_g + dU W_u + s P A, and the sums over an expert's rows that run along H.
#include <algorithm>
#include <array>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {
namespace {

/// Rows of a tile column of dO whose transpose is half of L1.
constexpr std::int64_t kTransposedRows = 384;

}  // namespace

void BackwardPass::GateUpLora(std::int64_t index, std::int64_t) {
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
  const profiling::Work work{.flops = 2.0 * job.rows * lora.input_rank() * InnerOf(job)};
  PhaseRange range(Phase::kGU3GateP, work, {{Phase::kGU3UpP, work}});
  const ExpertLora& expert = LoraOf(job);
  const std::array segments{GemmSegment{expert.matrix[kLoraBGate], buffers.d_gate},
                            GemmSegment{expert.matrix[kLoraBUp], buffers.d_up}};
  const std::int64_t rank = lora.padded_input_rank(), panels = CeilDiv(job.rows, kPanelRows), ld = panels * kPanelRows;
  UnpackGemmArgs gemm;
  gemm.segments = segments;
  gemm.panels = panels;
  gemm.row_count = job.rows;
  gemm.columns = rank / kTileColumns;
  const std::int64_t scratch = UnpackScratchElements(gemm.segments);
  Carver carver(ThreadScratch(2 * ld * rank * static_cast<std::int64_t>(sizeof(float)) + 2 * scratch + 192));
  float* p = carver.Take<float>(ld * rank);
  float* p_t = carver.Take<float>(ld * rank);
  gemm.c = p;
  gemm.ldc = rank;
  gemm.scratch = carver.Take<BFloat16>(scratch);
  gemm.depth = blocking.unpack_depth;
  kernels.unpack_gemm(gemm);
  const std::int64_t r1 = lora.input_rank();
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < r1; ++k) p[i * rank + k] *= lora.input_scale()[k];
  }
  if (buffers.p_t.hi.data != nullptr) {
    TransposeSmall(p, rank, job.rows, r1, p_t, ld);
    PackSplit(kernels, p_t, r1, job.rows, ld, TileKind::kOperand, buffers.p_t);
  }
  PackSplit(kernels, p, job.rows, r1, rank, TileKind::kOperand, buffers.p);
}

void BackwardPass::SumHidden(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  const Range columns = RangeOf(index, Cut::kHidden, part);
  if (lora.wants(kLoraBDownT)) DownGradients(job, buffers, columns);
  if (lora.wants(kLoraA)) InputGradients(job, buffers, columns);
}

void BackwardPass::DownGradients(const Job& job, const BackwardBuffers& buffers, Range columns) {
  const std::int64_t first = columns.begin * kTileColumns, end = std::min(columns.end * kTileColumns, config.hidden_size);
  PhaseRange range(Phase::kD4LoraGrad, {.flops = 2.0 * job.rows * lora.down_rank() * static_cast<double>(end - first)});
  // A few tile columns at a time, whose transposes stay in L1.
  const std::int64_t capacity = RoundUp(job.rows, kTileColumns), most = std::max<std::int64_t>(1, kTransposedRows / capacity);
  TileMatrix left = TileMatrix::Activations(nullptr, most * kTileColumns, capacity);
  left.data = static_cast<BFloat16*>(ThreadScratch(left.size() * static_cast<std::int64_t>(sizeof(BFloat16))));
  const GradientSegment segment{left, buffers.wv};
  GradientGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.ldc = lora.gradient_columns(kLoraBDownT);
  gemm.accumulate = job.previous >= 0;
  gemm.few_rows = FewGradientRows(job);
  TransposePairsArgs transpose;
  transpose.pairs = buffers.d;
  transpose.pairs.panels = CeilDiv(job.rows, kPanelRows);
  transpose.stored = StoredRows(job) > 0;
  for (std::int64_t first_column = columns.begin; first_column < columns.end; first_column += most) {
    const std::int64_t count = std::min(most, columns.end - first_column);
    for (std::int64_t c = 0; c < count; ++c) {
      transpose.column = first_column + c;
      transpose.transposed = left;
      transpose.transposed.data = left.Tile(2 * c, 0);
      kernels.transpose_pairs(transpose);
    }
    gemm.panels = 2 * count;
    gemm.c = LoraOf(job).gradient[kLoraBDownT] + first_column * kTileColumns * gemm.ldc;
    kernels.gradient_gemm(gemm);
  }
}

void BackwardPass::InputGradients(const Job& job, const BackwardBuffers& buffers, Range columns) {
  // A few tile columns of the input at a time: their row pairs are multiplied while they are in cache, and no copy of all the
  // job's rows takes cache from its other activations.
  const std::int64_t step = blocking.gradient_columns;
  TileMatrix right = TileMatrix::RowPairs(nullptr, job.rows, step * kTileColumns);
  right.data = static_cast<BFloat16*>(ThreadScratch(right.size() * static_cast<std::int64_t>(sizeof(BFloat16))));
  const std::int32_t* slots = Slots(job);
  const void* rows[kMaxChunkRows];
  for (std::int64_t first = columns.begin; first < columns.end; first += step) {
    const std::int64_t count = std::min(step, columns.end - first), column = first * kTileColumns;
    const std::int64_t width = std::min(count * kTileColumns, config.hidden_size - column);
    {
      PhaseRange range(Phase::kGU2PackForLora);
      for (std::int64_t i = 0; i < job.rows; ++i) {
        rows[i] = static_cast<const char*>(hidden_.Row(slots[i] / top_k)) + column * SizeOf(hidden_.dtype);
      }
      PackRowsArgs pack;
      pack.rows = rows;
      pack.dtype = hidden_.dtype;
      pack.count = job.rows;
      pack.columns = width;
      pack.row_pairs = right;
      pack.panels = FewGradientRows(job) > 0 ? 1 : 2 * right.columns;
      pack.tile_columns = count;
      kernels.pack_rows(pack);
    }
    PhaseRange range(Phase::kGU3GateDA, {.flops = 2.0 * job.rows * lora.input_rank() * static_cast<double>(width)});
    right.panels = 2 * count;
    const std::array segments{GradientSegment{buffers.p_t.hi, right}, GradientSegment{buffers.p_t.lo, right}};
    GradientGemmArgs gemm;
    gemm.segments = segments;
    gemm.panels = CeilDiv(lora.input_rank(), kPanelRows);
    gemm.ldc = padded_hidden;
    gemm.c = LoraOf(job).gradient[kLoraA] + column;
    gemm.accumulate = job.previous >= 0;
    gemm.few_rows = FewGradientRows(job);
    kernels.gradient_gemm(gemm);
  }
}

void BackwardPass::GateUpBase(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const Range columns = RangeOf(index, Cut::kHidden, part);
  const double width = static_cast<double>((columns.end - columns.begin) * kTileColumns), inner = InnerOf(job);
  const profiling::Work half{2.0 * job.rows * inner * width, 2.0 * inner * width};
  PhaseRange range(
      Phase::kGU1BasePassGate, half,
      {{Phase::kGU1BasePassUp, half}, {Phase::kGU3GateDXLora, {.flops = 2.0 * job.rows * lora.input_rank() * width}}});
  const BackwardBuffers buffers = BuffersOf(index);
  Segments segments;
  segments.Add(weights.gate(job.expert, job.shard), buffers.d_gate);
  segments.Add(weights.up(job.expert, job.shard), buffers.d_up);
  if (lora.input_rank() > 0) segments.Add(LoraOf(job).matrix[kLoraA], buffers.p);
  MultiplyToRows(job, segments, columns);
}

void BackwardPass::Merge(std::int64_t first) {
  PhaseRange range(Phase::kGU4Merge);
  const std::int64_t end = std::min(first + blocking.tokens_per_merge, tokens);
  if (shard_d_weights_ != nullptr) MergeWeights(first, end);
  if (!args_.d_hidden.defined()) return;
  std::vector<const BFloat16*> rows(static_cast<std::size_t>(top_k) * (shards.size() + 1));
  const std::vector<float> ones(rows.size(), 1.0f);
  for (std::int64_t t = first; t < end; ++t) {
    MergeRowsArgs merge;
    for (std::int64_t j = 0; j < top_k; ++j) {
      if (slot_used_[t * top_k + j] == 0) continue;
      for (std::size_t shard = 0; shard < shards.size(); ++shard) {
        rows[merge.count++] = RowOf(static_cast<std::int64_t>(shard), t * top_k + j);
      }
      const BFloat16* added = in_place ? in_place->AddedRow(t * top_k + j) : nullptr;
      if (added != nullptr) rows[merge.count++] = added;
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
