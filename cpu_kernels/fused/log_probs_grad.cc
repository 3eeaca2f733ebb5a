// The gradient of log-probabilities (log_probs.h).
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/log_probs.h"
#include "cpu_kernels/fused/projection.h"
#include "cpu_kernels/fused/scratch.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;
using threadpool::TaskFunction;
using threadpool::TaskGraph;
using threadpool::TaskId;

/// Gradients of logits that wait until they are multiplied: some 16 MB, of so many tokens.
constexpr std::int64_t kWaiting = std::int64_t{8} << 20, kLeastSlab = 4096, kMostSlab = 16384;

/// The gradient of sixteen rows' logits in a chunk, and what it is made of.
class PanelGradient {
 public:
  /// @param first  row of the panel; the chunk begins with token `chunk`, and was multiplied last
  PanelGradient(const Projection& projection, const LogProbsGradArgs& args, std::int64_t first, std::int64_t chunk,
                const Projection::Memory& memory)
      : targets_(projection, args.forward, first, chunk),
        log_sums_(projection, first, args.log_sums),
        d_log_probs_(projection, first, args.d_log_probs),
        entropies_(projection, first, args.entropies),
        d_entropies_(projection, first, args.d_entropies) {
    const std::int64_t panel = first % projection.block_rows() / kPanelRows;
    args_.block = projection.Logits(panel, chunk, targets_.values, memory);
    args_.log_sum = log_sums_.values;
    args_.d_log_prob = d_log_probs_.values;
    if (args.d_entropies == nullptr) return;
    args_.entropy = entropies_.values;
    args_.d_entropy = d_entropies_.values;
  }
  PanelGradient(const PanelGradient&) = delete;
  PanelGradient& operator=(const PanelGradient&) = delete;

  /// But for where it goes. Points into this.
  const LogitGradArgs& args() const { return args_; }

 private:
  const Targets targets_;
  const Sixteen log_sums_, d_log_probs_, entropies_, d_entropies_;
  LogitGradArgs args_;
};

/// The gradient of logits that are in memory, sixteen rows a task.
void LogitsGrad(const LogProbsGradArgs& args, std::vector<std::int64_t> rows, Pool& pool) {
  const Projection projection(args.forward, std::move(rows));
  constexpr std::int64_t kPitch = SumsPitch(kChunk);
  Carver one;
  projection.Take(one);
  one.Take<float>(kPanelRows * kPitch);
  const Scratch scratch(pool.num_threads() * one.used());
  pool.ParallelFor(projection.blocks(), [&](std::int64_t block, int worker) {
    Carver carver(scratch.data() + worker * one.used());
    const Projection::Memory memory = projection.Take(carver);
    auto* const gradients = carver.Take<float>(kPanelRows * kPitch);
    for (std::int64_t chunk = 0; chunk < projection.vocabulary(); chunk += kChunk) {
      projection.Multiply(block, chunk, FusedStage::kBackwardGemm, memory);
      const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 0.0);
      const PanelGradient gradient(projection, args, block * kPanelRows, chunk, memory);
      LogitGradArgs grad = gradient.args();
      grad.rows = gradients;
      grad.rows_ld = kPitch;
      projection.kernels().fused.logit_grad(grad);
      for (std::int64_t i = 0; i < projection.RowsOfBlock(block); ++i) {
        StoreRowsArgs store;
        store.in = gradients + i * kPitch;
        store.ld = kPitch;
        store.rows = 1;
        store.columns = grad.block.columns;
        store.out = AddressOf(args.d_x, projection.Row(block * kPanelRows + i), chunk);
        store.dtype = args.d_x.dtype;
        store.out_stride = args.d_x.stride[0];
        projection.kernels().store_rows(store);
      }
    }
    FinishStores();
  });
}

