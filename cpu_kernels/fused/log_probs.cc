#include "cpu_kernels/fused/log_probs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/direct_rows.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;
using threadpool::TaskFunction;
using threadpool::TaskGraph;
using threadpool::TaskId;

/// Tokens of the vocabulary whose logits are made at a time, and of which a row has statistics of their own.
constexpr std::int64_t kChunk = 512, kPart = 2048;
/// Rows of a block, which a task takes, and that go at a time.
constexpr std::int64_t kBlockRows = 128, kMostRows = 2048;
/// Gradients of logits that wait until they are multiplied: some 16 MB, of so many tokens.
constexpr std::int64_t kWaiting = std::int64_t{8} << 20, kLeastSlab = 4096, kMostSlab = 16384;

void* RowAt(const TensorView& view, std::int64_t row, std::int64_t column) {
  return static_cast<char*>(view.data) + (row * view.stride[0] + column) * SizeOf(view.dtype);
}

/// Some rows of x and the products of them with the vocabulary, block by block; or these themselves, where there is no weight.
class Projection {
 public:
  Projection(const LogProbsArgs& args, std::vector<std::int64_t> rows)
      : args_(args),
        rows_(std::move(rows)),
        depth_(args.x.shape[1]),
        vocabulary_(args.weight == nullptr ? args.x.shape[1] : args.weight->rows()),
        is_bf16_(args.weight != nullptr && args.x.dtype == DType::kBFloat16),
        ld_x_(RoundUp(depth_, 16) + 16) {
    if (args.weight == nullptr) {
      block_rows_ = kPanelRows;
      return;
    }
    // Half of L2 for a block.
    const std::int64_t fitting = HostL2Bytes() / 2 / (SizeOf(args.x.dtype) * RoundUp(depth_, kTileColumns));
    block_rows_ = std::clamp<std::int64_t>(fitting, kTileColumns, kBlockRows) / kTileColumns * kTileColumns;
    block_rows_ = std::min(block_rows_, RoundUp(rows_count(), kTileColumns));
  }

  std::int64_t rows_count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t depth() const { return depth_; }
  std::int64_t vocabulary() const { return vocabulary_; }
  bool is_bf16() const { return is_bf16_; }  ///< whether bf16 is multiplied
  std::int64_t block_rows() const { return block_rows_; }
  std::int64_t blocks() const { return CeilDiv(rows_count(), block_rows_); }
  /// Of all rows there are.
  std::int64_t Row(std::int64_t i) const { return rows_[static_cast<std::size_t>(i)]; }
  std::int64_t RowsOfBlock(std::int64_t block) const { return std::min(block_rows_, rows_count() - block * block_rows_); }
  const KernelTier& kernels() const { return kernels_; }

  /// Of one worker.
  struct Memory {
    TileMatrix tiles;  ///< bf16: a block
    float* rows;       ///< fp32: a block, [block_rows][ld_x]
    float* scratch;    ///< fp32: of the GEMM
    float* products;   ///< of a chunk, as LogitBlock has them
  };

  Memory Take(Carver& carver) const {
    Memory memory{};
    if (is_bf16_) {
      memory.tiles = TileMatrix::Activations(nullptr, block_rows_, depth_);
      memory.tiles.data = carver.Take<BFloat16>(memory.tiles.size());
      memory.products = carver.Take<float>(kChunk * SumsPitch(block_rows_));
    } else if (args_.weight == nullptr) {
      memory.products = carver.Take<float>(block_rows_ * SumsPitch(kChunk));
    } else {
      memory.rows = carver.Take<float>(block_rows_ * ld_x_);
      memory.scratch = carver.Take<float>(kFp32GemmScratch);
      memory.products = carver.Take<float>(block_rows_ * SumsPitch(kChunk));
    }
    return memory;
  }

  void Pack(std::int64_t block, Memory& memory) const {
    if (args_.weight == nullptr) return;
    const std::int64_t first = block * block_rows_, rows = RowsOfBlock(block);
    const FusedRange range(FusedStage::kPack, 0.0, 2.0 * static_cast<double>(rows * depth_ * SizeOf(args_.x.dtype)));
    const void* pointers[kBlockRows];
    for (std::int64_t i = 0; i < rows; ++i) pointers[i] = RowAt(args_.x, Row(first + i), 0);
    if (!is_bf16_) {
      const auto bytes = static_cast<std::size_t>(depth_) * sizeof(float);
      for (std::int64_t i = 0; i < rows; ++i) std::memcpy(memory.rows + i * ld_x_, pointers[i], bytes);
      return;
    }
    memory.tiles.panels = CeilDiv(rows, kPanelRows);
    PackRowsArgs pack;
    pack.rows = pointers;
    pack.dtype = DType::kBFloat16;
    pack.count = rows;
    pack.columns = depth_;
    (Stored(rows) > 0 ? pack.stored : pack.pairs) = memory.tiles;
    pack.panels = memory.tiles.panels;
    pack.tile_columns = memory.tiles.columns;
    kernels_.pack_rows(pack);
  }

