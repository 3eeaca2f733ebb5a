// The down half of the backward: D_e W_d, the gradients of the gate and of the routing weights, and the sums over an expert's
// rows that run along I.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/backward_pass.h"
#include "moe/phases.h"

namespace moesaic::moe {

void BackwardPass::ScatterAndPack(std::int64_t index, std::int64_t) {
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
    PackForDirect(job, rows, d_out_.dtype, buffers.d);
  }
  PhaseRange range(Phase::kD4LoraGrad, {.flops = 2.0 * job.rows * lora.down_rank() * config.hidden_size});
  if (in_place) {
    float routing_weights[kMaxChunkRows];
    LoadWeights(job, routing_weights);
    return in_place->DownGradientLow(job, routing_weights);
  }
  DownLoraLow(job, buffers);
}

void BackwardPass::DownLoraLow(const Job& job, const BackwardBuffers& buffers) {
  const std::int64_t r1 = lora.input_rank(), r2 = lora.down_rank();
  const std::int64_t rank = lora.padded_down_rank(), panels = CeilDiv(job.rows, kPanelRows), ld = panels * kPanelRows;
  float routing_weights[kMaxChunkRows];
  LoadWeights(job, routing_weights);
  const void* rows[kMaxChunkRows];
  // Saved as bf16 [rows][rank], here row pairs.
  const auto pack_saved = [&](const TileMatrix& out, const BFloat16* saved, std::int64_t columns, const float* row_scale) {
    if (out.data == nullptr) return;
    for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = saved + i * columns;
    PackRowsArgs pack;
    pack.rows = rows;
    pack.dtype = DType::kBFloat16;
    pack.count = job.rows;
    pack.columns = columns;
    pack.row_scale = row_scale;
    pack.row_pairs = out;
    pack.panels = 2 * out.columns;
    pack.tile_columns = CeilDiv(columns, kTileColumns);
    kernels.pack_rows(pack);
  };
  pack_saved(buffers.low, args_.saved->gate_up_low + job.begin * r1, r1, nullptr);
  // A shard has its part of V, and gives its part of dB_d.
  pack_saved(buffers.wv, args_.saved->down_low + SavedDownOffset(job), r2, routing_weights);
  if (r2 == 0) return;
  Carver carver(ThreadScratch(2 * rank * ld * static_cast<std::int64_t>(sizeof(float)) + 128));
  float* q_t = carver.Take<float>(rank * ld);
  float* q = carver.Take<float>(rank * ld);
  const GemmSegment segment{LoraOf(job).matrix[kLoraBDownT], buffers.d};
  DirectGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = CeilDiv(r2, kPanelRows);
  gemm.activation_panels = panels;
  gemm.row_count = StoredRows(job);
  gemm.c = q_t;
  gemm.ldc = ld;
  kernels.direct_gemm(gemm);
  TransposeSmall(q_t, ld, r2, job.rows, q, rank);
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < r2; ++k) q[i * rank + k] *= lora.down_scale()[k];
  }
  if (buffers.wq.hi.data != nullptr) {
    float* wq = q_t;
    for (std::int64_t i = 0; i < job.rows; ++i) {
      for (std::int64_t k = 0; k < r2; ++k) wq[i * rank + k] = routing_weights[i] * q[i * rank + k];
    }
    PackSplit(kernels, wq, job.rows, r2, rank, TileKind::kRowPairs, buffers.wq);
  }
  PackSplit(kernels, q, job.rows, r2, rank, DirectKind(job), buffers.q);
}

