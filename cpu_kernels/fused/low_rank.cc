#include "cpu_kernels/fused/low_rank.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/fused/scratch.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Tiles of a factor's longer side that a task packs: 32 KB of fp32 of sixteen ranks.
constexpr std::int64_t kTilesPerTask = 16;

/// Rows and columns that are laid out as row pairs and multiplied at a time: 256 KB, which stay in L2.
constexpr std::int64_t kGradientRows = 256, kGradientColumns = 512;
/// Blocks of rows with sums of their own, at most; fewer where these would be more than so many bytes.
constexpr std::int64_t kMostBlocks = 8, kMostSums = std::int64_t{32} << 20;

const char* RowAt(const TensorView& view, std::int64_t row) {
  return static_cast<const char*>(view.data) + row * view.stride[0] * SizeOf(view.dtype);
}

/// Rows [first, first + rows) of a factor, to be laid out as stored tiles.
class FactorRows {
 public:
  FactorRows(const TensorView& view, std::int64_t first, std::int64_t rows) : pointers_(static_cast<std::size_t>(rows)) {
    for (std::int64_t i = 0; i < rows; ++i) pointers_[static_cast<std::size_t>(i)] = RowAt(view, first + i);
    pack.rows = pointers_.data();
    pack.dtype = view.dtype;
    pack.count = rows;
    pack.columns = view.shape[1];
    pack.first_panel = first / kPanelRows;
  }

  PackRowsArgs pack;

 private:
  std::vector<const void*> pointers_;
};

void CheckFactor(const TensorView& view, const char* name, std::int64_t rows, std::int64_t columns) {
  if (view.rank != 2 || view.shape[0] != rows || view.shape[1] != columns) {
    throw std::invalid_argument(std::string(name) + " has shape " + ShapeText(view) + "; expected [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "]");
  }
  if (columns > 1 && view.stride[1] != 1) {
    throw std::invalid_argument(std::string(name) + " has gaps between its columns; expected contiguous rows");
  }
}

void CheckActivations(const TensorView& view, const char* name) {
  if (view.rank != 2) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.rank) + " dimensions; expected two");
  }
  if (view.dtype != DType::kBFloat16) {
    throw std::invalid_argument(std::string(name) + " is " + NameOf(view.dtype) + "; expected bfloat16");
  }
  if (view.shape[1] > 1 && view.stride[1] != 1) {
    throw std::invalid_argument(std::string(name) + " has gaps between its columns; expected contiguous rows");
  }
}

}  // namespace

void CheckLowRank(const LowRank& low_rank, std::int64_t rows, std::int64_t columns) {
  const std::int64_t rank = low_rank.a.rank == 2 ? low_rank.a.shape[0] : 0;
  if (rank < 1) throw std::invalid_argument("lora_a has shape " + ShapeText(low_rank.a) + "; expected [r, K]");
  CheckFactor(low_rank.a, "lora_a", rank, columns);
  CheckFactor(low_rank.b, "lora_b", rows, rank);
}

LowRankTiles::LowRankTiles(const LowRank& low_rank, Carver& carver) : low_rank_(&low_rank) {
  const std::int64_t rank = low_rank.rank(), padded = RoundUp(rank, kTileColumns);
  a_ = IsRankTwice(rank) ? TileMatrix::RepeatedPanel(nullptr, padded / kPanelRows, low_rank.a.shape[1])
                         : TileMatrix::Weights(nullptr, padded, low_rank.a.shape[1]);
  b_ = TileMatrix::Weights(nullptr, low_rank.b.shape[0], padded);
  a_.data = carver.Take<BFloat16>(a_.size());
  b_.data = carver.Take<BFloat16>(b_.size());
  tasks_of_a_ = CeilDiv(a_.columns, kTilesPerTask);
  tasks_of_b_ = CeilDiv(b_.panels, kTilesPerTask);
}

void LowRankTiles::Pack(std::int64_t task, const KernelTier& kernels) const {
  const FusedRange range(FusedStage::kPack, 0.0, 0.0);
  const std::int64_t rank = low_rank_->rank();
  if (task < tasks_of_a_) {
    FactorRows rows(low_rank_->a, 0, rank);
    rows.pack.stored = a_;
    rows.pack.panels = a_.repeats ? 1 : a_.panels;
    rows.pack.first_column = task * kTilesPerTask;
    rows.pack.tile_columns = std::min(kTilesPerTask, a_.columns - rows.pack.first_column);
    return kernels.pack_rows(rows.pack);
  }
  const std::int64_t first = (task - tasks_of_a_) * kTilesPerTask * kPanelRows;
  FactorRows rows(low_rank_->b, first, std::min(kTilesPerTask * kPanelRows, low_rank_->b.shape[0] - first));
  rows.pack.stored = b_;
  rows.pack.panels = CeilDiv(rows.pack.count, kPanelRows);
  rows.pack.repeat = IsRankTwice(rank);
  rows.pack.tile_columns = b_.columns;
  kernels.pack_rows(rows.pack);
}

