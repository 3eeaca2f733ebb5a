#include "profiling/bench/grouped_gemm.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "profiling/bench/operands.h"
#include "profiling/bench/rate.h"

namespace moesaic::bench {
namespace {

/// Memory of the calling thread's own, kept for its next task.
std::byte* Scratch(std::int64_t bytes) {
  thread_local AlignedBuffer buffer;
  buffer.Ensure(bytes);
  return static_cast<std::byte*>(buffer.data());
}

/// Touched by the workers, as packed weights are.
void FillTogether(threadpool::Pool& pool, AlignedBuffer& buffer) {
  constexpr std::int64_t kPart = std::int64_t{1} << 20;
  pool.ParallelFor(CeilDiv(buffer.bytes(), kPart), [&](std::int64_t i, int) {
    const std::int64_t begin = i * kPart, bytes = std::min(kPart, buffer.bytes() - begin);
    FillOperands({static_cast<std::byte*>(buffer.data()) + begin, static_cast<std::size_t>(bytes)});
  });
}

}  // namespace

FarWeights::FarWeights(threadpool::Pool& pool, std::int64_t bytes) : memory_(RoundUp(bytes, 4096)) {
  FillTogether(pool, memory_);
}

std::byte* FarWeights::Next(std::int64_t bytes) {
  bytes = RoundUp(bytes, 4096);
  if (at_ + bytes > memory_.bytes()) at_ = 0;
  return static_cast<std::byte*>(memory_.data()) + std::exchange(at_, at_ + bytes);
}

GroupedGemm::GroupedGemm(const KernelTier& tier, const GemmProblem& problem, threadpool::Pool& pool,
                         std::shared_ptr<FarWeights> far)
    : tier_(tier), problem_(problem), pool_(pool), far_(std::move(far)) {
  const bool direct = problem.form == GemmForm::kDirect, gradient = problem.form == GemmForm::kGradient;
  const std::int64_t k = problem.k, n = problem.n;
  std::int64_t count = 0;
  for (const GroupRows& rows : problem.groups) count += rows.groups;
  if (count < 1 || k < 1 || n < 1) throw std::invalid_argument("problem is empty, expected a group with rows, and k, n >= 1");

  const TileMatrix weights =
      gradient ? TileMatrix::RowPairs(nullptr, k, n) : TileMatrix::Weights(nullptr, direct ? n : k, direct ? k : n);
  const std::int64_t weight_bytes = count * BytesOf(weights);
  if (far_ != nullptr && far_->bytes() < weight_bytes) far_ = nullptr;

  for (const bool measure : {true, false}) {
    Carver x(measure ? nullptr : x_.data()), tiles(measure ? nullptr : tiles_.data()), c(measure ? nullptr : c_.data());
    for (const GroupRows& some : problem.groups) {
      for (std::int64_t i = 0; i < some.groups; ++i) {
        Group group{some.rows, weights, TileMatrix::Activations(nullptr, some.rows, k), nullptr, nullptr, 0};
        const std::int64_t padded = RoundUp(some.rows, kPanelRows);
        group.x = x.Take<std::byte>(some.rows * k * problem.input_bytes);
        group.activations.data = tiles.Take<BFloat16>(group.activations.size());
        group.ldc = direct ? padded : RoundUp(n, kTileColumns);
        if (problem.output_bytes == 4) group.ldc = SumsPitch(group.ldc);
        group.c = c.Take<std::byte>((direct ? RoundUp(n, kPanelRows) : padded) * group.ldc * problem.output_bytes);
        if (!measure) groups_.push_back(group);
      }
    }
    if (!measure) break;
    x_ = AlignedBuffer(x.used());
    tiles_ = AlignedBuffer(tiles.used());
    c_ = AlignedBuffer(c.used());
  }
  Fill({static_cast<std::byte*>(x_.data()), static_cast<std::size_t>(x_.bytes())}, problem.input_bytes);
  std::memset(c_.data(), 0, static_cast<std::size_t>(c_.bytes()));
  if (far_ == nullptr) {
    weights_ = AlignedBuffer(weight_bytes);
    FillTogether(pool_, weights_);
    PlaceWeights(static_cast<std::byte*>(weights_.data()));
  }
  PackActivations(pool_.num_threads());
}

void GroupedGemm::Fill(std::span<std::byte> memory, std::int64_t value_bytes) {
  // Between -2 and 2, with all bits of bf16 in use: sums round, and another order of them would give other bits.
  for (std::size_t at = 0; at + static_cast<std::size_t>(value_bytes) <= memory.size();
       at += static_cast<std::size_t>(value_bytes)) {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    const float value = static_cast<float>(static_cast<std::int64_t>(random_ >> 48) - 32768) / 16384.0f;
    if (value_bytes == 4) {
      std::memcpy(&memory[at], &value, sizeof(value));
    } else {
      const BFloat16 rounded = ToBFloat16(value);
      std::memcpy(&memory[at], &rounded, sizeof(rounded));
    }
  }
}

void GroupedGemm::PlaceWeights(std::byte* at) {
  for (Group& group : groups_) {
    group.weights.data = reinterpret_cast<BFloat16*>(at);
    at += BytesOf(group.weights);
  }
}

void GroupedGemm::PackActivations(int workers) {
  constexpr std::int64_t kChunk = PackingCut::kRows;
  struct Piece {
    const Group* group;
    std::int64_t row, first_column, columns;
  };
  std::vector<Piece> pieces;
  const std::int64_t all = CeilDiv(problem_.k, kTileColumns), columns = CutPacking(problem_, workers).columns;
  for (const Group& group : groups_) {
    for (std::int64_t row = 0; row < group.rows; row += kChunk) {
      for (std::int64_t column = 0; column < all; column += columns) {
        pieces.push_back({&group, row, column, std::min(columns, all - column)});
      }
    }
  }
  pool_.ParallelFor(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t i, int) {
    const Piece& piece = pieces[static_cast<std::size_t>(i)];
    const Group& group = *piece.group;
    const void* rows[kChunk];
    const std::int64_t count = std::min(kChunk, group.rows - piece.row);
    for (std::int64_t r = 0; r < count; ++r) rows[r] = group.x + (piece.row + r) * problem_.k * problem_.input_bytes;
    PackRowsArgs pack;
    pack.rows = rows;
    pack.dtype = problem_.input_bytes == 4 ? DType::kFloat32 : DType::kBFloat16;
    pack.count = count;
    pack.columns = problem_.k;
    (problem_.form != GemmForm::kDirect ? pack.operand : IsFew(group) ? pack.stored : pack.pairs) = group.activations;
    pack.first_panel = piece.row / kPanelRows;
    pack.panels = CeilDiv(count, kPanelRows);
    pack.first_column = piece.first_column;
    pack.tile_columns = piece.columns;
    tier_.pack_rows(pack);
  });
}