void BackwardPass::DownBase(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  const BackwardBuffers buffers = BuffersOf(index);
  const TileMatrix down = weights.down_transposed(job.expert, job.shard);
  Segments segments;
  segments.Add(down, buffers.d);
  if (lora.down_rank() > 0) segments.Add(LoraOf(job).matrix[kLoraADownT], buffers.q);
  float routing_weights[kMaxChunkRows];
  LoadWeights(job, routing_weights);

  DirectGemmArgs gemm;
  gemm.segments = segments;
  gemm.activation_panels = CeilDiv(job.rows, kPanelRows);
  gemm.row_count = StoredRows(job);
  gemm.ldc = SumsPitch(gemm.activation_panels * kPanelRows);
  const std::int64_t capacity = RoundUp(job.rows, kTileColumns), size = kTileColumns * gemm.ldc, step = BlocksPerStep(job);
  TileMatrix transposed = TileMatrix::Activations(nullptr, step * kTileColumns, capacity);
  const std::int64_t in_place_bytes = in_place ? in_place->ScratchBytes(job, step * kTileColumns) : 0;
  Carver carver(ThreadScratch(step * size * static_cast<std::int64_t>(sizeof(float)) +
                              3 * (transposed.size() * static_cast<std::int64_t>(sizeof(BFloat16)) + 64) + in_place_bytes));
  float* sums = carver.Take<float>(step * size);
  const auto take_transposed = [&](bool wanted) {
    if (!wanted) return TileMatrix{};
    transposed.data = carver.Take<BFloat16>(transposed.size());
    return transposed;
  };
  const bool d_b = buffers.low.data != nullptr;
  StepTransposed of_step;
  of_step.d_gate = take_transposed(d_b);
  of_step.d_up = take_transposed(d_b);
  of_step.z = take_transposed(buffers.wq.hi.data != nullptr);
  void* in_place_scratch = carver.Take<char>(in_place_bytes);
  std::vector<SwigluBackwardArgs> step_blocks(static_cast<std::size_t>(step));
  for (std::int64_t b = 0; b < step; ++b) {
    SwigluBackwardArgs& swiglu = step_blocks[static_cast<std::size_t>(b)];
    const auto block_of = [b](TileMatrix all) {
      if (all.data != nullptr) all.data = all.Tile(2 * b, 0);
      all.panels = 2;
      return all;
    };
    swiglu.activation = config.activation;
    swiglu.d_z = sums + b * size;
    swiglu.ld = gemm.ldc;
    swiglu.tokens = job.rows;
    swiglu.routing_weight = routing_weights;
    swiglu.d_gate = buffers.d_gate;
    swiglu.d_up = buffers.d_up;
    swiglu.z = buffers.z;
    swiglu.d_gate_t = block_of(of_step.d_gate);
    swiglu.d_up_t = block_of(of_step.d_up);
    swiglu.z_t = block_of(of_step.z);
  }
  const Range blocks = RangeOf(index, Cut::kIntermediate, part);
  for (std::int64_t first = blocks.begin; first < blocks.end; first += step) {
    const std::int64_t end = std::min(first + step, blocks.end);
    const std::int64_t feature = first * kTileColumns, features = (end - first) * kTileColumns;
    const double of_adapters = 2.0 * job.rows * adapters().down_rank() * InnerOfBlocks(job, first, end);
    if (in_place) {
      PhaseRange range(Phase::kD4LoraGrad, {.flops = of_adapters});
      gemm.accumulate = in_place->StartDown(job, feature, features, sums, gemm.ldc, in_place_scratch);
    }
    {
      const double inner = InnerOfBlocks(job, first, end);
      PhaseRange range(Phase::kD3Gemm, {2.0 * job.rows * inner * config.hidden_size, 2.0 * inner * config.hidden_size},
                       {{Phase::kD4LoraGrad, {.flops = 2.0 * job.rows * inner * lora.down_rank()}}});
      gemm.first_panel = 2 * first;
      gemm.panels = std::min(2 * end, down.panels) - gemm.first_panel;
      gemm.c = sums;
      gemm.prefetch = {};
      if (end < blocks.end) gemm.prefetch = {down, 2 * end, down.panels - 2 * end, 0, down.columns};
      // G and U of these blocks come from memory, and are read as soon as the products are there.
      gemm.prefetch.others[0] = args_.saved->gate + SavedOffset(job, first);
      gemm.prefetch.others[1] = args_.saved->up + SavedOffset(job, first);
      gemm.prefetch.lines = CeilDiv(kPanelRows * gemm.panels * job.rows, kTileColumns);
      kernels.direct_gemm(gemm);
    }
    {
      PhaseRange range(Phase::kA1SiluBackward);
      for (std::int64_t block = first; block < end; ++block) {
        SwigluBackwardArgs& swiglu = step_blocks[static_cast<std::size_t>(block - first)];
        const std::int64_t unit = block * kTileColumns / kIntermediateUnit;
        swiglu.d_weight = buffers.d_weight + unit * capacity;
        if (block * kTileColumns % kIntermediateUnit == 0) std::fill(swiglu.d_weight, swiglu.d_weight + capacity, 0.0f);
        swiglu.rows = std::min(kTileColumns, InnerOf(job) - block * kTileColumns);
        swiglu.saved_gate = args_.saved->gate + SavedOffset(job, block);
        swiglu.saved_up = args_.saved->up + SavedOffset(job, block);
        swiglu.block = block;
        kernels.swiglu_backward(swiglu);
      }
    }
    if (in_place) {
      PhaseRange range(Phase::kD4LoraGrad, {.flops = adapters().wants(kLoraADownT) ? of_adapters : 0});
      in_place->KeepIntermediate(job, feature, features, buffers.z, buffers.d_gate, buffers.d_up, in_place_scratch);
    }
    StepGradients(job, buffers, of_step, {first, end});
  }
}