namespace {

/// One call of LowRankGrad(). Both gradients are sums over rows of an intermediate and of activations,
///   sums[k][c] = sum over t of low[k][t] rows[t][c]
/// by strips of columns, first those of x, then those of d.
class GradRun {
 public:
  GradRun(const LowRankGradArgs& args, Pool& pool)
      : args_(args),
        pool_(pool),
        rows_(args.x.shape[0]),
        rank_rows_(RoundUp(args.rank, kPanelRows)),
        ld_(RoundUp(args.x.shape[1], kTileColumns) + RoundUp(args.d.shape[1], kTileColumns)),
        strips_of_x_(CeilDiv(args.x.shape[1], kGradientColumns)),
        strips_(strips_of_x_ + CeilDiv(args.d.shape[1], kGradientColumns)) {
    const std::int64_t most = std::clamp<std::int64_t>(kMostSums / SumsBytes(), 1, kMostBlocks);
    block_rows_ = RoundUp(CeilDiv(rows_, std::min(most, CeilDiv(rows_, kGradientRows))), kGradientRows);
    blocks_ = CeilDiv(rows_, block_rows_);
  }

  void Run() {
    Carver of_worker;
    Take(of_worker);
    const std::int64_t worker_bytes = of_worker.used();
    const Scratch scratch(blocks_ * SumsBytes() + pool_.num_threads() * worker_bytes);
    sums_ = reinterpret_cast<float*>(scratch.data());
    char* const workers = scratch.data() + blocks_ * SumsBytes();
    pool_.ParallelFor(blocks_ * strips_, [&](std::int64_t i, int worker) {
      Carver carver(workers + worker * worker_bytes);
      Sum(i / strips_, i % strips_, Take(carver));
    });
    pool_.ParallelFor(strips_, [&](std::int64_t strip, int) { Store(strip); });
  }

 private:
  struct Memory {
    float* values;     ///< [rank_rows_][kGradientRows] of an intermediate
    SplitTiles left;   ///< the same as operand
    TileMatrix right;  ///< row pairs [kGradientRows][kGradientColumns] of activations
  };
  /// Columns [first, first + count) of x or of d; `at`: their place among the sums.
  struct Strip {
    const TensorView& rows;
    const float* low;
    std::int64_t first, count, at;
  };

  std::int64_t SumsBytes() const { return rank_rows_ * ld_ * static_cast<std::int64_t>(sizeof(float)); }

  Memory Take(Carver& carver) const {
    Memory memory{};
    memory.values = carver.Take<float>(rank_rows_ * kGradientRows);
    for (TileMatrix* part : {&memory.left.hi, &memory.left.lo}) {
      *part = TileMatrix::Activations(nullptr, rank_rows_, kGradientRows);
      part->data = carver.Take<BFloat16>(part->size());
    }
    memory.right = TileMatrix::RowPairs(nullptr, kGradientRows, kGradientColumns);
    memory.right.data = carver.Take<BFloat16>(memory.right.size());
    return memory;
  }

  Strip StripOf(std::int64_t strip) const {
    const bool of_x = strip < strips_of_x_;
    const TensorView& rows = of_x ? args_.x : args_.d;
    const std::int64_t first = (of_x ? strip : strip - strips_of_x_) * kGradientColumns;
    const std::int64_t at = first + (of_x ? 0 : RoundUp(args_.x.shape[1], kTileColumns));
    return {rows, of_x ? args_.p : args_.low, first, std::min(kGradientColumns, rows.shape[1] - first), at};
  }

  float* SumsOf(std::int64_t block, const Strip& strip) const { return sums_ + block * rank_rows_ * ld_ + strip.at; }

