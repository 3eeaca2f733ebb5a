#include "moe/forward.h"

#include <algorithm>
#include <array>

#include "cpu_kernels/tensor_access.h"
#include "moe/pass.h"
#include "moe/phases.h"
#include "profiling/trace.h"

namespace moesaic::moe {
namespace {

/// Activations of one job between its stages.
struct ForwardBuffers {
  TileMatrix x;    ///< as a direct GEMM takes them (Pass::StoredRows), [rows][H]
  SplitTiles low;  ///< the same [rows][R1]: s X A^T of gate and up
  TileMatrix z;    ///< operand [rows][I]
  SplitTiles v;    ///< operand [rows][R2]: s Z A_d^T

  std::int64_t Bind(void* memory, std::int64_t rows, std::int64_t hidden, std::int64_t inner, const LoraCall& lora) {
    Carver carver(memory);
    const auto take = [&](std::int64_t columns) {
      TileMatrix tiles = TileMatrix::Activations(nullptr, rows, columns);
      tiles.data = carver.Take<BFloat16>(tiles.size());
      return tiles;
    };
    x = take(hidden);
    low = SplitTiles::Take(carver, rows, lora.input_rank());
    z = take(inner);
    v = SplitTiles::Take(carver, rows, lora.down_rank());
    return carver.used();
  }
};

class ForwardPass : public Pass {
 public:
  ForwardPass(const LayerConfig& config, const PackedWeights& weights, const ForwardArgs& args, threadpool::Pool& pool)
      : Pass(Phase::kForward, config, weights, args.lora, {}, args.ids.shape[0], args.ids.shape[1], pool), args_(args) {}

  void Run(threadpool::Pool& pool) {
    {
      PhaseRange range(Phase::kRouting);
      Route();
    }
    {
      PhaseRange range(Phase::kAllocate);
      AllocateAndBuild();
    }
    pool.Run(graph);
  }

 private:
  void Route() {
    const std::int64_t size = config.num_experts + 1 + tokens * top_k;
    if (args_.saved == nullptr) workspace->tokens.Ensure(size * static_cast<std::int64_t>(sizeof(std::int32_t)));
    auto* target = args_.saved != nullptr ? args_.saved->routing : static_cast<std::int32_t*>(workspace->tokens.data());
    BuildRouting(config, args_.ids, target);
    routing = target;
    Plan();
  }

  void AllocateAndBuild() {
    hidden_ = MakeRowSource(args_.hidden, workspace->dense);
    workspace->rows.Ensure(RowBytes());
    ForwardBuffers measure;
    Allocate(measure.Bind(nullptr, most_rows, config.hidden_size, LargestShard(shards), lora));
    const TaskId before = in_place ? BeginInPlace() : -1;
    const std::array stages = {
        Stage{Task<&ForwardPass::PackInput>, Cut::kWhole},
        Stage{Task<&ForwardPass::GateUp>, Cut::kIntermediate},
        Stage{Task<&ForwardPass::DownLora>, Cut::kWhole, false, true},
        Stage{Task<&ForwardPass::Down>, Cut::kHidden},
    };
    TaskId computed = AddJobs(this, stages, before);
    if (in_place && in_place->Sweeps(kLoraBDownT) > 0) {
      const TaskId added = AddSweep(this, Sweep<&ForwardPass::ExpandDown>, in_place->Sweeps(kLoraBDownT), Swept());
      computed = Join(computed, added);
    }
    for (std::int64_t t = 0; t < tokens; t += blocking.tokens_per_merge) {
      graph.AddEdge(computed, graph.Add([](void* self, std::int64_t i, int) { Self(self).Merge(i); }, this, t));
    }
  }

  /// Adds what comes before the jobs: L of each, and the sweeps of B of gate and up.
  TaskId BeginInPlace() {
    const std::int64_t count = tokens * top_k;
    workspace->in_place.Ensure(in_place->BindForward(nullptr, row_pitch(), count));
    in_place->BindForward(workspace->in_place.data(), row_pitch(), count);
    if (adapters().input_rank() == 0) return -1;
    const TaskId low = AddSweep(this, Sweep<&ForwardPass::InputLow>, static_cast<std::int64_t>(jobs.size()), -1);
    const TaskId gate = AddSweep(this, Sweep<&ForwardPass::ExpandGate>, in_place->Sweeps(kLoraBGate), low);
    const TaskId up = AddSweep(this, Sweep<&ForwardPass::ExpandUp>, in_place->Sweeps(kLoraBUp), low);
    return Join(gate, up);
  }