void GroupedGemm::PlaceFarWeights() {
  if (far_ != nullptr) PlaceWeights(far_->Next(static_cast<std::int64_t>(groups_.size()) * BytesOf(groups_[0].weights)));
}

void GroupedGemm::CutTasks(const GemmConfiguration& configuration) {
  if (!Legal(problem_, configuration)) throw std::invalid_argument("configuration is not one that the kernels can run");
  tasks_.clear();
  for (const Group& group : groups_) {
    const std::int64_t rows = TaskRows(group.rows, configuration, problem_.form == GemmForm::kDirect && IsFew(group));
    for (std::int64_t column = 0; column < problem_.n; column += configuration.task_columns) {
      for (std::int64_t row = 0; row < group.rows; row += rows) {
        tasks_.push_back(
            {&group, row, std::min(rows, group.rows - row), column, std::min(configuration.task_columns, problem_.n - column)});
      }
    }
  }
}

void GroupedGemm::Run(const GemmConfiguration& configuration) {
  CutTasks(configuration);
  PlaceFarWeights();
  if (!problem_.packed) PackActivations(pool_.num_threads());
  pool_.ParallelFor(static_cast<std::int64_t>(tasks_.size()),
                    [&](std::int64_t i, int) { RunTask(tasks_[static_cast<std::size_t>(i)], configuration); });
}

