#include "profiling/bench/machine_probe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "cpu_kernels/tile_evaluator.h"
#include "profiling/bench/operands.h"
#include "profiling/bench/probes.h"
#include "profiling/bench/rate.h"

namespace moesaic::bench {
namespace {

ReadBlock WidestReadBlock() {
  if (__builtin_cpu_supports("avx512f") != 0) return ReadBlockAvx512;
  if (__builtin_cpu_supports("avx2") != 0) return ReadBlockAvx2;
  return ReadBlockSse2;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Nanoseconds of a call of a body where that is less than `least`: of as many calls as the clock can tell, going by `least`.
double LeastNs(const std::function<void()>& body, double least) {
  constexpr double kNs = 5e4;
  const auto calls = static_cast<std::int64_t>(std::max(1.0, kNs / least));
  const std::int64_t start = profiling::Now();
  for (std::int64_t call = 0; call < calls; ++call) body();
  return std::min(least, 1e9 * SecondsSince(start) / static_cast<double>(calls));
}

/// Steps of a cell whose operands, and what it makes of them, fit an L1 cache of 48 KB.
constexpr std::int64_t kCellSteps = 6;
/// Two lengths tell steps from what a call costs besides.
constexpr std::int64_t kLong = kCellSteps, kShort = 2;
/// Cells of a call that tell what each one costs; tile columns, of the unpack form; superblocks of the forms for few rows.
constexpr std::int64_t kCells = 17, kColumns = 4, kFewBlocks = 2;
/// Steps of half a slice of a matrix unit, and pieces of weights that meet the same activations.
constexpr std::int64_t kShortSlice = 8, kPieces = 4;
thread_local std::minstd_rand g_places;

/// Zeros at some place of a page, another one each time: loads wait for stores whose addresses end in the same twelve bits, so
/// that a cell takes up to three times as long in places that are unlucky together.
void* Zeros(AlignedBuffer& buffer, std::int64_t bytes) {
  constexpr std::int64_t kPage = 4096, kLine = 64;
  buffer = AlignedBuffer(bytes + 2 * kPage);
  std::memset(buffer.data(), 0, static_cast<std::size_t>(buffer.bytes()));
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  const auto to_page = static_cast<std::int64_t>(-address % kPage);
  return static_cast<std::byte*>(buffer.data()) + to_page + static_cast<std::int64_t>(g_places() % (kPage / kLine)) * kLine;
}

BFloat16* Tiles(AlignedBuffer& buffer, const TileMatrix& matrix) {
  const std::int64_t bytes = matrix.size() * static_cast<std::int64_t>(sizeof(BFloat16));
  void* tiles = Zeros(buffer, bytes);
  FillOperands({static_cast<std::byte*>(tiles), static_cast<std::size_t>(bytes)});
  return static_cast<BFloat16*>(tiles);
}

/// Rows with which a matrix unit meets each weight once.
bool MeetsOnce(const KernelTier& tier, std::int64_t rows) {
  return tier.unpack_overlaps && CeilDiv(rows, kPanelRows) <= tier.right_panels;
}

/// Columns whose sums a call of the unpack form keeps.
constexpr std::int64_t kSumColumns = kSuperblock * kTileColumns;

/// Operands of one call.
class Call {
 public:
  /// @param weight_rows, weight_columns  as stored
  /// @param own_weights                  else set_weights() comes first
  Call(const KernelTier& tier, std::int64_t rows, std::int64_t weight_rows, std::int64_t weight_columns, bool direct,
       bool own_weights = true)
      : tier_(tier), direct_(direct), rows_(rows) {
    segment_.weights = TileMatrix::Weights(nullptr, weight_rows, weight_columns);
    if (own_weights) segment_.weights.data = Tiles(weight_buffer_, segment_.weights);
    segment_.activations = TileMatrix::Activations(nullptr, rows, direct ? weight_columns : weight_rows);
    segment_.activations.data = Tiles(activation_buffer_, segment_.activations);
    const std::int64_t c_rows = RoundUp(direct ? weight_rows : rows, kPanelRows);
    ldc_ = SumsPitch(RoundUp(direct ? rows : std::min(weight_columns, kSumColumns), kTileColumns));
    c_ = static_cast<float*>(Zeros(c_buffer_, c_rows * ldc_ * static_cast<std::int64_t>(sizeof(float))));
    const std::int64_t scratch = direct ? 0 : UnpackScratchElements({&segment_, 1});
    scratch_ = static_cast<BFloat16*>(Zeros(scratch_buffer_, scratch * static_cast<std::int64_t>(sizeof(BFloat16))));
  }

  std::int64_t weight_bytes() const { return segment_.weights.size() * static_cast<std::int64_t>(sizeof(BFloat16)); }
  void set_weights(BFloat16* weights) { segment_.weights.data = weights; }

  void set_activations(BFloat16* activations) { segment_.activations.data = activations; }

  /// Only so many of the rows, the direct form's as stored tiles (kernels.h).
  void set_row_count(std::int64_t rows) { row_count_ = rows; }

  void Run() {
    if (direct_) return Run(0, segment_.weights.panels, {});
    // As a layer: the sums of a superblock of columns in the place of those before.
    for (std::int64_t column = 0; column < segment_.weights.columns; column += kSuperblock) {
      Run(column, std::min(kSuperblock, segment_.weights.columns - column), {});
    }
  }

  /// Right tiles of a slice of the unpack form.
  void set_depth(std::int64_t depth) { depth_ = depth; }

  /// Adds to what C holds.
  void set_accumulate() { accumulate_ = true; }

  /// A part of the columns of C, in panels (direct) or tile columns.
  void Run(std::int64_t first, std::int64_t count, const PrefetchRange& prefetch) {
    if (direct_) {
      DirectGemmArgs args;
      args.segments = {&segment_, 1};
      args.first_panel = first;
      args.panels = count;
      args.activation_panels = CeilDiv(rows_, kPanelRows);
      args.row_count = row_count_;
      args.c = c_;
      args.ldc = ldc_;
      args.accumulate = accumulate_;
      args.prefetch = prefetch;
      tier_.direct_gemm(args);
    } else {
      UnpackGemmArgs args;
      args.segments = {&segment_, 1};
      args.panels = CeilDiv(rows_, kPanelRows);
      args.row_count = row_count_;
      args.first_column = first;
      args.columns = count;
      args.c = c_;
      args.ldc = ldc_;
      args.scratch = scratch_;
      args.depth = depth_;
      tier_.unpack_gemm(args);
    }
  }

  /// All of it as the engine does: two panels at a time, with few rows (those that meet each weight once on a matrix unit, too)
  /// a superblock of them, with the next ones prefetched; or all tile columns, in its slices.
  void RunStreaming() {
    if (!direct_) return Run();
    const std::int64_t panels = segment_.weights.panels, step = row_count_ > 0 || MeetsOnce(tier_, rows_) ? kSuperblock : 2;
    for (std::int64_t panel = 0; panel < panels; panel += step) {
      PrefetchRange next;
      if (panel + step < panels) {
        next.weights = segment_.weights;
        next.first_panel = panel + step;
        next.panels = std::min(step, panels - panel - step);
        next.columns = segment_.weights.columns;
      }
      Run(panel, std::min(step, panels - panel), next);
    }
  }

 private:
  const KernelTier& tier_;
  const bool direct_;
  const std::int64_t rows_;
  std::int64_t row_count_ = 0;
  std::int64_t depth_ = 0;
  bool accumulate_ = false;
  GemmSegment segment_;
  AlignedBuffer weight_buffer_, activation_buffer_, c_buffer_, scratch_buffer_;
  float* c_ = nullptr;
  std::int64_t ldc_ = 0;
  BFloat16* scratch_ = nullptr;
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
  const BestAndMean rates = MeasureRates(pool, seconds, 5e-4, [&](int worker) {
    Keep(read(static_cast<const std::byte*>(blocks[static_cast<std::size_t>(worker)].data()), bytes, times));
    return static_cast<double>(bytes * times);
  });
  return 1e-9 * (blocks.size() == 1 ? rates.best : rates.mean);
}

LatencyProbe::LatencyProbe(std::int64_t bytes) {
  constexpr std::size_t kLine = 64, kMost = std::size_t{1} << 20;  // more take seconds to lay out
  const std::size_t all = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 2 * kLine)) / kLine;
  const std::size_t lines = std::min(all, kMost), apart = all / lines;
  buffer_ = AlignedBuffer(static_cast<std::int64_t>(all * kLine));
  std::mt19937 random(1);  // any order that no prefetcher follows
  std::vector<std::byte*> order(lines);
  for (std::size_t i = 0; i < lines; ++i) {
    order[i] = static_cast<std::byte*>(buffer_.data()) + (i * apart + random() % apart) * kLine;
  }
  std::shuffle(order.begin(), order.end(), random);
  for (std::size_t i = 0; i < lines; ++i) {
    *reinterpret_cast<std::byte**>(order[i]) = order[(i + 1) % lines];
    __builtin_ia32_clflush(order[i]);
  }
  at_ = order[0];
}

double LatencyProbe::Measure(double seconds) {
  constexpr int kLoads = 512;
  double least = kNever;
  for (const std::int64_t begin = profiling::Now(); SecondsSince(begin) < seconds || least == kNever;) {
    const std::int64_t start = profiling::Now();
    for (int i = 0; i < kLoads; ++i) at_ = *reinterpret_cast<const std::byte* const*>(at_);
    Keep(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(at_)));
    least = std::min(least, 1e9 * SecondsSince(start) / kLoads);
  }
  return least;
}

