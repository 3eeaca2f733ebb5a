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

/// Lays rows [first, first + count) of a factor out; `order` says as what and where.
void PackFactor(const KernelTier& kernels, const TensorView& view, std::int64_t first, std::int64_t count, PackRowsArgs order) {
  const FusedRange range(FusedStage::kPack, 0.0, static_cast<double>(count * view.shape[1] * SizeOf(view.dtype)));
  std::vector<const void*> rows(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) rows[static_cast<std::size_t>(i)] = RowAt(view, first + i);
  order.rows = rows.data();
  order.dtype = view.dtype;
  order.count = count;
  order.columns = view.shape[1];
  kernels.pack_rows(order);
}

}  // namespace

void CheckLowRank(const LowRank& low_rank, std::int64_t rows, std::int64_t columns) {
  CheckMatrix(low_rank.a, "lora_a");
  CheckMatrix(low_rank.b, "lora_b");
  const std::int64_t rank = low_rank.rank();
  if (rank < 1) throw std::invalid_argument("lora_a has shape " + ShapeText(low_rank.a) + "; expected [r, K], r at least 1");
  Check(low_rank.a, "lora_a", rank, columns, low_rank.a.dtype);
  Check(low_rank.b, "lora_b", rows, rank, low_rank.b.dtype);
}

LowRankTiles::LowRankTiles(const LowRank& low_rank) : low_rank_(low_rank) {
  if (!low_rank.defined()) return;
  const std::int64_t rank = low_rank.rank(), padded = RoundUp(rank, kTileColumns);
  a_ = IsRankTwice(rank) ? TileMatrix::RepeatedPanel(nullptr, padded / kPanelRows, low_rank.a.shape[1])
                         : TileMatrix::Weights(nullptr, padded, low_rank.a.shape[1]);
  b_ = TileMatrix::Weights(nullptr, low_rank.b.shape[0], padded);
  tasks_of_a_ = CeilDiv(a_.columns, kTilesPerTask);
  tasks_of_b_ = CeilDiv(b_.panels, kTilesPerTask);
}

void LowRankTiles::Bind(Carver& carver) {
  a_.data = carver.Take<BFloat16>(a_.size());
  b_.data = carver.Take<BFloat16>(b_.size());
}

void LowRankTiles::Pack(std::int64_t task, const KernelTier& kernels) const {
  const std::int64_t rank = low_rank_.rank();
  PackRowsArgs order;
  if (task < tasks_of_a_) {
    order.stored = a_;
    order.panels = a_.repeats ? 1 : a_.panels;
    order.first_column = task * kTilesPerTask;
    order.tile_columns = std::min(kTilesPerTask, a_.columns - order.first_column);
    return PackFactor(kernels, low_rank_.a, 0, rank, order);
  }
  order.stored = b_;
  order.first_panel = (task - tasks_of_a_) * kTilesPerTask;
  order.panels = std::min(kTilesPerTask, b_.panels - order.first_panel);
  order.repeat = IsRankTwice(rank);
  order.tile_columns = b_.columns;
  const std::int64_t first = order.first_panel * kPanelRows;
  PackFactor(kernels, low_rank_.b, first, std::min(order.panels * kPanelRows, low_rank_.b.shape[0] - first), order);
}

LowRankTiles::Block LowRankTiles::Take(Carver& carver, std::int64_t rows, bool is_l) const {
  Block block;
  block.low = SplitTiles::Take(carver, rows, low_rank_.rank());
  block.values = carver.Take<float>(rows * padded_rank());
  if (is_l) block.transposed = carver.Take<float>(SumsPitch(rows) * padded_rank());
  return block;
}

void LowRankTiles::MultiplyByA(const KernelTier& kernels, const TileMatrix& x, std::int64_t rows, std::int64_t row_count,
                               const Kept& kept, Block& block) const {
  const std::int64_t rank = low_rank_.rank();
  const GemmSegment segment{a_, x};
  DirectGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = CeilDiv(rank, kPanelRows);
  gemm.activation_panels = x.panels;
  gemm.row_count = row_count;
  gemm.c = block.transposed;
  gemm.ldc = SumsPitch(x.panels * kPanelRows);
  kernels.direct_gemm(gemm);
  TransposeSmall(gemm.c, gemm.ldc, rank, rows, block.values, padded_rank());
  Finish(kernels, rows, x.panels, row_count > 0 ? TileKind::kStored : TileKind::kPairs, kept, block);
}