void GroupedGemm::RunTask(const Task& task, const GemmConfiguration& c) {
  const bool whole_rows = problem_.form == GemmForm::kDirect && IsFew(*task.group);
  const std::int64_t row_step =
      whole_rows ? RoundUp(task.rows, kPanelRows) : std::min(c.call_rows, RoundUp(task.rows, kPanelRows));
  const std::int64_t column_step = std::min(c.call_columns, RoundUp(task.columns, kTileColumns));
  const std::int64_t depth = CutsInCalls(IsFew(*task.group)) ? std::min(c.call_depth, problem_.k) : problem_.k;
  const std::int64_t row_calls = CeilDiv(task.rows, row_step), column_calls = CeilDiv(task.columns, column_step);
  const std::int64_t depth_calls = CeilDiv(problem_.k, depth);
  const bool rounds = problem_.form != GemmForm::kUnpack && problem_.output_bytes == 2;
  // Sums that are rounded later: of a call, or of the task where calls go on from them.
  const bool whole = depth_calls > 1;
  const std::int64_t sums_ld = SumsPitch(RoundUp(whole ? task.rows : row_step, kPanelRows));
  float* sums = nullptr;
  if (rounds) {
    const std::int64_t columns = RoundUp(whole ? task.columns : column_step, kTileColumns);
    const std::int64_t wide = problem_.form == GemmForm::kDirect ? columns * sums_ld : 0;
    sums = reinterpret_cast<float*>(Scratch(std::max<std::int64_t>(wide, 16) * 4));
  }
  const auto call = [&](std::int64_t r, std::int64_t n, std::int64_t k) {
    const Block block{task.row + r * row_step,
                      std::min(row_step, task.rows - r * row_step),
                      task.column + n * column_step,
                      std::min(column_step, task.columns - n * column_step),
                      k * depth,
                      std::min(depth, problem_.k - k * depth)};
    // The columns of the next call: behind the last rows, or always where each row block meets all columns.
    const bool columns_follow = n + 1 < column_calls && (c.order == LoopOrder::kRows || r + 1 == row_calls);
    PrefetchRange next;
    if (problem_.form == GemmForm::kDirect && column_step <= kMostPrefetched && columns_follow) {
      next.weights = task.group->weights;
      next.first_panel = (block.column + block.columns) / kPanelRows;
      next.panels = CeilDiv(std::min(column_step, task.column + task.columns - block.column - block.columns), kPanelRows);
      next.first_column = block.k / kTileColumns;
      next.columns = CeilDiv(block.depth, kTileColumns);
    }
    float* at = sums;
    if (rounds && whole) at += (block.column - task.column) * sums_ld + block.row - task.row;
    Call(task, block, next, at, sums_ld, c.call_depth);
    if (rounds && !whole) Round(task, block.column, block.columns, block.row, block.rows, sums, sums_ld);
  };
  const auto along_depth = [&](std::int64_t r, std::int64_t n) {
    for (std::int64_t k = 0; k < depth_calls; ++k) call(r, n, k);
  };
  switch (c.order) {
    case LoopOrder::kRows:
      for (std::int64_t r = 0; r < row_calls; ++r) {
        for (std::int64_t n = 0; n < column_calls; ++n) along_depth(r, n);
      }
      break;
    case LoopOrder::kColumns:
      for (std::int64_t n = 0; n < column_calls; ++n) {
        for (std::int64_t r = 0; r < row_calls; ++r) along_depth(r, n);
      }
      break;
    case LoopOrder::kDepth:
      for (std::int64_t k = 0; k < depth_calls; ++k) {
        for (std::int64_t n = 0; n < column_calls; ++n) {
          for (std::int64_t r = 0; r < row_calls; ++r) call(r, n, k);
        }
      }
      break;
  }
  if (rounds && whole) Round(task, task.column, task.columns, task.row, task.rows, sums, sums_ld);
}