PoolFigures MeasurePool(threadpool::Pool& pool) {
  constexpr std::int64_t kMany = 256, kOthers = 1 << 20;
  constexpr int kTimes = 40;
  const std::int64_t threads = pool.num_threads();
  const ReadBlock read = WidestReadBlock();
  AlignedBuffer others(kOthers);
  std::memset(others.data(), 1, static_cast<std::size_t>(kOthers));
  const auto usual_us = [&](auto&& job) {
    std::vector<double> us;
    for (int i = 0; i < kTimes; ++i) {
      OnAllWorkers(&pool, [&](int) { Keep(read(static_cast<const std::byte*>(others.data()), kOthers, 1)); });
      const std::int64_t start = profiling::Now();
      job();
      us.push_back(SecondsSince(start) * 1e6);
    }
    return Median(us);
  };
  PoolFigures figures;
  // Until all workers are in it: an empty job alone would be over before they come.
  figures.job_us = usual_us([&] { OnAllWorkers(&pool, [](int) {}); });
  const auto tasks = [&](std::int64_t count) { return usual_us([&] { pool.ParallelFor(count, [](std::int64_t, int) {}); }); };
  figures.task_us = std::max(0.0, tasks(threads * (kMany + 1)) - tasks(threads)) / kMany;
  return figures;
}