  /// A block's sums of a strip.
  void Sum(std::int64_t block, std::int64_t index, Memory memory) const {
    const Strip strip = StripOf(index);
    const std::int64_t end = std::min((block + 1) * block_rows_, rows_);
    for (std::int64_t row = block * block_rows_; row < end; row += kGradientRows) {
      const std::int64_t count = std::min(kGradientRows, end - row);
      const FusedRange range(FusedStage::kBackwardLowRank, 2.0 * static_cast<double>(count * strip.count * args_.rank),
                             2.0 * static_cast<double>(count * strip.count));
      const std::int64_t tile_rows = RoundUp(count, kTileColumns);
      for (TileMatrix* part : {&memory.left.hi, &memory.left.lo}) part->columns = tile_rows / kTileColumns;
      for (std::int64_t k = 0; k < args_.rank; ++k) {
        std::memcpy(memory.values + k * kGradientRows, strip.low + k * rows_ + row,
                    static_cast<std::size_t>(count) * sizeof(float));
      }
      PackSplit(kernels_, memory.values, args_.rank, count, kGradientRows, TileKind::kOperand, memory.left);
      TileMatrix right = memory.right;
      right.columns = memory.left.hi.columns;
      PackRowPairs(strip, row, count, right);
      right.panels = CeilDiv(strip.count, kPanelRows);
      const std::array segments{GradientSegment{memory.left.hi, right}, GradientSegment{memory.left.lo, right}};
      GradientGemmArgs gemm;
      gemm.segments = segments;
      gemm.panels = rank_rows_ / kPanelRows;
      gemm.c = SumsOf(block, strip);
      gemm.ldc = ld_;
      gemm.accumulate = row > block * block_rows_;
      kernels_.gradient_gemm(gemm);
    }
  }

  void PackRowPairs(const Strip& strip, std::int64_t row, std::int64_t count, const TileMatrix& out) const {
    const void* rows[kGradientRows];
    for (std::int64_t i = 0; i < count; ++i) rows[i] = RowAt(strip.rows, row + i) + strip.first * SizeOf(DType::kBFloat16);
    PackRowsArgs pack;
    pack.rows = rows;
    pack.dtype = DType::kBFloat16;
    pack.count = count;
    pack.columns = strip.count;
    pack.row_pairs = out;
    pack.panels = 2 * out.columns;
    pack.tile_columns = CeilDiv(strip.count, kTileColumns);
    kernels_.pack_rows(pack);
  }

  /// Adds up the blocks of a strip, and writes it: d_a as it is, d_b transposed.
  void Store(std::int64_t index) const {
    const FusedRange range(FusedStage::kBackwardLowRank, 0.0, 0.0);
    const Strip strip = StripOf(index);
    for (std::int64_t k = 0; k < args_.rank; ++k) {
      float* const sums = SumsOf(0, strip) + k * ld_;
      for (std::int64_t block = 1; block < blocks_; ++block) {
        const float* const more = SumsOf(block, strip) + k * ld_;
        for (std::int64_t c = 0; c < strip.count; ++c) sums[c] += more[c];
      }
      if (index < strips_of_x_) {
        std::memcpy(args_.d_a + k * args_.x.shape[1] + strip.first, sums,
                    static_cast<std::size_t>(strip.count) * sizeof(float));
      }
    }
    if (index >= strips_of_x_) {
      TransposeSmall(SumsOf(0, strip), ld_, args_.rank, strip.count, args_.d_b + strip.first * args_.rank, args_.rank);
    }
  }

  const LowRankGradArgs& args_;
  Pool& pool_;
  const KernelTier& kernels_ = ChosenKernels();
  const std::int64_t rows_;
  const std::int64_t rank_rows_;  ///< whole panels of ranks
  const std::int64_t ld_;         ///< of sums: columns of x, and then of d
  const std::int64_t strips_of_x_, strips_;
  std::int64_t block_rows_, blocks_;
  float* sums_ = nullptr;
};

}  // namespace

void LowRankGrad(const LowRankGradArgs& args, Pool& pool) {
  CheckActivations(args.x, "x");
  CheckActivations(args.d, "d");
  if (args.d.shape[0] != args.x.shape[0]) {
    throw std::invalid_argument("d has " + std::to_string(args.d.shape[0]) + " rows; expected " +
                                std::to_string(args.x.shape[0]) + ", as x has");
  }
  if (args.x.shape[0] == 0) {
    std::fill_n(args.d_a, args.rank * args.x.shape[1], 0.0f);
    std::fill_n(args.d_b, args.rank * args.d.shape[1], 0.0f);
    return;
  }
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  GradRun(args, pool).Run();
}

}  // namespace moesaic::fused