void GroupedGemm::Call(const Task& task, const Block& block, const PrefetchRange& prefetch, float* sums, std::int64_t sums_ld,
                       std::int64_t slice) {
  switch (problem_.form) {
    case GemmForm::kDirect:
      return CallDirect(task, block, prefetch, sums, sums_ld);
    case GemmForm::kUnpack:
      return CallUnpack(task, block, slice);
    case GemmForm::kGradient:
      return CallGradient(task, block);
  }
}

void GroupedGemm::CallDirect(const Task& task, const Block& block, const PrefetchRange& prefetch, float* sums,
                             std::int64_t sums_ld) {
  const Group& group = *task.group;
  GemmSegment segment{group.weights, group.activations};
  DirectGemmArgs args;
  args.first_panel = block.column / kPanelRows;
  args.panels = CeilDiv(block.columns, kPanelRows);
  const std::int64_t k = block.k / kTileColumns;
  if (block.depth < problem_.k) {
    // A window of a matrix in superblocks is one itself as long as it lies in one row of them (gemm/tiles.h).
    const std::int64_t first = args.first_panel / kSuperblock * kSuperblock;
    segment.weights.data = group.weights.Tile(first, k);
    segment.weights.panels = std::min(kSuperblock, group.weights.panels - first);
    segment.weights.columns = CeilDiv(block.depth, kTileColumns);
    args.first_panel -= first;
  }
  segment.activations.data = group.activations.Tile(block.row / kPanelRows, k);
  segment.activations.columns = CeilDiv(block.depth, kTileColumns);
  args.segments = {&segment, 1};
  args.activation_panels = CeilDiv(block.rows, kPanelRows);
  args.row_count = IsFew(group) ? block.rows : 0;
  args.c = sums != nullptr ? sums : reinterpret_cast<float*>(group.c) + block.column * group.ldc + block.row;
  args.ldc = sums != nullptr ? sums_ld : group.ldc;
  args.accumulate = block.k > 0;
  args.prefetch = prefetch;
  tier_.direct_gemm(args);
}