/// Of a piece of the rows the gradient of x. A block of rows takes one slab of the vocabulary after the other, of which first
/// all gradients of logits are made and then multiplied by the weights; blocks do not wait for each other.
class LogProbsGradRun {
 public:
  LogProbsGradRun(const LogProbsGradArgs& args, std::vector<std::int64_t> rows, Pool& pool)
      : args_(args),
        pool_(pool),
        projection_(args.forward, std::move(rows)),
        slab_(SlabOf(projection_)),
        ld_(SumsPitch(RoundUp(projection_.depth(), kTileColumns))),
        ld_slab_(slab_ + 16) {
    const std::int64_t columns = CeilDiv(projection_.depth(), kTileColumns), tasks = 2 * pool.num_threads();
    split_columns_ = CeilDiv(columns, std::min(columns, CeilDiv(tasks, projection_.blocks())));
    splits_ = CeilDiv(columns, split_columns_);
    part_ = RoundUp(CeilDiv(slab_, CeilDiv(tasks, projection_.blocks())), kChunk);
    tasks_of_slab_ = std::max(splits_, CeilDiv(slab_, part_));
  }

  void Run() {
    Carver measure;
    Bind(measure);
    const Scratch scratch(measure.used(), IsKept(measure.used(), pool_.num_threads()));
    Carver carver(scratch.data());
    Bind(carver);
    TaskGraph graph;
    for (std::int64_t block = 0; block < projection_.blocks(); ++block) {
      TaskId done = -1;
      for (std::int64_t slab = 0; slab < slabs_; ++slab) {
        done = Add(graph, done, OfLogitsTask, block, slab, CeilDiv(EndOfSlab(slab) - slab * slab_, part_));
        done = Add(graph, done, OfInputTask, block, slab, splits_);
      }
      Add(graph, done, StoreTask, block, 0, 1);
    }
    pool_.Run(graph);
  }

 private:
  struct Worker {
    Projection::Memory projection;
    BFloat16* unpacked;   ///< bf16: scratch of the unpack form
    float* sums;          ///< fp32: of a slab, [block_rows][split_columns_ * 32 + 16]
    std::int64_t packed;  ///< the block in its memory, or -1
  };

  /// `count` tasks of a block and a slab, which wait for `before`, if that is not negative.
  /// @return what ends when all of them have
  TaskId Add(TaskGraph& graph, TaskId before, TaskFunction function, std::int64_t block, std::int64_t slab,
             std::int64_t count) {
    const TaskId all = count == 1 ? -1 : graph.Add([](void*, std::int64_t, int) {}, nullptr, 0);
    TaskId task = -1;
    for (std::int64_t i = 0; i < count; ++i) {
      task = graph.Add(function, this, (slab * projection_.blocks() + block) * tasks_of_slab_ + i);
      if (before >= 0) graph.AddEdge(before, task);
      if (all >= 0) graph.AddEdge(task, all);
    }
    return all >= 0 ? all : task;
  }

  /// The task with such an index.
  struct Place {
    std::int64_t block, slab, i;
  };
  Place PlaceOf(std::int64_t index) const {
    const std::int64_t place = index / tasks_of_slab_;
    return {place % projection_.blocks(), place / projection_.blocks(), index % tasks_of_slab_};
  }

  static void OfLogitsTask(void* self, std::int64_t index, int worker) {
    auto& run = *static_cast<LogProbsGradRun*>(self);
    run.OfLogits(run.PlaceOf(index), run.workers_[static_cast<std::size_t>(worker)]);
  }
  static void OfInputTask(void* self, std::int64_t index, int worker) {
    const auto& run = *static_cast<LogProbsGradRun*>(self);
    run.OfInput(run.PlaceOf(index), run.workers_[static_cast<std::size_t>(worker)]);
  }
  static void StoreTask(void* self, std::int64_t index, int) {
    const auto& run = *static_cast<LogProbsGradRun*>(self);
    run.Store(run.PlaceOf(index).block);
  }

  std::int64_t EndOfSlab(std::int64_t slab) const { return std::min((slab + 1) * slab_, projection_.vocabulary()); }

  static std::int64_t SlabOf(const Projection& projection) {
    const std::int64_t slab = kWaiting / projection.rows_count() / kChunk * kChunk;
    return std::min(std::clamp(slab, kLeastSlab, kMostSlab), RoundUp(projection.vocabulary(), kTileColumns));
  }

  /// A slab of the weights.
  TileMatrix Slab(std::int64_t from, std::int64_t end) const {
    TileMatrix slab = args_.forward.weight->tiles();
    slab.data += from / kPanelRows * slab.columns * kTileElements;
    slab.panels = CeilDiv(end - from, kPanelRows);
    return slab;
  }