  /// Products of a block that is packed with tokens [from, from + kChunk) of the vocabulary, or what is left of them.
  void Multiply(std::int64_t block, std::int64_t from, FusedStage stage, const Memory& memory) const {
    if (args_.weight == nullptr) return Load(block, from, memory);
    const std::int64_t rows = RowsOfBlock(block), to = End(from);
    const FusedRange range(stage, 2.0 * static_cast<double>(rows * (to - from) * depth_), 0.0);
    if (!is_bf16_) {
      Fp32GemmArgs gemm;
      gemm.a = memory.rows;
      gemm.lda = ld_x_;
      gemm.rows = rows;
      gemm.panels = args_.weight->panels();
      gemm.n = vocabulary_;
      gemm.k = depth_;
      gemm.first = from / kPanelRows;
      gemm.count = CeilDiv(to - from, kPanelRows);
      gemm.c = memory.products;
      gemm.ldc = SumsPitch(kChunk);
      gemm.scratch = memory.scratch;
      return kernels_.fused.fp32_gemm(gemm);
    }
    const TileMatrix& weights = args_.weight->tiles();
    const GemmSegment segment{weights, memory.tiles};
    DirectGemmArgs gemm;
    gemm.segments = {&segment, 1};
    gemm.first_panel = from / kPanelRows;
    gemm.panels = CeilDiv(to, kPanelRows) - gemm.first_panel;
    gemm.activation_panels = memory.tiles.panels;
    gemm.row_count = Stored(rows);
    gemm.c = memory.products;
    gemm.ldc = SumsPitch(block_rows_);
    const std::int64_t next = to < vocabulary_ ? to / kPanelRows : 0;
    gemm.prefetch = {weights, next, weights.panels - next, 0, weights.columns};
    kernels_.direct_gemm(gemm);
  }

  /// Products that are in memory, widened.
  void Load(std::int64_t block, std::int64_t from, const Memory& memory) const {
    const FusedRange range(FusedStage::kPack, 0.0, 0.0);
    for (std::int64_t i = 0; i < RowsOfBlock(block); ++i) {
      const void* const row = RowAt(args_.x, Row(block * block_rows_ + i), from);
      float* const out = memory.products + i * SumsPitch(kChunk);
      const std::int64_t count = End(from) - from;
      if (args_.x.dtype == DType::kFloat32) {
        std::copy_n(static_cast<const float*>(row), count, out);
      } else {
        for (std::int64_t c = 0; c < count; ++c) out[c] = ToFloat(static_cast<const BFloat16*>(row)[c]);
      }
    }
  }

  /// The logits of sixteen rows in what was multiplied last.
  /// @param targets  [16] as LogitBlock has them
  LogitBlock Logits(std::int64_t panel, std::int64_t from, const std::int32_t* targets, const Memory& memory) const {
    LogitBlock logits;
    const std::int64_t row = panel * kPanelRows;
    logits.by_rows = !is_bf16_;
    logits.ld = is_bf16_ ? SumsPitch(block_rows_) : SumsPitch(kChunk);
    logits.products = memory.products + (is_bf16_ ? row : row * logits.ld);
    logits.columns = End(from) - from;
    logits.bias = args_.bias == nullptr ? nullptr : args_.bias + from;
    logits.scale = args_.scale;
    logits.targets = targets;
    return logits;
  }

  /// The last one of those of a chunk, plus one.
  std::int64_t End(std::int64_t from) const { return std::min(from + kChunk, vocabulary_); }

 private:
  std::int64_t Stored(std::int64_t rows) const { return StoredRows(kernels_, rows, rows_count(), depth_); }

  const LogProbsArgs& args_;
  const std::vector<std::int64_t> rows_;
  const std::int64_t depth_, vocabulary_;
  const bool is_bf16_;
  const std::int64_t ld_x_;
  std::int64_t block_rows_ = 0;
  const KernelTier& kernels_ = ChosenKernels();
};

/// Sixteen rows' values of an array [T]; zeros where there are no rows, or no array.
struct Sixteen {
  alignas(64) float values[16] = {};

  Sixteen(const Projection& projection, std::int64_t first, const float* array) {
    if (array == nullptr) return;
    for (std::int64_t i = 0; i < 16 && first + i < projection.rows_count(); ++i) values[i] = array[projection.Row(first + i)];
  }
};

/// Sixteen rows' targets, counted from the token `from`.
struct Targets {
  std::int32_t values[16];

