#include "profiling/bench/machine_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

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

/// Nanoseconds of a call of each body: of many groups of calls, each long enough for the clock, the first fiftieth of the order
/// by time, which is neither luck nor what others do to the core. The bodies take turns, so that all of them see the same
/// moments, and what is a difference of two stays one.
std::vector<double> UndisturbedNs(std::span<const std::function<void()>> bodies, int groups) {
  constexpr double kGroupSeconds = 1e-4;
  std::vector<std::int64_t> calls(bodies.size(), 1);
  std::vector<std::vector<double>> times(bodies.size());
  for (int group = 0; group < groups; ++group) {
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      for (;;) {
        const Clock::time_point start = Clock::now();
        for (std::int64_t call = 0; call < calls[i]; ++call) bodies[i]();
        const double seconds = SecondsSince(start);
        if (seconds < kGroupSeconds / 2 && group == 0) {
          calls[i] *= 2;
          continue;
        }
        times[i].push_back(seconds * 1e9 / static_cast<double>(calls[i]));
        break;
      }
    }
  }
  std::vector<double> found;
  for (std::vector<double>& of_body : times) {
    const auto early = of_body.begin() + groups / 50;
    std::nth_element(of_body.begin(), early, of_body.end());
    found.push_back(*early);
  }
  return found;
}

/// Steps of a cell whose operands, and what it makes of them, fit an L1 cache of 48 KB.
constexpr std::int64_t kCellSteps = 6;

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

  /// Only so many of the rows, by the form for few (kernels.h).
  void set_few_rows(std::int64_t rows) { few_rows_ = rows; }

  void Run() { Run(0, direct_ ? segment_.weights.panels : segment_.weights.columns, {}); }

  /// A part of the columns of C, in panels (direct) or tile columns.
  void Run(std::int64_t first, std::int64_t count, const PrefetchRange& prefetch) {
    if (direct_) {
      DirectGemmArgs args;
      args.segments = {&segment_, 1};
      args.first_panel = first;
      args.panels = count;
      args.activation_panels = CeilDiv(rows_, kPanelRows);
      args.few_rows = few_rows_;
      args.c = static_cast<float*>(c_.data());
      args.ldc = ldc_;
      args.prefetch = prefetch;
      tier_.direct_gemm(args);
    } else {
      UnpackGemmArgs args;
      args.segments = {&segment_, 1};
      args.panels = CeilDiv(rows_, kPanelRows);
      args.few_rows = few_rows_;
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
  std::int64_t few_rows_ = 0;
  GemmSegment segment_;
  AlignedBuffer weight_buffer_, activation_buffer_, c_, scratch_;
  std::int64_t ldc_ = 0;
};

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
  // Two lengths tell steps from what a call costs besides.
  constexpr std::int64_t kLong = kCellSteps, kShort = 2;
  std::vector<std::function<void()>> bodies;
  const auto time = [&](std::function<void()> body) {
    bodies.push_back(std::move(body));
    return bodies.size() - 1;
  };
  const auto call = [&](std::int64_t rows, std::int64_t weight_rows, std::int64_t weight_columns, bool direct) {
    return time([call = std::make_shared<Call>(tier, rows, weight_rows, weight_columns, direct)] { call->Run(); });
  };
  const auto direct = [&](std::int64_t left_panels, std::int64_t right_panels, std::int64_t steps) {
    return call(right_panels * kPanelRows, left_panels * kPanelRows, steps * kTileColumns, true);
  };
  const auto unpack = [&](std::int64_t columns) {
    return call(kPanelRows, kLong * kTileColumns, columns * kTileColumns, false);
  };
  std::size_t with_long[2][3] = {}, with_short[2][3] = {};
  for (std::int64_t a = 0; a < tier.left_panels; ++a) {
    for (std::int64_t b = 0; b < tier.right_panels; ++b) {
      with_long[a][b] = direct(a + 1, b + 1, kLong);
      with_short[a][b] = direct(a + 1, b + 1, kShort);
    }
  }
  constexpr std::int64_t kCells = 5;
  const std::size_t some_cells = direct(kCells * tier.left_panels, tier.right_panels, kShort);
  constexpr std::int64_t kColumns = 4;
  const std::size_t one_column = unpack(1), more_columns = unpack(1 + kColumns);
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
  // The forms for few rows: 64 tiles, more than L1 holds.
  constexpr std::int64_t kFewTiles = 32;
  figures.most_few_rows = tier.most_few_rows;
  std::size_t few[2][kMostFewRows] = {};
  for (std::int64_t r = 0; r < 2 * tier.most_few_rows; ++r) {
    const bool of_direct = r < tier.most_few_rows;
    auto some = std::make_shared<Call>(tier, kPanelRows, of_direct ? 2 * kPanelRows : kFewTiles * kPanelRows,
                                       of_direct ? kFewTiles * kTileColumns : 2 * kTileColumns, of_direct);
    some->set_few_rows(r % tier.most_few_rows + 1);
    few[of_direct ? 0 : 1][r % tier.most_few_rows] = time([some] { some->Run(); });
  }
  const std::size_t packing = time([&] { tier.pack_rows(pack); });

  const std::vector<double> ns = UndisturbedNs(bodies, 50);
  double fixed = 0;
  for (std::int64_t a = 0; a < tier.left_panels; ++a) {
    for (std::int64_t b = 0; b < tier.right_panels; ++b) {
      const double step = std::max(ns[with_long[a][b]] - ns[with_short[a][b]], 0.1) / (kLong - kShort);
      figures.step_ns[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = step;
      fixed = std::max(0.0, ns[with_short[a][b]] - kShort * step);
    }
  }
  // A cell is not slower than the narrower ones that it replaces; where it seems so, something else ran meanwhile.
  for (auto& row : figures.step_ns) {
    row[1] = std::min(row[1], 2 * row[0]);
    row[2] = std::min(row[2], row[0] + row[1]);
  }
  const std::int64_t a = tier.left_panels - 1, b = tier.right_panels - 1;
  const double step = figures.step_ns[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)];
  figures.cell_ns = std::max(0.0, (ns[some_cells] - ns[with_short[a][b]]) / (kCells - 1) - kShort * step);
  figures.call_ns = std::max(0.0, fixed - figures.cell_ns);
  // A tile column more: its tiles, and a cell.
  const double column = (ns[more_columns] - ns[one_column]) / kColumns;
  const double products = kLong * figures.step_ns[0][1] + figures.cell_ns;
  figures.unpack_tile_ns = std::max(0.1, tier.unpack_overlaps ? column : column - products) / (2 * kLong);
  for (std::size_t form = 0; form < 2; ++form) {
    for (std::int64_t r = 0; r < tier.most_few_rows; ++r) {
      const auto at = static_cast<std::size_t>(r);
      // More rows take no less time; where they seem to, something else ran meanwhile.
      const double before = r > 0 ? figures.few_tile_ns[form][at - 1] : 0.1;
      figures.few_tile_ns[form][at] = std::max(ns[few[form][at]] / (2 * kFewTiles), before);
    }
  }
  figures.pack_gbps = static_cast<double>(source.bytes()) / ns[packing];
  return figures;
}