void BackwardPass::StepGradients(const Job& job, const BackwardBuffers& buffers, const StepTransposed& step, Range blocks) {
  const std::int64_t first = blocks.begin * kTileColumns, rows = std::min(blocks.end * kTileColumns, InnerOf(job)) - first;
  const auto sum = [&](LoraMatrix m, const TileMatrix& left, const SplitTiles& right) {
    if (!lora.wants(m)) return;
    const std::int64_t rank = m == kLoraADownT ? lora.down_rank() : lora.input_rank();
    PhaseRange range(PhaseOfGradient(m), {.flops = 2.0 * job.rows * InnerOfBlocks(job, blocks.begin, blocks.end) * rank});
    const std::array segments{GradientSegment{left, right.hi}, GradientSegment{left, right.lo}};
    GradientGemmArgs gemm;
    gemm.segments = {segments.data(), right.lo.data != nullptr ? std::size_t{2} : std::size_t{1}};
    gemm.panels = CeilDiv(rows, kPanelRows);
    gemm.ldc = lora.gradient_columns(m);
    gemm.few_rows = FewGradientRows(job);
    // The expert's first job starts the sums.
    gemm.c = (job.previous < 0 ? LoraOf(job).gradient[m] : buffers.partial[m]) + first * gemm.ldc;
    kernels.gradient_gemm(gemm);
  };
  sum(kLoraADownT, step.z, buffers.wq);
  sum(kLoraBGate, step.d_gate, {buffers.low, {}});
  sum(kLoraBUp, step.d_up, {buffers.low, {}});
}

void BackwardPass::SumIntermediate(std::int64_t index, std::int64_t part) {
  const Job& job = jobs[index];
  if (job.previous < 0) return;
  const BackwardBuffers buffers = BuffersOf(index);
  const ExpertLora& expert = LoraOf(job);
  const Range blocks = RangeOf(index, Cut::kIntermediate, part);
  for (const LoraMatrix m : kIntermediateSums) {
    if (!lora.wants(m)) continue;
    PhaseRange range(PhaseOfGradient(m));
    const std::int64_t ld = lora.gradient_columns(m);
    const std::int64_t end = std::min(blocks.end * kTileColumns, InnerOf(job)) * ld;
    for (std::int64_t i = blocks.begin * kTileColumns * ld; i < end; ++i) expert.gradient[m][i] += buffers.partial[m][i];
  }
}

}  // namespace moesaic::moe