  Targets(const Projection& projection, const LogProbsArgs& args, std::int64_t first, std::int64_t from) {
    for (std::int64_t i = 0; i < 16; ++i) {
      const bool is_row = first + i < projection.rows_count();
      values[i] = is_row ? static_cast<std::int32_t>(args.targets[projection.Row(first + i)] - from) : -1;
    }
  }
};

/// One call of LogProbs().
class LogProbsRun {
 public:
  LogProbsRun(const LogProbsArgs& args, const LogProbsResults& results, std::vector<std::int64_t> rows, Pool& pool)
      : args_(args), results_(results), pool_(pool), projection_(args, std::move(rows)) {}

  void Run() {
    const std::int64_t panels = CeilDiv(projection_.rows_count(), kPanelRows);
    Carver one;
    projection_.Take(one);
    const std::int64_t of_worker = one.used(), statistics_bytes = panels * parts_ * std::int64_t{sizeof(LogitStatistics)};
    const std::int64_t bytes = pool_.num_threads() * of_worker + statistics_bytes;
    const Scratch scratch(bytes, IsKept(bytes, pool_.num_threads()));
    statistics_ = reinterpret_cast<LogitStatistics*>(scratch.data() + pool_.num_threads() * of_worker);
    std::vector<std::int64_t> packed(static_cast<std::size_t>(pool_.num_threads()), -1);  // the block in a worker's memory
    std::vector<Projection::Memory> memory;
    for (int worker = 0; worker < pool_.num_threads(); ++worker) {
      Carver carver(scratch.data() + worker * of_worker);
      memory.push_back(projection_.Take(carver));
    }
    pool_.ParallelFor(projection_.blocks() * parts_, [&](std::int64_t i, int worker) {
      const std::int64_t block = i / parts_;
      const auto w = static_cast<std::size_t>(worker);
      if (packed[w] != block) {
        packed[w] = block;
        projection_.Pack(block, memory[w]);
      }
      Part(block, i % parts_, memory[w]);
    });
    pool_.ParallelFor(panels, [&](std::int64_t panel, int) { Finish(panel); });
  }

 private:
  /// Statistics of a block's rows, of one part of the vocabulary.
  void Part(std::int64_t block, std::int64_t part, const Projection::Memory& memory) const {
    const std::int64_t first = block * projection_.block_rows() / kPanelRows;
    const std::int64_t panels = CeilDiv(projection_.RowsOfBlock(block), kPanelRows);
    for (std::int64_t panel = 0; panel < panels; ++panel) statistics_[(first + panel) * parts_ + part] = {};
    const std::int64_t end = std::min((part + 1) * kPart, projection_.vocabulary());
    for (std::int64_t from = part * kPart; from < end; from += kChunk) {
      projection_.Multiply(block, from, FusedStage::kGemm, memory);
      const FusedRange range(FusedStage::kSoftmax, 0.0, 0.0);
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        const Targets targets(projection_, args_, (first + panel) * kPanelRows, from);
        FoldLogitsArgs fold;
        fold.block = projection_.Logits(panel, from, targets.values, memory);
        fold.statistics = &statistics_[(first + panel) * parts_ + part];
        projection_.kernels().fused.fold_logits(fold);
      }
    }
  }

  /// What all parts say of a panel's rows.
  void Finish(std::int64_t panel) const {
    const FusedRange range(FusedStage::kSoftmax, 0.0, 0.0);
    const LogitStatistics* const of_parts = statistics_ + panel * parts_;
    for (std::int64_t i = 0; i < kPanelRows && panel * kPanelRows + i < projection_.rows_count(); ++i) {
      const std::int64_t row = projection_.Row(panel * kPanelRows + i);
      double most = -HUGE_VAL, before = -HUGE_VAL, sum = 0.0, weighted = 0.0, squares = 0.0, total = 0.0;
      for (std::int64_t part = 0; part < parts_; ++part) {
        most = std::max<double>(most, of_parts[part].most[i]);
        before = std::max<double>(before, of_parts[part].before[i]);
      }
      for (std::int64_t part = 0; part < parts_; ++part) {
        const LogitStatistics& known = of_parts[part];
        total += known.total[i];
        if (known.most[i] == LogitStatistics::kNone && known.sum[i] == 0.0f) continue;  // all -infinity
        const double shift = known.most[i] - most, shrink = std::exp(shift);
        sum += shrink * known.sum[i];
        weighted += shrink * (known.weighted[i] + shift * known.sum[i]);
        squares += shrink * shrink * known.squares[i];
      }
      const double target = of_parts[args_.targets[row] / kPart].target[i], log_sum = most + std::log(sum);
      if (results_.log_probs != nullptr) results_.log_probs[row] = static_cast<float>(target - log_sum);
      if (results_.log_sums != nullptr) results_.log_sums[row] = static_cast<float>(log_sum);
      if (results_.entropies != nullptr) results_.entropies[row] = static_cast<float>(std::log(sum) - weighted / sum);
      if (results_.log_squares != nullptr) {
        results_.log_squares[row] = static_cast<float>(std::log(squares) - 2.0 * std::log(sum));
      }
      if (results_.mean_logits != nullptr) {
        results_.mean_logits[row] = static_cast<float>(total / static_cast<double>(projection_.vocabulary()));
      }
      if (results_.are_top1 != nullptr) results_.are_top1[row] = target >= most && target > before ? 1 : 0;
    }
  }

  const LogProbsArgs& args_;
  const LogProbsResults& results_;
  Pool& pool_;
  const Projection projection_;
  const std::int64_t parts_ = CeilDiv(projection_.vocabulary(), kPart);
  LogitStatistics* statistics_ = nullptr;  ///< [panels][parts]
};

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
        store.out = RowAt(args.d_x, projection.Row(block * kPanelRows + i), chunk);
        store.dtype = args.d_x.dtype;
        store.out_stride = args.d_x.stride[0];
        projection.kernels().store_rows(store);
      }
    }
    FinishStores();
  });
}