void LowRankTiles::MultiplyByB(const KernelTier& kernels, const TileMatrix& d, std::int64_t rows, BFloat16* scratch,
                               const Kept& kept, Block& block) const {
  const GemmSegment segment{b_, d};
  UnpackGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = d.panels;
  gemm.columns = b_.columns;
  gemm.c = block.values;
  gemm.ldc = padded_rank();
  gemm.row_count = rows;
  gemm.scratch = scratch;
  kernels.unpack_gemm(gemm);
  Finish(kernels, rows, d.panels, TileKind::kOperand, kept, block);
}

void LowRankTiles::Finish(const KernelTier& kernels, std::int64_t rows, std::int64_t panels, TileKind kind, const Kept& kept,
                          Block& block) const {
  const std::int64_t rank = low_rank_.rank(), padded = padded_rank();
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < rank; ++k) block.values[i * padded + k] *= low_rank_.scale;
  }
  if (kept.low != nullptr) TransposeSmall(block.values, padded, rows, rank, kept.low, kept.stride);
  block.low.hi.panels = block.low.lo.panels = panels;
  PackSplit(kernels, block.values, rows, rank, padded, kind, block.low);
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
    Carver shared, of_worker;
    TakeShared(shared);
    Take(of_worker);
    const std::int64_t worker_bytes = of_worker.used(), threads = pool_.num_threads();
    const std::int64_t bytes = shared.used() + threads * worker_bytes;
    const Scratch scratch(bytes, IsKept(bytes, threads));
    Carver carver(scratch.data());
    TakeShared(carver);
    char* const workers = scratch.data() + carver.used();
    const auto memory_of = [&](int worker) {
      Carver of(workers + worker * worker_bytes);
      return Take(of);
    };
    pool_.ParallelFor(2 * CeilDiv(rows_, kGradientRows),
                      [&](std::int64_t i, int worker) { PackLeft(i % 2, i / 2 * kGradientRows, memory_of(worker)); });
    pool_.ParallelFor(blocks_ * strips_, [&](std::int64_t i, int worker) { Sum(i / strips_, i % strips_, memory_of(worker)); });
    pool_.ParallelFor(strips_, [&](std::int64_t strip, int) { Store(strip); });
  }

 private:
  struct Memory {
    float* values;     ///< [rank_rows_][kGradientRows] of an intermediate
    TileMatrix right;  ///< row pairs [kGradientRows][kGradientColumns] of activations
  };
  /// Columns [first, first + count) of x (side 0) or of d (side 1); `at`: their place among the sums.
  struct Strip {
    std::int64_t side, first, count, at;
  };

  const TensorView& RowsOf(std::int64_t side) const { return side == 0 ? args_.x : args_.d; }
  std::int64_t SumsBytes() const { return rank_rows_ * ld_ * static_cast<std::int64_t>(sizeof(float)); }

  void TakeShared(Carver& carver) {
    sums_ = carver.Take<float>(blocks_ * rank_rows_ * ld_);
    for (SplitTiles& left : left_) {
      for (TileMatrix* part : {&left.hi, &left.lo}) {
        *part = TileMatrix::Activations(nullptr, rank_rows_, rows_);
        part->data = carver.Take<BFloat16>(part->size());
      }
    }
  }
  Memory Take(Carver& carver) const {
    Memory memory{};
    memory.values = carver.Take<float>(rank_rows_ * kGradientRows);
    memory.right = TileMatrix::RowPairs(nullptr, kGradientRows, kGradientColumns);
    memory.right.data = carver.Take<BFloat16>(memory.right.size());
    return memory;
  }

  /// Rows [row, row + count) of an intermediate.
  SplitTiles Left(std::int64_t side, std::int64_t row, std::int64_t count) const {
    SplitTiles left = left_[static_cast<std::size_t>(side)];
    for (TileMatrix* part : {&left.hi, &left.lo}) {
      part->data = part->Tile(0, row / kTileColumns);
      part->columns = CeilDiv(count, kTileColumns);
    }
    return left;
  }

  void PackLeft(std::int64_t side, std::int64_t row, const Memory& memory) const {
    const FusedRange range(FusedStage::kBackwardLowRank, 0.0, 0.0);
    const std::int64_t count = std::min(kGradientRows, rows_ - row);
    const float* const low = (side == 0 ? args_.p : args_.low) + row;
    for (std::int64_t k = 0; k < args_.rank; ++k) {
      std::memcpy(memory.values + k * kGradientRows, low + k * rows_, static_cast<std::size_t>(count) * sizeof(float));
    }
    PackSplit(kernels_, memory.values, args_.rank, count, kGradientRows, TileKind::kOperand, Left(side, row, count));
  }

  Strip StripOf(std::int64_t index) const {
    const std::int64_t side = index < strips_of_x_ ? 0 : 1;
    const std::int64_t first = (index - side * strips_of_x_) * kGradientColumns;
    return {side, first, std::min(kGradientColumns, RowsOf(side).shape[1] - first),
            first + side * RoundUp(args_.x.shape[1], kTileColumns)};
  }

  float* SumsOf(std::int64_t block, const Strip& strip) const { return sums_ + block * rank_rows_ * ld_ + strip.at; }

  /// A block's sums of a strip.
  void Sum(std::int64_t block, std::int64_t index, const Memory& memory) const {
    const Strip strip = StripOf(index);
    const std::int64_t end = std::min((block + 1) * block_rows_, rows_);
    for (std::int64_t row = block * block_rows_; row < end; row += kGradientRows) {
      const std::int64_t count = std::min(kGradientRows, end - row);
      const FusedRange range(FusedStage::kBackwardLowRank, 2.0 * static_cast<double>(count * strip.count * args_.rank),
                             2.0 * static_cast<double>(count * strip.count));
      const SplitTiles left = Left(strip.side, row, count);
      TileMatrix right = memory.right;
      right.columns = left.hi.columns;
      PackRowPairs(strip, row, count, right);
      right.panels = CeilDiv(strip.count, kPanelRows);
      const std::array segments{GradientSegment{left.hi, right}, GradientSegment{left.lo, right}};
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
    const TensorView& all = RowsOf(strip.side);
    for (std::int64_t i = 0; i < count; ++i) rows[i] = RowAt(all, row + i) + strip.first * SizeOf(DType::kBFloat16);
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
    const Strip strip = StripOf(index);
    const FusedRange range(FusedStage::kBackwardLowRank, 0.0, 4.0 * static_cast<double>(strip.count * args_.rank));
    for (std::int64_t k = 0; k < args_.rank; ++k) {
      float* const sums = SumsOf(0, strip) + k * ld_;
      for (std::int64_t block = 1; block < blocks_; ++block) {
        const float* const more = SumsOf(block, strip) + k * ld_;
        for (std::int64_t c = 0; c < strip.count; ++c) sums[c] += more[c];
      }
      if (strip.side == 1) continue;
      std::memcpy(args_.d_a + k * args_.x.shape[1] + strip.first, sums, static_cast<std::size_t>(strip.count) * sizeof(float));
    }
    if (strip.side == 0) return;
    TransposeSmall(SumsOf(0, strip), ld_, args_.rank, strip.count, args_.d_b + strip.first * args_.rank, args_.rank);
  }

  const LowRankGradArgs& args_;
  Pool& pool_;
  const KernelTier& kernels_ = ChosenKernels();
  const std::int64_t rows_;
  const std::int64_t rank_rows_;  ///< whole panels of ranks
  const std::int64_t ld_;         ///< of sums: columns of x, and then of d
  const std::int64_t strips_of_x_, strips_;
  std::int64_t block_rows_, blocks_;
  float* sums_ = nullptr;           ///< [blocks_][rank_rows_][ld_]
  std::array<SplitTiles, 2> left_;  ///< operand [rank_rows_][rows_]: P^T, L^T
};

}  // namespace

void LowRankGrad(const LowRankGradArgs& args, Pool& pool) {
  CheckMatrix(args.x, "x");
  if (args.x.dtype != DType::kBFloat16) throw std::invalid_argument("x is float32; expected bfloat16");
  if (args.x.shape[1] > 1 && args.x.stride[1] != 1) {
    throw std::invalid_argument("x has gaps between its columns; expected contiguous rows");
  }
  CheckMatrix(args.d, "d");
  Check(args.d, "d", args.x.shape[0], args.d.shape[1], args.x.dtype);
  if (args.rank < 1) throw std::invalid_argument("p has " + std::to_string(args.rank) + " rows; expected at least 1");
  if (args.x.shape[0] == 0 || args.x.shape[1] == 0 || args.d.shape[1] == 0) {
    std::fill_n(args.d_a, args.rank * args.x.shape[1], 0.0f);
    std::fill_n(args.d_b, args.rank * args.d.shape[1], 0.0f);
    return;
  }
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  GradRun(args, pool).Run();
}

}  // namespace moesaic::fused