  template <void (ForwardPass::*kSweep)(std::int64_t index)>
  static void Sweep(void* context, std::int64_t index, int) {
    (Self(context).*kSweep)(index);
  }

  void InputLow(std::int64_t index) {
    const Job& job = jobs[index];
    const std::int64_t rank = adapters().input_rank();
    PhaseRange range(Phase::kGateUpLora, {.flops = 2.0 * job.rows * rank * config.hidden_size});
    const void* rows[kMostLowRankRows];
    for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = hidden_.Row(Slots(job)[i] / top_k);
    in_place->InputLow(job, rows, hidden_.dtype,
                       args_.saved != nullptr ? args_.saved->gate_up_low + job.begin * rank : nullptr);
  }
  void ExpandGate(std::int64_t sweep) {
    PhaseRange range(Phase::kGateUpLora, {.flops = in_place->SweepFlops(kLoraBGate)});
    in_place->ExpandGateUp(kLoraBGate, sweep);
  }
  void ExpandUp(std::int64_t sweep) {
    PhaseRange range(Phase::kGateUpLora, {.flops = in_place->SweepFlops(kLoraBUp)});
    in_place->ExpandGateUp(kLoraBUp, sweep);
  }
  void ExpandDown(std::int64_t sweep) {
    PhaseRange range(Phase::kDownLora, {.flops = in_place->SweepFlops(kLoraBDownT)});
    in_place->ExpandDown(sweep);
  }

  static ForwardPass& Self(void* context) { return *static_cast<ForwardPass*>(context); }

  template <void (ForwardPass::*kStage)(std::int64_t job, std::int64_t part)>
  static void Task(void* context, std::int64_t index, int) {
    ForwardPass& pass = Self(context);
    const Job& job = pass.jobs[TaskIndex::Job(index)];
    const profiling::TaskScope scope(job.expert, job.rows);
    (pass.*kStage)(TaskIndex::Job(index), TaskIndex::Part(index));
  }

  ForwardBuffers BuffersOf(std::int64_t job) const {
    ForwardBuffers buffers;
    buffers.Bind(JobMemory(job), RoundUp(jobs[job].rows, kTileColumns), config.hidden_size, InnerOf(jobs[job]), lora);
    return buffers;
  }

  /// X_e as a direct GEMM takes it, and s X_e A^T of gate and up.
  void PackInput(std::int64_t index, std::int64_t) {
    const Job& job = jobs[index];
    const ForwardBuffers buffers = BuffersOf(index);
    const void* rows[kMaxChunkRows];
    {
      PhaseRange range(Phase::kGather);
      const std::int32_t* slots = Slots(job);
      for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = hidden_.Row(slots[i] / top_k);
    }
    {
      PhaseRange range(Phase::kPackInput);
      PackForDirect(job, rows, hidden_.dtype, buffers.x);
    }
    if (lora.input_rank() == 0) return;
    PhaseRange range(Phase::kGateUpLora, {.flops = 2.0 * job.rows * lora.input_rank() * config.hidden_size});
    const std::int64_t rank = lora.padded_input_rank(), panels = CeilDiv(job.rows, kPanelRows), ld = panels * kPanelRows;
    Carver carver(ThreadScratch(2 * rank * ld * static_cast<std::int64_t>(sizeof(float)) + 128));
    float* low_t = carver.Take<float>(rank * ld);
    float* low = carver.Take<float>(rank * ld);
    const GemmSegment segment{LoraOf(job).matrix[kLoraA], buffers.x};
    DirectGemmArgs gemm;
    gemm.segments = {&segment, 1};
    gemm.panels = CeilDiv(lora.input_rank(), kPanelRows);
    gemm.activation_panels = panels;
    gemm.row_count = StoredRows(job);
    gemm.c = low_t;
    gemm.ldc = ld;
    kernels.direct_gemm(gemm);
    TransposeSmall(low_t, ld, lora.input_rank(), job.rows, low, rank);
    // Every shard needs it and has the same; one saves it.
    BFloat16* saved =
        args_.saved != nullptr && job.shard == 0 ? args_.saved->gate_up_low + job.begin * lora.input_rank() : nullptr;
    PackLow(job, low, rank, lora.input_rank(), lora.input_scale(), DirectKind(job), buffers.low, saved);
  }