KernelProbe::KernelProbe(const KernelTier& tier, threadpool::Pool* pool) : tier_(tier), pool_(pool) {}

void KernelProbe::MakeCalls(Bodies& bodies) {
  const KernelTier& tier = tier_;
  const auto add = [&](std::function<void()> body) {
    bodies.push_back(std::move(body));
    return bodies.size() - 1;
  };
  const auto call = [&](std::int64_t rows, std::int64_t weight_rows, std::int64_t weight_columns, bool direct) {
    return add([call = std::make_shared<Call>(tier, rows, weight_rows, weight_columns, direct)] { call->Run(); });
  };
  const auto direct = [&](std::int64_t left_panels, std::int64_t right_panels, std::int64_t steps) {
    return call(right_panels * kPanelRows, left_panels * kPanelRows, steps * kTileColumns, true);
  };
  const auto unpack = [&](std::int64_t columns) {
    return call(kPanelRows, kLong * kTileColumns, columns * kTileColumns, false);
  };
  for (std::int64_t a = 0; a < tier.left_panels; ++a) {
    for (std::int64_t b = 0; b < tier.right_panels; ++b) {
      with_long_[a][b] = direct(a + 1, b + 1, kLong);
      with_short_[a][b] = direct(a + 1, b + 1, kShort);
    }
  }
  // A matrix unit works on several cells at a time where they are as long as a slice, whose activations and sums then come from
  // L2, beside prefetches of the next weights.
  const bool unit = tier.unpack_overlaps;
  const auto cells = [&](std::int64_t steps) {
    return unit ? std::make_shared<Call>(tier, kCells * kPanelRows, 2 * kPieces * kPanelRows, steps * kTileColumns, true)
                : std::make_shared<Call>(tier, tier.right_panels * kPanelRows, kCells * tier.left_panels * kPanelRows,
                                         steps * kTileColumns, true);
  };
  const std::int64_t steps = unit ? kShortSlice : kShort;
  some_cells_ = add([call = cells(steps)] { call->Run(); });
  longer_cells_ = add([call = cells(2 * steps)] { call->Run(); });
  const auto again = cells(steps);
  again->set_accumulate();
  again_ = add([again] { again->Run(); });
  one_column_ = unpack(1);
  more_columns_ = unpack(1 + kColumns);
  // 64 rows of 2,048 numbers become pairs.
  constexpr std::int64_t kRows = 64, kNumbers = 2048;
  struct Packing {
    AlignedBuffer source{kRows * kNumbers * 2}, target;
    std::vector<const void*> rows;
    PackRowsArgs args;
  };
  auto packing = std::make_shared<Packing>();
  std::memset(packing->source.data(), 0, static_cast<std::size_t>(packing->source.bytes()));
  for (std::int64_t r = 0; r < kRows; ++r) {
    packing->rows.push_back(static_cast<const BFloat16*>(packing->source.data()) + r * kNumbers);
  }
  PackRowsArgs& pack = packing->args;
  pack.rows = packing->rows.data();
  pack.dtype = DType::kBFloat16;
  pack.count = kRows;
  pack.columns = kNumbers;
  pack.pairs = TileMatrix::Activations(nullptr, kRows, kNumbers);
  pack.pairs.data = Tiles(packing->target, pack.pairs);
  pack.panels = kRows / kPanelRows;
  pack.tile_columns = kNumbers / kTileColumns;
  packing_ = add([packing, &tier] { tier.pack_rows(packing->args); });
  packed_bytes_ = static_cast<double>(packing->source.bytes());
  // The forms for few rows: superblocks along the contraction, more than L1 holds.
  const std::int64_t measured = MeasuredRows();
  for (std::int64_t r = 0; r < 2 * measured; ++r) {
    const bool of_direct = r < measured;
    constexpr std::int64_t kPanels = kSuperblock * kPanelRows, kTiles = kSuperblock * kTileColumns;
    auto some = std::make_shared<Call>(tier, r % measured + 1, of_direct ? kPanels : kFewBlocks * kPanels,
                                       of_direct ? kFewBlocks * kTiles : kTiles, of_direct);
    some->set_row_count(r % measured + 1);
    few_[of_direct ? 0 : 1][r % measured] = add([some] { some->Run(); });
  }
}

