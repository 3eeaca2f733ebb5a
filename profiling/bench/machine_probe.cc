#include "profiling/bench/machine_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>

#include "cpu_kernels/aligned_buffer.h"
#include "profiling/bench/probes.h"
#include "profiling/bench/rate.h"

namespace moesaic::bench {
namespace {

using Clock = std::chrono::steady_clock;

ReadBlock WidestReadBlock() {
  if (__builtin_cpu_supports("avx512f") != 0) return ReadBlockAvx512;
  if (__builtin_cpu_supports("avx2") != 0) return ReadBlockAvx2;
  return ReadBlockSse2;
}

/// Nanoseconds of a call of `body`, the least of several groups of calls, each long enough for the clock.
template <typename Body>
double LeastNs(Body&& body) {
  constexpr int kGroups = 40;
  constexpr double kGroupSeconds = 1e-4;
  std::int64_t calls = 1;
  double least = 0;
  for (int group = 0; group < kGroups;) {
    const Clock::time_point start = Clock::now();
    for (std::int64_t i = 0; i < calls; ++i) body();
    const double seconds = SecondsSince(start);
    if (seconds < kGroupSeconds / 2) {
      calls *= 2;
      continue;
    }
    const double ns = seconds * 1e9 / static_cast<double>(calls);
    least = group == 0 ? ns : std::min(least, ns);
    ++group;
  }
  return least;
}

BFloat16* Tiles(AlignedBuffer& buffer, const TileMatrix& matrix) {
  buffer = AlignedBuffer(matrix.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
  std::memset(buffer.data(), 0, static_cast<std::size_t>(buffer.bytes()));
  return static_cast<BFloat16*>(buffer.data());
}

/// Operands of one call: zeros, since time does not depend on the values.
class Call {
 public:
  /// @param weight_rows, weight_columns  as stored
  Call(const KernelTier& tier, std::int64_t rows, std::int64_t weight_rows, std::int64_t weight_columns, bool direct)
      : tier_(tier), direct_(direct), rows_(rows) {
    segment_.weights = TileMatrix::Weights(nullptr, weight_rows, weight_columns);
    segment_.weights.data = Tiles(weight_buffer_, segment_.weights);
    segment_.activations = TileMatrix::Activations(nullptr, rows, direct ? weight_columns : weight_rows);
    segment_.activations.data = Tiles(activation_buffer_, segment_.activations);
    const std::int64_t c_rows = RoundUp(direct ? weight_rows : rows, kPanelRows);
    ldc_ = RoundUp(direct ? rows : weight_columns, kTileColumns);
    c_ = AlignedBuffer(c_rows * ldc_ * static_cast<std::int64_t>(sizeof(float)));
    const std::int64_t scratch = direct ? 0 : UnpackScratchElements({&segment_, 1});
    scratch_ = AlignedBuffer(std::max<std::int64_t>(scratch, 1) * static_cast<std::int64_t>(sizeof(BFloat16)));
  }

  std::int64_t weight_bytes() const { return weight_buffer_.bytes(); }

  void Run() { Run(0, direct_ ? segment_.weights.panels : segment_.weights.columns, {}); }

  /// A part of the columns of C, in panels (direct) or tile columns.
  void Run(std::int64_t first, std::int64_t count, const PrefetchRange& prefetch) {
    if (direct_) {
      DirectGemmArgs args;
      args.segments = {&segment_, 1};
      args.first_panel = first;
      args.panels = count;
      args.activation_panels = CeilDiv(rows_, kPanelRows);
      args.c = static_cast<float*>(c_.data());
      args.ldc = ldc_;
      args.prefetch = prefetch;
      tier_.direct_gemm(args);
    } else {
      UnpackGemmArgs args;
      args.segments = {&segment_, 1};
      args.panels = CeilDiv(rows_, kPanelRows);
      args.first_column = first;
      args.columns = count;
      args.c = static_cast<float*>(c_.data());
      args.ldc = ldc_;
      args.scratch = static_cast<BFloat16*>(scratch_.data());
      tier_.unpack_gemm(args);
    }
  }

  /// All of it as the engine does: two panels at a time, with the next two prefetched; or all tile columns.
  void RunStreaming() {
    if (!direct_) return Run();
    const std::int64_t panels = segment_.weights.panels;
    for (std::int64_t panel = 0; panel < panels; panel += 2) {
      PrefetchRange next;
      if (panel + 2 < panels) {
        next.weights = segment_.weights;
        next.first_panel = panel + 2;
        next.panels = std::min<std::int64_t>(2, panels - panel - 2);
        next.columns = segment_.weights.columns;
      }
      Run(panel, std::min<std::int64_t>(2, panels - panel), next);
    }
  }

 private:
  const KernelTier& tier_;
  const bool direct_;
  const std::int64_t rows_;
  GemmSegment segment_;
  AlignedBuffer weight_buffer_, activation_buffer_, c_, scratch_;
  std::int64_t ldc_ = 0;
};

double DirectNs(const KernelTier& tier, std::int64_t left_panels, std::int64_t right_panels, std::int64_t steps) {
  Call call(tier, right_panels * kPanelRows, left_panels * kPanelRows, steps * kTileColumns, true);
  return LeastNs([&] { call.Run(); });
}

double UnpackNs(const KernelTier& tier, std::int64_t row_panels, std::int64_t steps, std::int64_t columns) {
  Call call(tier, row_panels * kPanelRows, steps * kTileColumns, columns * kTileColumns, false);
  return LeastNs([&] { call.Run(); });
}

}  // namespace

double MeasureBlockRead(threadpool::Pool* pool, std::int64_t bytes, double seconds) {
  bytes = RoundUp(std::max<std::int64_t>(bytes, 1), 4096);
  const ReadBlock read = WidestReadBlock();
  std::vector<AlignedBuffer> blocks(static_cast<std::size_t>(pool == nullptr ? 1 : pool->num_threads()));
  const std::int64_t times = std::max<std::int64_t>(1, (std::int64_t{256} << 10) / bytes);
  OnAllWorkers(pool, [&](int worker) {  // touched where it is read
    AlignedBuffer& block = blocks[static_cast<std::size_t>(worker)];
    block = AlignedBuffer(bytes);
    std::memset(block.data(), 1, static_cast<std::size_t>(bytes));
  });
  return 1e-9 * MeasureRate(pool, seconds, [&](int worker) {
           Keep(read(static_cast<const std::byte*>(blocks[static_cast<std::size_t>(worker)].data()), bytes, times));
           return static_cast<double>(bytes * times);
         });
}

double MeasureLatency(std::int64_t bytes, double seconds) {
  constexpr std::int64_t kLine = 64;
  const auto lines = static_cast<std::size_t>(std::max<std::int64_t>(bytes / kLine, 2));
  AlignedBuffer buffer(static_cast<std::int64_t>(lines) * kLine);
  auto* const base = static_cast<std::byte*>(buffer.data());
  std::vector<std::uint32_t> order(lines);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937 random(1);  // any order that no prefetcher follows
  for (std::size_t i = lines - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  for (std::size_t i = 0; i < lines; ++i) {
    *reinterpret_cast<std::byte**>(base + order[i] * kLine) = base + order[(i + 1) % lines] * kLine;
  }
  constexpr int kLoads = 4096;
  const std::byte* at = base + order[0] * kLine;
  const auto walk = [&] {
    for (int i = 0; i < kLoads; ++i) at = *reinterpret_cast<const std::byte* const*>(at);
    Keep(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at)));
  };
  for (std::size_t i = 0; i < lines; i += kLoads) walk();  // once around
  double loads = 0;
  const Clock::time_point start = Clock::now();
  double elapsed = 0;
  do {
    walk();
    loads += kLoads;
    elapsed = SecondsSince(start);
  } while (elapsed < seconds);
  return elapsed * 1e9 / loads;
}

PoolFigures MeasurePool(threadpool::Pool& pool) {
  constexpr std::int64_t kMany = 256;
  constexpr int kTimes = 40;
  const std::int64_t threads = pool.num_threads();
  const auto least_us = [](auto&& job) {
    double least = 0;
    for (int i = 0; i < kTimes; ++i) {
      const Clock::time_point start = Clock::now();
      job();
      const double us = SecondsSince(start) * 1e6;
      least = i == 0 ? us : std::min(least, us);
    }
    return least;
  };
  PoolFigures figures;
  // Until all workers are in it: an empty job alone would be over before they come.
  figures.job_us = least_us([&] { OnAllWorkers(&pool, [](int) {}); });
  const auto tasks = [&](std::int64_t count) { return least_us([&] { pool.ParallelFor(count, [](std::int64_t, int) {}); }); };
  figures.task_us = std::max(0.0, tasks(threads * (kMany + 1)) - tasks(threads)) / kMany;
  return figures;
}

KernelFigures MeasureKernels(const KernelTier& tier) {
  KernelFigures figures;
  figures.left_panels = tier.left_panels;
  figures.right_panels = tier.right_panels;
  figures.unpack_overlaps = tier.unpack_overlaps;
  // Eight steps: the widest cell's operands are 32 KB. Two lengths tell steps from what a call costs besides.
  constexpr std::int64_t kLong = 8, kShort = 2;
  double fixed = 0;
  for (std::int64_t a = 1; a <= tier.left_panels; ++a) {
    for (std::int64_t b = 1; b <= tier.right_panels; ++b) {
      const double with_long = DirectNs(tier, a, b, kLong), with_short = DirectNs(tier, a, b, kShort);
      const double step = std::max(with_long - with_short, 0.1) / (kLong - kShort);
      figures.step_ns[static_cast<std::size_t>(a - 1)][static_cast<std::size_t>(b - 1)] = step;
      fixed = std::max(0.0, with_short - kShort * step);
    }
  }
  // A cell is not slower than the narrower ones that it replaces; where it seems so, something else ran meanwhile.
  for (auto& row : figures.step_ns) {
    row[1] = std::min(row[1], 2 * row[0]);
    row[2] = std::min(row[2], row[0] + row[1]);
  }
  const auto widest = [&](std::int64_t cells) { return DirectNs(tier, cells * tier.left_panels, tier.right_panels, kShort); };
  const double step =
      figures.step_ns[static_cast<std::size_t>(tier.left_panels - 1)][static_cast<std::size_t>(tier.right_panels - 1)];
  figures.cell_ns = std::max(0.0, (widest(5) - widest(1)) / 4 - kShort * step);
  figures.call_ns = std::max(0.0, fixed - figures.cell_ns);
  // A tile column more: its tiles, and a cell.
  constexpr std::int64_t kColumns = 4;
  const double column = (UnpackNs(tier, 1, kLong, 1 + kColumns) - UnpackNs(tier, 1, kLong, 1)) / kColumns;
  const double products = kLong * figures.step_ns[0][1] + figures.cell_ns;
  figures.unpack_tile_ns = std::max(0.1, tier.unpack_overlaps ? column : column - products) / (2 * kLong);
  // 64 rows of 2,048 numbers become pairs.
  constexpr std::int64_t kRows = 64, kNumbers = 2048;
  AlignedBuffer source(kRows * kNumbers * 2), target;
  std::memset(source.data(), 0, static_cast<std::size_t>(source.bytes()));
  std::vector<const void*> rows;
  for (std::int64_t r = 0; r < kRows; ++r) rows.push_back(static_cast<const BFloat16*>(source.data()) + r * kNumbers);
  PackRowsArgs pack;
  pack.rows = rows.data();
  pack.dtype = DType::kBFloat16;
  pack.count = kRows;
  pack.columns = kNumbers;
  pack.pairs = TileMatrix::Activations(nullptr, kRows, kNumbers);
  pack.pairs.data = Tiles(target, pack.pairs);
  pack.panels = kRows / kPanelRows;
  pack.tile_columns = kNumbers / kTileColumns;
  figures.pack_gbps = static_cast<double>(source.bytes()) / LeastNs([&] { tier.pack_rows(pack); });
  return figures;
}

double MeasureStream(const KernelTier& tier, bool direct, threadpool::Pool* pool, std::int64_t bytes) {
  constexpr std::int64_t kWidth = 2048;
  const std::int64_t workers = pool == nullptr ? 1 : pool->num_threads();
  const std::int64_t rows = std::max<std::int64_t>(bytes / workers / (2 * kWidth) / 128, 1) * 128;
  // Matrices of 2,048 x 2,048 one after the other, as experts are.
  const std::int64_t matrices = CeilDiv(rows, kWidth);
  std::vector<std::vector<std::unique_ptr<Call>>> calls(static_cast<std::size_t>(workers));
  OnAllWorkers(pool, [&](int worker) {
    for (std::int64_t i = 0; i < matrices; ++i) {
      calls[static_cast<std::size_t>(worker)].push_back(std::make_unique<Call>(tier, kPanelRows, kWidth, kWidth, direct));
    }
  });
  struct alignas(64) Next {
    std::size_t at = 0;
  };
  std::vector<Next> next(static_cast<std::size_t>(workers));
  return 1e-9 * MeasureRate(pool, 0.15, [&](int worker) {
           const auto w = static_cast<std::size_t>(worker);
           Call& call = *calls[w][next[w].at];
           next[w].at = (next[w].at + 1) % calls[w].size();
           call.RunStreaming();
           return static_cast<double>(call.weight_bytes());
         });
}

}  // namespace moesaic::bench