  /// [rows][rank] fp32, scaled in place, becomes tiles and what backward needs of it.
  void PackLow(const Job& job, float* low, std::int64_t ld, std::int64_t rank, const float* scale, TileKind kind,
               const SplitTiles& tiles, BFloat16* saved) const {
    for (std::int64_t i = 0; i < job.rows; ++i) {
      for (std::int64_t k = 0; k < rank; ++k) {
        low[i * ld + k] *= scale[k];
        if (saved != nullptr) saved[i * rank + k] = ToBFloat16(low[i * ld + k]);
      }
    }
    PackSplit(kernels, low, job.rows, rank, ld, kind, tiles);
  }

  /// G^T, U^T for a range of I, some blocks of 32 rows at a time, and Z = f(G) * U while they are in cache.
  void GateUp(std::int64_t index, std::int64_t part) {
    const Job& job = jobs[index];
    const ForwardBuffers buffers = BuffersOf(index);
    const TileMatrix gate = weights.gate(job.expert, job.shard), up = weights.up(job.expert, job.shard);
    Segments gate_segments, up_segments;
    gate_segments.Add(gate, buffers.x);
    up_segments.Add(up, buffers.x);
    if (lora.input_rank() > 0) {
      gate_segments.Add(LoraOf(job).matrix[kLoraBGate], buffers.low);
      up_segments.Add(LoraOf(job).matrix[kLoraBUp], buffers.low);
    }
    DirectGemmArgs gemm;
    gemm.activation_panels = CeilDiv(job.rows, kPanelRows);
    gemm.row_count = StoredRows(job);
    gemm.ldc = SumsPitch(gemm.activation_panels * kPanelRows);
    const std::int64_t step = BlocksPerStep(job), size = kTileColumns * gemm.ldc;  // of a block's sums
    auto* sums = static_cast<float*>(ThreadScratch(2 * step * size * static_cast<std::int64_t>(sizeof(float))));
    const Range blocks = RangeOf(index, Cut::kIntermediate, part);
    for (std::int64_t first = blocks.begin; first < blocks.end; first += step) {
      const std::int64_t end = std::min(first + step, blocks.end);
      float *gate_sums = sums, *up_sums = sums + (end - first) * size;
      bool gate_started = false, up_started = false;
      if (in_place) {
        PhaseRange range(Phase::kGateUpLora);
        const std::int64_t feature = first * kTileColumns, features = (end - first) * kTileColumns;
        gate_started = in_place->StartGateUp(kLoraBGate, job, feature, features, gate_sums, gemm.ldc);
        up_started = in_place->StartGateUp(kLoraBUp, job, feature, features, up_sums, gemm.ldc);
      }
      {
        const double outputs = 2.0 * job.rows * InnerOfBlocks(job, first, end), hidden = config.hidden_size;
        PhaseRange range(Phase::kGateUpGemm, {2 * outputs * hidden, 4.0 * InnerOfBlocks(job, first, end) * hidden},
                         {{Phase::kGateUpLora, {.flops = 2 * outputs * lora.input_rank()}}});
        gemm.first_panel = 2 * first;
        gemm.panels = std::min(2 * end, gate.panels) - gemm.first_panel;
        gemm.segments = gate_segments;
        gemm.c = gate_sums;
        gemm.accumulate = gate_started;
        gemm.twin = {up_segments, up_sums, up_started};
        gemm.prefetch = {};
        if (end < blocks.end) gemm.prefetch = {gate, 2 * end, gate.panels - 2 * end, 0, gate.columns};
        kernels.direct_gemm(gemm);
      }
      PhaseRange range(Phase::kActivation);
      for (std::int64_t block = first; block < end; ++block) {
        SwigluForwardArgs swiglu;
        swiglu.activation = config.activation;
        swiglu.gate = gate_sums + (block - first) * size;
        swiglu.up = up_sums + (block - first) * size;
        swiglu.ld = gemm.ldc;
        swiglu.tokens = job.rows;
        swiglu.rows = std::min(kTileColumns, InnerOf(job) - block * kTileColumns);
        if (args_.saved != nullptr) {
          const std::int64_t offset = SavedOffset(job, block);
          swiglu.saved_gate = args_.saved->gate + offset;
          swiglu.saved_up = args_.saved->up + offset;
        }
        swiglu.z = buffers.z;
        swiglu.block = block;
        kernels.swiglu_forward(swiglu);
      }
    }
  }