/// Nanoseconds of a call of each worker while all of them make some, as many at a time as the clock can tell.
double KernelProbe::NsOfAll(const std::vector<Bodies>& workers, std::size_t body) const {
  constexpr double kSeconds = 4e-4, kNs = 5e3;
  const auto calls = ns_[body].empty() ? 1 : static_cast<std::int64_t>(std::max(1.0, kNs / ns_[body].back()));
  const double rate = MeasureRate(pool_, kSeconds, [&](int worker) {
    for (std::int64_t call = 0; call < calls; ++call) workers[static_cast<std::size_t>(worker)][body]();
    return static_cast<double>(calls);
  });
  return 1e9 * static_cast<double>(workers.size()) / rate;
}

void KernelProbe::Turn() {
  std::vector<Bodies> workers(static_cast<std::size_t>(pool_ == nullptr ? 1 : pool_->num_threads()));
  for (Bodies& bodies : workers) MakeCalls(bodies);
  ns_.resize(workers[0].size());
  for (std::size_t i = 0; i < ns_.size(); ++i) {
    if (pool_ == nullptr) {
      ns_[i] = {LeastNs(workers[0][i], ns_[i].empty() ? kNever : ns_[i][0])};
    } else {
      ns_[i].push_back(NsOfAll(workers, i));
    }
  }
}