void GroupedGemm::CallUnpack(const Task& task, const Block& block, std::int64_t slice) {
  const Group& group = *task.group;
  const TileMatrix& all = group.weights;
  const std::int64_t first = block.k / kPanelRows;
  GemmSegment segment{all, group.activations};
  segment.weights.data = all.data + first * all.columns * kTileElements;
  segment.weights.panels = CeilDiv(block.depth, kPanelRows);
  segment.activations.data = group.activations.Tile(block.row / kPanelRows, block.k / kTileColumns);
  segment.activations.columns = CeilDiv(block.depth, kTileColumns);
  UnpackGemmArgs args;
  args.segments = {&segment, 1};
  args.panels = CeilDiv(block.rows, kPanelRows);
  args.row_count = block.rows;
  args.first_column = block.column / kTileColumns;
  args.columns = CeilDiv(block.columns, kTileColumns);
  args.depth = slice < block.depth ? slice / kTileColumns : 0;
  const std::int64_t scratch = UnpackScratchElements(args.segments) * 2;
  const std::int64_t row_count = args.panels * kPanelRows, sum_columns = SumsPitch(kSuperblock * kTileColumns);
  Carver carver(Scratch(scratch + row_count * (8 + 4 * sum_columns) + 128));
  args.scratch = carver.Take<BFloat16>(scratch / 2);
  if (problem_.output_bytes == 2) {
    args.c = carver.Take<float>(row_count * sum_columns);
    args.ldc = sum_columns;
    BFloat16** rows = carver.Take<BFloat16*>(row_count);
    for (std::int64_t i = 0; i < row_count; ++i) {
      rows[i] = i < block.rows ? reinterpret_cast<BFloat16*>(group.c) + (block.row + i) * group.ldc : nullptr;
    }
    args.rows = rows;
  } else if (tier_.unpack_overlaps) {
    // A matrix unit's sums go through L1 at each slice: as close together as those that are rounded, and copied behind them.
    args.c = carver.Take<float>(row_count * sum_columns);
    args.ldc = sum_columns;
    for (const std::int64_t end = args.first_column + args.columns; args.first_column < end; args.first_column += kSuperblock) {
      args.columns = std::min(kSuperblock, end - args.first_column);
      tier_.unpack_gemm(args);
      for (std::int64_t i = 0; i < block.rows; ++i) {
        float* row = reinterpret_cast<float*>(group.c) + (block.row + i) * group.ldc;
        std::copy_n(args.c + i * sum_columns, args.columns * kTileColumns, row + args.first_column * kTileColumns);
      }
    }
    return;
  } else {
    args.c = reinterpret_cast<float*>(group.c) + block.row * group.ldc + block.column;
    args.ldc = group.ldc;
    args.accumulate = block.k > 0;
  }
  tier_.unpack_gemm(args);
}

void GroupedGemm::CallGradient(const Task& task, const Block& block) {
  const Group& group = *task.group;
  GradientSegment segment{group.activations, group.weights};
  const std::int64_t k = block.k / kTileColumns;
  segment.left.data = group.activations.Tile(block.row / kPanelRows, k);
  segment.left.columns = CeilDiv(block.depth, kTileColumns);
  segment.right.data = group.weights.Tile(block.column / kPanelRows, k);
  segment.right.panels = CeilDiv(block.columns, kPanelRows);
  segment.right.columns = segment.left.columns;
  GradientGemmArgs args;
  args.segments = {&segment, 1};
  args.panels = CeilDiv(block.rows, kPanelRows);
  args.c = reinterpret_cast<float*>(group.c) + block.row * group.ldc + block.column;
  args.ldc = group.ldc;
  args.accumulate = block.k > 0;
  tier_.gradient_gemm(args);
}

void GroupedGemm::Round(const Task& task, std::int64_t column, std::int64_t columns, std::int64_t row, std::int64_t rows,
                        const float* sums, std::int64_t sums_ld) {
  StoreRowsArgs store;
  store.in = sums;
  store.ld = sums_ld;
  store.rows = columns;
  store.columns = rows;
  store.out = reinterpret_cast<BFloat16*>(task.group->c) + column * task.group->ldc + row;
  store.dtype = DType::kBFloat16;
  store.out_stride = task.group->ldc;
  tier_.store_rows(store);
}

void GroupedGemm::Scatter() {
  constexpr std::int64_t kPart = std::int64_t{1} << 14;
  // Threads take parts about in turn: one further on each part is another thread's.
  const std::int64_t further = scattered_++;
  for (const AlignedBuffer* buffer : {&x_, &tiles_, &c_}) {
    const std::int64_t parts = CeilDiv(buffer->bytes(), kPart);
    pool_.ParallelFor(parts, [&](std::int64_t i, int) {
      const std::int64_t begin = (i + further) % parts * kPart, end = std::min(begin + kPart, buffer->bytes());
      auto* bytes = static_cast<volatile std::byte*>(buffer->data());
      for (std::int64_t at = begin; at < end; at += 64) bytes[at] = bytes[at];
    });
  }
}