/// Of up to kMostRows rows the gradient of x. A block of rows takes one slab of the vocabulary after the other, of which first
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
      store.out = RowAt(args_.d_x, projection_.Row(i), 0);
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

/// @return the size of the vocabulary
std::int64_t Validate(const LogProbsArgs& args) {
  CheckMatrix(args.x, "x");
  if (args.targets == nullptr && args.x.shape[0] > 0) throw std::invalid_argument("targets is null; expected one of each row");
  const std::int64_t vocabulary = args.weight == nullptr ? args.x.shape[1] : args.weight->rows();
  if (args.weight == nullptr) {
    Check(args.x, "x", args.x.shape[0], vocabulary, args.x.dtype);
  } else {
    Check(args.x, "x", args.x.shape[0], args.weight->columns(), args.weight->dtype(), "w was packed");
  }
  if (vocabulary > INT32_MAX - kChunk) {
    throw std::invalid_argument("the vocabulary has " + std::to_string(vocabulary) + " tokens; expected less than 2^31 - 512");
  }
  for (std::int64_t row = 0; row < args.x.shape[0]; ++row) {
    if (args.targets[row] >= vocabulary) {
      throw std::invalid_argument("targets[" + std::to_string(row) + "] is " + std::to_string(args.targets[row]) +
                                  "; expected less than " + std::to_string(vocabulary) + ", the size of the vocabulary");
    }
  }
  return vocabulary;
}

/// Up to kMostRows each, for memory's sake, and equally many: few rows are summed up in another order, and must not be the last
/// ones of many.
std::vector<std::vector<std::int64_t>> Pieces(const std::vector<std::int64_t>& rows) {
  const auto count = static_cast<std::int64_t>(rows.size()), most = CeilDiv(count, CeilDiv(count, kMostRows));
  std::vector<std::vector<std::int64_t>> pieces;
  for (std::int64_t first = 0; first < count; first += most) {
    const auto begin = rows.begin() + first;
    pieces.emplace_back(begin, begin + std::min(most, count - first));
  }
  return pieces;
}

}  // namespace

void LogProbs(const LogProbsArgs& args, const LogProbsResults& results, Pool& pool) {
  Validate(args);
  const std::int64_t rows = args.x.shape[0];
  for (float* array : {results.log_probs, results.log_sums, results.entropies, results.log_squares, results.mean_logits}) {
    if (array != nullptr) std::fill_n(array, rows, 0.0f);
  }
  if (results.are_top1 != nullptr) std::fill_n(results.are_top1, rows, std::uint8_t{0});
  std::vector<std::int64_t> counted;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (args.targets[row] >= 0) counted.push_back(row);
  }
  if (counted.empty()) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  for (std::vector<std::int64_t>& rows : Pieces(counted)) LogProbsRun(args, results, std::move(rows), pool).Run();
}

void LogProbsGrad(const LogProbsGradArgs& args, Pool& pool) {
  Validate(args.forward);
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
      std::memset(RowAt(args.d_x, row, 0), 0, bytes);
    }
  }
  if (counted.empty()) return;
  const Pool::Turn turn(pool);
  if (args.forward.weight == nullptr) return LogitsGrad(args, std::move(counted), pool);
  for (std::vector<std::int64_t>& piece : Pieces(counted)) LogProbsGradRun(args, std::move(piece), pool).Run();
}

}  // namespace moesaic::fused