KernelFigures KernelProbe::Figures(double product_ns) const {
  KernelFigures figures;
  std::vector<double> ns;
  for (const std::vector<double>& turns : ns_) ns.push_back(Median(turns));
  figures.left_panels = tier_.left_panels;
  figures.right_panels = tier_.right_panels;
  figures.unpack_overlaps = tier_.unpack_overlaps;
  figures.most_few_rows = tier_.most_few_rows;
  figures.most_stored_rows = tier_.most_stored_rows;
  figures.measured_rows = MeasuredRows();
  double fixed = 0;
  for (std::int64_t a = 0; a < tier_.left_panels; ++a) {
    for (std::int64_t b = 0; b < tier_.right_panels; ++b) {
      const double least = static_cast<double>((a + 1) * (b + 1)) * product_ns;
      const double step = std::max((ns[with_long_[a][b]] - ns[with_short_[a][b]]) / (kLong - kShort), least);
      figures.step_ns[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = step;
      fixed = std::max(0.0, ns[with_short_[a][b]] - kShort * step);
    }
  }
  // A cell is not slower than the narrower ones that it replaces; where it seems so, something else ran meanwhile.
  for (auto& row : figures.step_ns) {
    row[1] = std::min(row[1], 2 * row[0]);
    row[2] = std::min(row[2], row[0] + row[1]);
  }
  const std::int64_t a = tier_.left_panels - 1, b = tier_.right_panels - 1;
  const double step = figures.step_ns[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)];
  if (tier_.unpack_overlaps) {
    constexpr double kOfAll = kPieces * kCells;
    const double from_l2 = std::max((ns[longer_cells_] - ns[some_cells_]) / (kOfAll * kShortSlice), figures.step_ns[1][0]);
    const auto widest = static_cast<double>(tier_.left_panels * tier_.right_panels) / 2;  // of cells of two tiles
    // What both lengths take beyond their steps.
    const double cells = (ns[some_cells_] + ns[longer_cells_]) / 2 - 1.5 * kOfAll * kShortSlice * from_l2;
    figures.cell_ns = std::max(0.0, widest * cells / kOfAll);
    figures.again_ns = figures.cell_ns + std::max(0.0, widest * (ns[again_] - ns[some_cells_]) / kOfAll);
  } else {
    const auto cell = [&](std::size_t cells, double least) {
      return std::max(least, (ns[cells] - ns[with_short_[a][b]]) / (kCells - 1) - kShort * step);
    };
    figures.cell_ns = cell(some_cells_, 0.0);
    figures.again_ns = cell(again_, figures.cell_ns);
  }
  figures.call_ns = std::max(0.0, fixed - figures.cell_ns);
  // A tile column more: its tiles, and a cell.
  const double column = (ns[more_columns_] - ns[one_column_]) / kColumns;
  // Of one panel of rows with two of weights: on a matrix unit, whose passing factor is the rows, what the direct form takes of
  // two panels of weights with one of rows.
  const double product = tier_.unpack_overlaps ? figures.step_ns[1][0] : figures.step_ns[0][1];
  const double products = kLong * product + figures.cell_ns;
  figures.unpack_tile_ns = std::max(0.1, column - products) / (2 * kLong);
  for (std::size_t form = 0; form < 2; ++form) {
    for (std::int64_t r = 0; r < MeasuredRows(); ++r) {
      const auto at = static_cast<std::size_t>(r);
      // More rows take no less time; where they seem to, something else ran meanwhile.
      const double before = r > 0 ? figures.few_tile_ns[form][at - 1] : 0.1;
      figures.few_tile_ns[form][at] = std::max(ns[few_[form][at]] / (kFewBlocks * kSuperblock * kSuperblock), before);
    }
  }
  figures.pack_gbps = packed_bytes_ / ns[packing_];
  return figures;
}