  /// V = s Z A_d^T.
  void DownLora(std::int64_t index, std::int64_t) {
    const Job& job = jobs[index];
    if (in_place && adapters().down_rank() > 0) {
      const std::int64_t rank = adapters().down_rank();
      PhaseRange range(Phase::kDownLora, {.flops = 2.0 * job.rows * rank * InnerOf(job)});
      in_place->DownLow(job, BuffersOf(index).z, args_.saved != nullptr ? args_.saved->down_low + job.begin * rank : nullptr);
    }
    if (lora.down_rank() == 0) return;
    PhaseRange range(Phase::kDownLora, {.flops = 2.0 * job.rows * lora.down_rank() * InnerOf(job)});
    const ForwardBuffers buffers = BuffersOf(index);
    const GemmSegment segment{LoraOf(job).matrix[kLoraADownT], buffers.z};
    const std::int64_t rank = lora.padded_down_rank();
    UnpackGemmArgs gemm;
    gemm.segments = {&segment, 1};
    gemm.panels = CeilDiv(job.rows, kPanelRows);
    gemm.row_count = job.rows;
    gemm.columns = rank / kTileColumns;
    const std::int64_t scratch = UnpackScratchElements(gemm.segments);
    Carver carver(ThreadScratch((gemm.panels * kPanelRows * rank * 2 + scratch) * 2 + 128));
    float* v = carver.Take<float>(gemm.panels * kPanelRows * rank);
    gemm.c = v;
    gemm.ldc = rank;
    gemm.scratch = carver.Take<BFloat16>(scratch);
    gemm.depth = blocking.unpack_depth;
    kernels.unpack_gemm(gemm);
    PackLow(job, v, rank, lora.down_rank(), lora.down_scale(), TileKind::kOperand, buffers.v,
            args_.saved != nullptr ? args_.saved->down_low + SavedDownOffset(job) : nullptr);
  }

  /// Y for a range of H, rounded to bf16, into the row of each slot.
  void Down(std::int64_t index, std::int64_t part) {
    const Job& job = jobs[index];
    const Range columns = RangeOf(index, Cut::kHidden, part);
    const double width = static_cast<double>((columns.end - columns.begin) * kTileColumns), inner = InnerOf(job);
    PhaseRange range(Phase::kDownGemm, {2.0 * job.rows * inner * width, 2.0 * inner * width},
                     {{Phase::kDownLora, {.flops = 2.0 * job.rows * lora.down_rank() * width}}});
    const ForwardBuffers buffers = BuffersOf(index);
    Segments segments;
    segments.Add(weights.down_transposed(job.expert, job.shard), buffers.z);
    if (lora.down_rank() > 0) segments.Add(LoraOf(job).matrix[kLoraBDownT], buffers.v);
    MultiplyToRows(job, segments, columns);
  }

  /// out[t] = sum over the token's slots, in their order, of w Y; Y is the sum over the shards, in theirs.
  void Merge(std::int64_t first) {
    PhaseRange range(Phase::kMerge);
    const std::int64_t end = std::min(first + blocking.tokens_per_merge, tokens);
    std::vector<const BFloat16*> rows(static_cast<std::size_t>(top_k) * (shards.size() + 1));
    std::vector<float> row_weights(rows.size());
    for (std::int64_t t = first; t < end; ++t) {
      MergeRowsArgs merge;
      for (std::int64_t j = 0; j < top_k; ++j) {
        const std::int64_t id = LoadInt(args_.ids, t, j);
        if (id < 0 || id >= config.num_experts) continue;
        const float weight = LoadFloat(args_.weights, t, j);
        for (std::size_t shard = 0; shard < shards.size(); ++shard) {
          rows[merge.count] = RowOf(static_cast<std::int64_t>(shard), t * top_k + j);
          row_weights[merge.count++] = weight;
        }
        const BFloat16* added = in_place ? in_place->AddedRow(t * top_k + j) : nullptr;
        if (added == nullptr) continue;
        rows[merge.count] = added;
        row_weights[merge.count++] = weight;
      }
      merge.rows = rows.data();
      merge.weights = row_weights.data();
      merge.columns = config.hidden_size;
      merge.out = static_cast<char*>(args_.out.data) + t * args_.out.stride[0] * SizeOf(args_.out.dtype);
      merge.dtype = args_.out.dtype;
      merge.out_stride = args_.out.stride[1];
      kernels.merge_rows(merge);
    }
  }

  const ForwardArgs& args_;
  RowSource hidden_;
};

}  // namespace

void RunForward(const LayerConfig& config, const PackedWeights& weights, const ForwardArgs& args, threadpool::Pool& pool) {
  PhaseRange range(Phase::kForward);
  ForwardPass pass(config, weights, args, pool);
  pass.Run(pool);
}

}  // namespace moesaic::moe