  /// The gradients of a block's logits in a slab, bf16.
  TileMatrix Operand(std::int64_t block, std::int64_t columns) const {
    TileMatrix operand = TileMatrix::Activations(nullptr, projection_.block_rows(), slab_);
    operand.data = gradients_ + block * operand.size();
    operand.columns = CeilDiv(columns, kTileColumns);
    return operand;
  }

  void Bind(Carver& carver) {
    const bool is_bf16 = projection_.is_bf16();
    const std::int64_t blocks = projection_.blocks(), rows = blocks * projection_.block_rows();
    const std::int64_t size = TileMatrix::Activations(nullptr, projection_.block_rows(), slab_).size();
    gradients_ = carver.Take<BFloat16>(is_bf16 ? blocks * size : 0);
    fp32_gradients_ = carver.Take<float>(is_bf16 ? 0 : rows * ld_slab_);
    sums_ = carver.Take<float>(rows * ld_);
    workers_.clear();
    for (int worker = 0; worker < pool_.num_threads(); ++worker) {
      Worker memory{projection_.Take(carver), nullptr, nullptr, -1};
      if (is_bf16) {
        const GemmSegment segment{Slab(0, slab_), {}};
        memory.unpacked = carver.Take<BFloat16>(UnpackScratchElements({&segment, 1}));
      } else {
        memory.sums = carver.Take<float>(projection_.block_rows() * (split_columns_ * kTileColumns + 16));
      }
      workers_.push_back(memory);
    }
  }