double MeasureFetch(const KernelTier& tier, threadpool::Pool& pool) {
  constexpr int kTimes = 8;
  constexpr std::int64_t kTiles = 512;
  const std::int64_t threads = pool.num_threads();
  const std::int64_t part = std::max<std::int64_t>(4, 64 / threads), columns = part * threads;
  const std::int64_t rows = std::clamp<std::int64_t>(kTiles / columns, 1, 16) * kPanelRows, numbers = columns * kTileColumns;
  AlignedBuffer source(rows * numbers * 2), target;
  FillOperands({static_cast<std::byte*>(source.data()), static_cast<std::size_t>(source.bytes())});
  std::vector<const void*> row_pointers;
  for (std::int64_t r = 0; r < rows; ++r) row_pointers.push_back(static_cast<const BFloat16*>(source.data()) + r * numbers);
  PackRowsArgs pack;
  pack.rows = row_pointers.data();
  pack.dtype = DType::kBFloat16;
  pack.count = rows;
  pack.columns = numbers;
  pack.pairs = TileMatrix::Activations(nullptr, rows, numbers);
  pack.pairs.data = Tiles(target, pack.pairs);
  pack.panels = rows / kPanelRows;
  pack.tile_columns = part;
  std::vector<std::unique_ptr<Call>> calls;
  for (std::int64_t i = 0; i < threads; ++i) {
    calls.push_back(std::make_unique<Call>(tier, rows, 2 * kPanelRows, numbers, true));
    calls.back()->set_activations(pack.pairs.data);
  }
  std::vector<double> seconds(static_cast<std::size_t>(threads)), fetched, kept;
  const auto read = [&](std::vector<double>& ns) {
    OnAllWorkers(&pool, [&](int worker) {
      const std::int64_t start = profiling::Now();
      calls[static_cast<std::size_t>(worker)]->Run();
      seconds[static_cast<std::size_t>(worker)] = SecondsSince(start);
    });
    double sum = 0;
    for (const double s : seconds) sum += s;
    ns.push_back(1e9 * sum / static_cast<double>(threads * pack.panels * columns));
  };
  for (int turn = 0; turn < kTimes; ++turn) {
    OnAllWorkers(&pool, [&](int worker) {
      PackRowsArgs of_worker = pack;
      of_worker.first_column = (worker + turn) % threads * part;
      tier.pack_rows(of_worker);
    });
    read(fetched);
    read(kept);
  }
  return std::max(0.0, Median(fetched) - Median(kept));
}

double MeasureCell(const KernelTier& tier) {
  double least = kNever;
  for (int i = 0; i < 6; ++i) {  // the first ones find how many calls the clock can tell
    Call call(tier, tier.right_panels * kPanelRows, tier.left_panels * kPanelRows, kCellSteps * kTileColumns, true);
    least = LeastNs([&] { call.Run(); }, least);
  }
  return least;
}

/// Weights one after the other, and activations and results enough that they come from beyond L2, as those of a layer do; where
/// rows are so few that a matrix unit meets each weight once, they stay in L2.
struct StreamProbe::Worker {
  std::vector<Call> calls;
  std::span<std::byte> weights;
  std::size_t call = 0, at = 0;

  double Turn() {
    Call& next = calls[call];
    const auto bytes = static_cast<std::size_t>(next.weight_bytes());
    next.set_weights(reinterpret_cast<BFloat16*>(weights.data() + at));
    next.RunStreaming();
    call = (call + 1) % calls.size();
    at = at + 2 * bytes <= weights.size() ? at + bytes : 0;
    return static_cast<double>(bytes);
  }
};

StreamProbe::StreamProbe(const ReadProbe& memory, threadpool::Pool* pool) : memory_(memory), pool_(pool) {
  OnAllWorkers(pool_, [&](int worker) { FillOperands(memory_.Share(worker)); });
}
StreamProbe::~StreamProbe() = default;

BestAndMean StreamProbe::Measure(const KernelTier& tier, bool direct, std::int64_t rows, double seconds) {
  constexpr std::int64_t kContraction = 2048, kColumns = 512;
  constexpr double kWindow = 2e-3;
  std::vector<Worker>& workers = workers_[{&tier, direct, rows}];
  if (workers.empty()) {
    workers.resize(static_cast<std::size_t>(pool_ == nullptr ? 1 : pool_->num_threads()));
    const std::int64_t of_call = RoundUp(rows, kPanelRows) * (2 * kContraction + 4 * kColumns),
                       enough = MeetsOnce(tier, rows) ? of_call : 2 * HostL2Bytes();
    OnAllWorkers(pool_, [&](int worker) {
      Worker& own = workers[static_cast<std::size_t>(worker)];
      own.weights = memory_.Share(worker);
      for (std::int64_t bytes = 0; bytes < enough; bytes += of_call) {
        own.calls.emplace_back(tier, rows, direct ? kColumns : kContraction, direct ? kContraction : kColumns, direct, false);
        own.calls.back().set_row_count(tier.StoredRows(rows));
        own.calls.back().set_depth(
            UnpackSlice(tier.unpack_overlaps, kContraction / kTileColumns, CeilDiv(rows, kPanelRows), HostL2Bytes()));
      }
    });
  }
  const BestAndMean rates =
      MeasureRates(pool_, seconds, kWindow, [&](int worker) { return workers[static_cast<std::size_t>(worker)].Turn(); });
  return {1e-9 * rates.best, 1e-9 * rates.mean};
}

}  // namespace moesaic::bench