std::vector<std::vector<double>> GroupedGemm::Measure(std::span<const GemmConfiguration> configurations, int count) {
  std::vector<std::vector<double>> times(configurations.size());
  OnAllWorkers(&pool_, [](int) {});  // awake, as they are from call to call
  for (int i = 0; i < count; ++i) {
    for (std::size_t c = 0; c < configurations.size(); ++c) {
      Scatter();
      const std::int64_t start = profiling::Now();
      Run(configurations[c]);
      times[c].push_back(SecondsSince(start) * 1e3);
    }
  }
  return times;
}

std::vector<GroupedGemm::Pass> GroupedGemm::MeasurePasses(const GemmConfiguration& configuration, int count) {
  CutTasks(configuration);
  std::vector<Pass> passes;
  std::vector<double> seconds(tasks_.size());
  OnAllWorkers(&pool_, [](int) {});
  for (int i = 0; i < count; ++i) {
    PlaceFarWeights();
    Scatter();
    const std::int64_t start = profiling::Now();
    if (!problem_.packed) PackActivations(pool_.num_threads());
    const double packing = problem_.packed ? 0.0 : SecondsSince(start);
    pool_.ParallelFor(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t task, int) {
      const std::int64_t begin = profiling::Now();
      RunTask(tasks_[static_cast<std::size_t>(task)], configuration);
      seconds[static_cast<std::size_t>(task)] = SecondsSince(begin);
    });
    const double longest = std::ranges::max(seconds), sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    passes.push_back({packing * 1e3, longest * static_cast<double>(seconds.size()) / sum});
  }
  return passes;
}

double GroupedGemm::Result(std::int64_t group, std::int64_t row, std::int64_t column) const {
  const Group& g = groups_[static_cast<std::size_t>(group)];
  const std::int64_t at = problem_.form == GemmForm::kDirect ? column * g.ldc + row : row * g.ldc + column;
  if (problem_.output_bytes == 4) return reinterpret_cast<const float*>(g.c)[at];
  return ToFloat(reinterpret_cast<const BFloat16*>(g.c)[at]);
}

double GroupedGemm::Activation(std::int64_t group, std::int64_t row, std::int64_t k) const {
  const std::byte* x = groups_[static_cast<std::size_t>(group)].x + (row * problem_.k + k) * problem_.input_bytes;
  if (problem_.input_bytes == 4) return *reinterpret_cast<const float*>(x);
  return ToFloat(*reinterpret_cast<const BFloat16*>(x));
}

double GroupedGemm::Weight(std::int64_t group, std::int64_t k, std::int64_t column) const {
  const TileMatrix& weights = groups_[static_cast<std::size_t>(group)].weights;
  if (problem_.form == GemmForm::kGradient) {
    const BFloat16* tile = weights.Tile(column / kPanelRows, k / kTileColumns);
    return ToFloat(tile[k % kTileColumns / 2 * kTileColumns + column % kPanelRows * 2 + k % 2]);
  }
  const std::int64_t row = problem_.form == GemmForm::kDirect ? column : k,
                     at = problem_.form == GemmForm::kDirect ? k : column;
  const BFloat16* tile = weights.Tile(row / kPanelRows, at / kTileColumns);
  return ToFloat(tile[row % kPanelRows * kTileColumns + StoredPosition(at % kTileColumns)]);
}

std::uint64_t GroupedGemm::Digest() const {
  std::uint64_t digest = 1469598103934665603u;  // FNV-1a
  for (const Group& group : groups_) {
    const bool direct = problem_.form == GemmForm::kDirect;
    for (std::int64_t i = 0; i < (direct ? problem_.n : group.rows); ++i) {
      const std::byte* row = group.c + i * group.ldc * problem_.output_bytes;
      for (std::int64_t j = 0; j < (direct ? group.rows : problem_.n) * problem_.output_bytes; ++j) {
        digest = (digest ^ static_cast<std::uint64_t>(row[j])) * 1099511628211u;
      }
    }
  }
  return digest;
}

}  // namespace moesaic::bench