double MeasureCell(const KernelTier& tier) {
  Call call(tier, tier.right_panels * kPanelRows, tier.left_panels * kPanelRows, kCellSteps * kTileColumns, true);
  const std::function<void()> body = [&] { call.Run(); };
  return UndisturbedNs({&body, 1}, 2)[0];
}

double MeasureStream(const KernelTier& tier, bool direct, std::int64_t rows, threadpool::Pool* pool, std::int64_t bytes,
                     double undisturbed_ns) {
  constexpr std::int64_t kWidth = 2048;
  constexpr int kWanted = 6, kMost = 200;
  const std::int64_t workers = pool == nullptr ? 1 : pool->num_threads();
  // Matrices of 2,048 x 2,048 one after the other, as experts are.
  const std::int64_t matrices = std::max<std::int64_t>(CeilDiv(bytes, workers * 2 * kWidth * kWidth), 1);
  std::vector<std::vector<std::unique_ptr<Call>>> calls(static_cast<std::size_t>(workers));
  OnAllWorkers(pool, [&](int worker) {
    for (std::int64_t i = 0; i < matrices; ++i) {
      calls[static_cast<std::size_t>(worker)].push_back(std::make_unique<Call>(tier, rows, kWidth, kWidth, direct));
    }
  });
  struct alignas(64) Next {
    std::size_t at = 0;
  };
  std::vector<Next> next(static_cast<std::size_t>(workers));
  std::vector<double> all, undisturbed;
  bool before = MeasureCell(tier) <= undisturbed_ns;
  while (static_cast<int>(undisturbed.size()) < kWanted && static_cast<int>(all.size()) < kMost) {
    const double rate = 1e-9 * MeasureRate(pool, 0.015, [&](int worker) {
                          const auto w = static_cast<std::size_t>(worker);
                          Call& call = *calls[w][next[w].at];
                          next[w].at = (next[w].at + 1) % calls[w].size();
                          call.RunStreaming();
                          return static_cast<double>(call.weight_bytes());
                        });
    const bool after = MeasureCell(tier) <= undisturbed_ns;
    all.push_back(rate);
    if (before && after) undisturbed.push_back(rate);
    before = after;
  }
  if (undisturbed.empty()) {
    std::nth_element(all.begin(), all.end() - 3, all.end());
    return *(all.end() - 3);
  }
  const auto middle = undisturbed.begin() + static_cast<std::ptrdiff_t>(undisturbed.size() / 2);
  std::nth_element(undisturbed.begin(), middle, undisturbed.end());
  return *middle;
}

}  // namespace moesaic::bench