  /// Gradients of a block's logits in a part of a slab.
  void OfLogits(const Place& place, Worker& memory) const {
    const std::int64_t block = place.block, row = block * projection_.block_rows(), from = place.slab * slab_;
    const std::int64_t first = from + place.i * part_, end = std::min(first + part_, EndOfSlab(place.slab));
    if (memory.packed != block) {
      memory.packed = block;
      projection_.Pack(block, memory.projection);
    }
    const std::int64_t panels = CeilDiv(projection_.RowsOfBlock(block), kPanelRows);
    for (std::int64_t chunk = first; chunk < end; chunk += kChunk) {
      projection_.Multiply(block, chunk, FusedStage::kBackwardGemm, memory.projection);
      const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 0.0);
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        const PanelGradient gradient(projection_, args_, row + panel * kPanelRows, chunk, memory.projection);
        LogitGradArgs grad = gradient.args();
        if (projection_.is_bf16()) {
          grad.operand = Operand(block, slab_);
          grad.panel = panel;
          grad.tile_column = (chunk - from) / kTileColumns;
        } else {
          grad.rows = fp32_gradients_ + (row + panel * kPanelRows) * ld_slab_ + chunk - from;
          grad.rows_ld = ld_slab_;
        }
        projection_.kernels().fused.logit_grad(grad);
      }
    }
  }

  /// What a slab adds to some columns of a block's sums.
  void OfInput(const Place& place, const Worker& memory) const {
    const std::int64_t block = place.block, rows = projection_.RowsOfBlock(block), row = block * projection_.block_rows();
    const std::int64_t from = place.slab * slab_, end = EndOfSlab(place.slab), first = place.i * split_columns_;
    const std::int64_t columns = std::min(split_columns_, CeilDiv(projection_.depth(), kTileColumns) - first);
    const FusedRange range(FusedStage::kBackwardGemm, 2.0 * static_cast<double>(rows * (end - from) * columns * kTileColumns),
                           0.0);
    float* const sums = sums_ + row * ld_ + first * kTileColumns;
    if (projection_.is_bf16()) {
      const GemmSegment segment{Slab(from, end), Operand(block, end - from)};
      UnpackGemmArgs gemm;
      gemm.segments = {&segment, 1};
      gemm.panels = CeilDiv(rows, kPanelRows);
      gemm.first_column = first;
      gemm.columns = columns;
      gemm.c = sums;
      gemm.ldc = ld_;
      gemm.accumulate = from > 0;
      gemm.row_count = rows;
      const KernelTier& kernels = projection_.kernels();
      gemm.depth = UnpackSlice(kernels.unpack_overlaps, segment.activations.columns, gemm.panels, HostL2Bytes());
      gemm.scratch = memory.unpacked;
      return kernels.unpack_gemm(gemm);
    }
    const std::int64_t depth = projection_.depth(), width = std::min(columns * kTileColumns, depth - first * kTileColumns);
    Fp32GemmArgs gemm;
    gemm.a = fp32_gradients_ + row * ld_slab_;
    gemm.lda = ld_slab_;
    gemm.rows = rows;
    gemm.panels = args_.forward.weight->panels() + from * RoundUp(depth, 16);
    gemm.n = end - from;
    gemm.k = depth;
    gemm.transposed = true;
    gemm.first = first * kTileColumns / 16;
    gemm.count = CeilDiv(width, 16);
    gemm.c = memory.sums;
    gemm.ldc = split_columns_ * kTileColumns + 16;
    gemm.scratch = memory.projection.scratch;
    projection_.kernels().fused.fp32_gemm(gemm);
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const to = sums + i * ld_;
      const float* const of_slab = memory.sums + i * gemm.ldc;
      for (std::int64_t c = 0; c < width; ++c) to[c] = from > 0 ? to[c] + of_slab[c] : of_slab[c];
    }
  }

  void Store(std::int64_t block) const {
    const FusedRange range(FusedStage::kBackwardGemm, 0.0, 0.0);
    const std::int64_t first = block * projection_.block_rows();
    for (std::int64_t i = first; i < first + projection_.RowsOfBlock(block); ++i) {
      StoreRowsArgs store;
      store.in = sums_ + i * ld_;
      store.ld = ld_;
      store.rows = 1;
      store.columns = projection_.depth();
      store.out = AddressOf(args_.d_x, projection_.Row(i), 0);
      store.dtype = args_.d_x.dtype;
      store.out_stride = args_.d_x.stride[0];
      projection_.kernels().store_rows(store);
    }
    FinishStores();
  }

  const LogProbsGradArgs& args_;
  Pool& pool_;
  const Projection projection_;
  const std::int64_t slab_, ld_, ld_slab_;
  const std::int64_t slabs_ = CeilDiv(projection_.vocabulary(), slab_);
  std::int64_t part_ = 0;                        ///< tokens of a task that makes gradients of logits
  std::int64_t split_columns_ = 0, splits_ = 0;  ///< of a task that multiplies them; columns in tiles
  std::int64_t tasks_of_slab_ = 0;               ///< of a block and of either kind, at most
  BFloat16* gradients_ = nullptr;                ///< of logits, block by block
  float* fp32_gradients_ = nullptr;              ///< [rows][ld_slab_]
  float* sums_ = nullptr;                        ///< [rows][ld_]
  std::vector<Worker> workers_;
};

}  // namespace

void LogProbsGrad(const LogProbsGradArgs& args, Pool& pool) {
  CheckLogProbs(args.forward);
  const std::int64_t rows = args.forward.x.shape[0], columns = args.forward.x.shape[1];
  if (rows > 0 && (args.log_sums == nullptr || (args.d_entropies != nullptr && args.entropies == nullptr))) {
    throw std::invalid_argument("log_sums or entropies are null; expected what LogProbs() gave");
  }
  Check(args.d_x, "d_x", rows, columns, args.forward.x.dtype);
  std::vector<std::int64_t> counted;
  const auto bytes = static_cast<std::size_t>(columns * SizeOf(args.d_x.dtype));
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool has_log_prob = args.d_log_probs != nullptr && args.d_log_probs[row] != 0.0f;
    const bool has_entropy = args.d_entropies != nullptr && args.d_entropies[row] != 0.0f;
    if (args.forward.targets[row] >= 0 && (has_log_prob || has_entropy)) {
      counted.push_back(row);
    } else {
      std::memset(AddressOf(args.d_x, row, 0), 0, bytes);
    }
  }
  if (counted.empty()) return;
  const Pool::Turn turn(pool);
  if (args.forward.weight == nullptr) return LogitsGrad(args, std::move(counted), pool);
  for (std::vector<std::int64_t>& piece : Pieces(counted)) LogProbsGradRun(args, std::move(piece), pool).Run();
}

}  // namespace moesaic::fused
