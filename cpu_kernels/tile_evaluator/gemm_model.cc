#include "cpu_kernels/tile_evaluator/gemm_model.h"

#include <algorithm>
#include <cmath>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic {
namespace {

constexpr double kNsToMs = 1e-6;

/// Times that overlap combine as (sum of t^p)^(1/p): p = 1 not at all, infinity perfectly. For arithmetic and the levels of
/// memory it is a figure of the kernels (KernelFigures::overlap).
class Overlap {
 public:
  explicit Overlap(double p) : p_(p) {}

  double Power(double time) const { return p_ == 1 ? time : p_ == 3 ? time * time * time : std::pow(time, p_); }
  double Root(double powers) const { return p_ == 1 ? powers : p_ == 3 ? std::cbrt(powers) : std::pow(powers, 1 / p_); }

 private:
  double p_;
};

/// Two times that overlap, shared out: as `well`, but for a share of the second that overlaps as `badly`.
struct Together {
  Together(double a, double b, const Overlap& well, const Overlap& badly, double share) {
    Add(a, b, well, 1 - share);
    if (share > 0) Add(a, b, badly, share);
  }

  double first = 0, second = 0;

 private:
  void Add(double a, double b, const Overlap& overlap, double weight) {
    const double power_a = overlap.Power(a), power_b = overlap.Power(b), both = power_a + power_b;
    if (both <= 0) return;
    const double whole = weight * overlap.Root(both);
    first += whole * power_a / both;
    second += whole * power_b / both;
  }
};

/// Of weights from memory that nothing prefetches, at most. (AMX, 256 rows, cycles a product: 21 with weights in L2, 27 to 29
/// from memory with the next ones prefetched, 33 to 38 without.)
constexpr double kNotPrefetched = 1.5;

/// What of the last-level cache, which others use as well, holds its data between two reads.
constexpr double kUsable = 0.75;
/// Of a cache of C bytes all is found again after C / 2 bytes of other data, nothing after 1.75 C, and a share between: caches
/// replace neither exactly the oldest line nor evenly over their sets. (AVX-512, 2 MB of L2, a step of a tile whose
/// activations were read 0.4, 1.6 and 3.1 MB before: 113, 128, 134 ns.)
constexpr double kAllFound = 0.5, kNoneFound = 1.75;

/// Of weights' way from memory and their unpacking before the products: prefetches are spread over the unpacking evenly.
constexpr double kUnpackOverlap = 2;

/// Of the forms for few rows, whose prefetches are spread evenly, where the second pass finds a tile in L1; without any
/// prefetches: 1. (Where they pass it once: KernelFigures::few_overlap. Zen 5, one core that reads 40 GB/s, ns a tile from L2
/// and from memory: direct, 4, 8, 12 and 16 rows 15, 23, 37, 39 and 29, 31, 37, 40; unpack, 8, 12, 16 and 32 rows 20, 28, 38,
/// 76 and 32, 34, 41, 76.)
constexpr double kPassedOverlap = 6;
/// Rows of a pass.
constexpr std::int64_t kDirectPass = 8;

/// Of the ring in which the unpack form meets a matrix unit's few rows: no better than what nothing prefetches. (AMX, 16
/// threads. 200 random products, each in its turn among a hundred: with 2.5, 17 to 32 rows come out a fifth too fast beside
/// those with more, and with 1.2 alike; but with 1.2 kinds of 152 others agree worse, 7.5 and 5.5% instead of 6.4 and 4.9%.)
constexpr double kRingOverlap = 1.5;

/// What the direct form for few rows takes to lay out a tile of activations, of what a superblock's panels take with it. (Zen
/// 5, 28 x 1,152 x 3,840 and 56 x 896 x 1,792: in calls of 32 columns 1.19 and 1.18 times as long as of 128.)
constexpr double kLaysOut = 0.06;

/// The unpack form prefetches a tile column while it works on the one before. Of what waits so long in L2 a share is lost
/// before it is used, about as large as the column's share of L2; those lines are waited for, so many at a time. (Where the
/// tile unit computes while the vectors unpack, products may hide it: layers on such a host show no sign of it.) (AVX-512, 2 MB
/// of L2, ns a stored tile with 8 rows along parts of 512, 1,024, 1,536, 2,048, 2,560, 4,864 of the contraction: 103, 109, 116,
/// 121, 127, 140; with 32 rows 316, 321, 325, 325, 336, 355; with weights in L3 the same up to 2,560.) What nothing prefetches,
/// a matrix unit waits for in the same way.
constexpr double kLostAtATime = 10;

/// What a tile takes from L2 in calls of a matrix unit that take no slices, where both factors come from there and do not pass
/// L1, of what it takes in slices. (AMX, 5 x 104 x 1,792 x 1,280: 1,860 us in calls of 32 rows, 1,240 in calls of all.)
constexpr double kWithoutSlices = 2.4;

/// Of what comes from L3 what a matrix unit waits for, the rest comes beside the products: its few registers load only so far
/// ahead. (AMX, two threads, tasks that read less from L3 against more of the same products: 1,152 x 1,024 x 640, 384 rows and
/// 192, 8 to 10% faster; 320 x 1,024 x 1,408, unpack, 768 columns and 256, 8 to 10%; four groups of 250 x 1,280 x 1,536, whole
/// and half, 6%.)
constexpr double kWaitedForL3 = 0.5;

/// Of what tiles that another thread has packed take more than a thread's own what is waited for. (AMX, 16 threads, tasks of
/// 680 kinds: 0.5 in the direct form, 0.3 in the other.)
constexpr double kWaitedForFetched = 0.5;

/// Columns whose sums wait in C between two slices of the unpack form. Where vectors interleave weights in registers
/// (gemm/register_unpack.h): rows of weights of such a slice; activations that these take at a time, at most. With more of
/// them two slices are taken together. (On Zen 4 with more than 8, whose sums no cache gives up.)
constexpr std::int64_t kSumColumns = kSuperblock * kTileColumns, kSumDepth = kSuperblock * kPanelRows, kRowsInRegisters = 12;
/// Tiles of a slice of the direct form's contraction on a matrix unit, and the most that the unpack form takes panel by panel
/// (AmxCell::kSliceTiles); of a slice of the unpack form (UnpackSlice).
constexpr std::int64_t kSliceTiles = 2 * kSuperblock, kRightTiles = kSuperblock;

/// Stores to lines of a result that are under way at a time: of each line of a call's rows, and at most, for lines that follow
/// each other the hardware fetches ahead. (2 MB of bf16, a latency of 124: 44 ns a line, AVX-512, and 5 to 7, AMX in calls of
/// all rows. AMX, 16 threads, tasks of 310 kinds of the direct form: two thirds of what 3 and 20 say.)
constexpr double kStores = 4.5, kStoresInTurn = 30;

/// The direct form of many rows: rows that take as long as transposing the weights for all, and the share of the unpack form's
/// time that they take then, with nothing interleaved beside the products. (Two Zen 5 cores, weights in L2: 24, 64, 250 rows
/// 808, 938, 953 GFLOP/s; unpack form 933, 954, 946.)
constexpr std::int64_t kTransposedRows = 6;
constexpr double kTransposedShare = 0.97;

/// What one task costs, on one thread: nanoseconds and bytes.
struct TaskCost {
  double cells_ns = 0;
  double calls_ns = 0;
  double unpack_ns = 0;
  double store_ns = 0;                        ///< what stores of results are waited for
  double fetched_tiles = 0;                   ///< of activations that threads have packed and this one has not read before
  bool few = false;                           ///< by the forms for few rows
  bool passed_once = false;                   ///< by those, in one pass
  double unfetched = 0;                       ///< share of the weights that nothing prefetches, or that others wait for as well
  bool once = false;                          ///< on a matrix unit each weight is met once; all are prefetched if it is alone
  double lost_ns = 0;                         ///< waiting for weights that nothing prefetches, or too early
  std::array<double, kMemoryLevels> bytes{};  ///< read or written beyond the caches below that level
};

/// Threads so uneven do not end rounds of equal tasks together any more. (AMX, 16 threads at 1.3: 600 x 1,280 x 640 in
/// 35 tasks of 96 rows 352 us, in ten of 300 481; 4 x 1,024 x 4,352 in 34 tasks 112, in twelve 141.)
constexpr double kUnlike = 0.25;

/// Of what a task waits for memory, what no slow thread waits longer for: threads that end earlier leave it more. (AMX, 16
/// threads, 152 random products: without it 133 choices are within 5% of the fastest and 148 within 15%, with 0.2, 0.5 and 1 of
/// it 136, 137 and 130, 151, 151 and 148.)
constexpr double kMemoryLeft = 0.2;

/// The share of a piece of packing that is waited for at the end. (AMX, 16 threads: 0.2 to 0.5 with 48 to 50 pieces, 0.45 with
/// 28 of some microseconds.)
constexpr double kPieceWaited = 0.3;
/// Latencies of L3 that pass before all pieces are under way, beside the job's dispatch: their first lines are in other
/// threads' caches, and nothing runs ahead of them yet. (AMX, 16 threads, 5 to 6 us whatever is packed; two Zen 4, 2 to 5.)
constexpr double kPackingBegins = 45;

/// What each of so many tasks that read the same weights at the same time reads of them from memory, as long as these meet each
/// weight once: by the fourth root of their number, which lies between both forms, and no less than eight tasks do. (AMX, 16
/// threads, 32 rows, all of them together, GB/s where 1, 2, 4, 8 and 16 share their weights: direct 118, 149, 189, 212, 209,
/// unpack 97, 109, 128, 152, 155.)
double ReadByEach(double sharers) { return std::max(std::pow(sharers, -0.25), 0.6); }

/// Sizes of one task, and where its operands are read from the first time.
struct TaskShape {
  std::int64_t rows, columns;
  std::int64_t group_rows;  ///< all rows of its group
  bool few;                 ///< the tier has a form for so few as its group has
  MemoryLevel weights_from, activations_from, result_to;
  double new_rows;  ///< share of the tasks whose activations their thread has not read before
  double sharers;   ///< tasks that read the same weights from memory at the same time
};

/// Whether calls of so many rows meet each weight once: a matrix unit's, all of whose rows a cell takes.
bool MeetsOnce(const GemmProblem& problem, const MachineModel& machine, std::int64_t call_rows) {
  if (problem.form == GemmForm::kGradient || !machine.kernel.unpack_overlaps) return false;
  const bool direct = problem.form == GemmForm::kDirect;
  return CeilDiv(call_rows, kPanelRows) <= (direct ? machine.kernel.right_panels : machine.kernel.left_panels);
}

double Product(std::int64_t a, std::int64_t b, double bytes) { return static_cast<double>(a) * static_cast<double>(b) * bytes; }

class TaskCounter {
 public:
  TaskCounter(const GemmProblem& problem, const GemmConfiguration& configuration, const MachineModel& machine)
      : p_(problem), c_(configuration), m_(machine) {
    for (std::size_t level = 0; level < 3; ++level) {
      const auto bytes = static_cast<double>(m_.cache_bytes[level]);
      none_found_[level] = kNoneFound * bytes;
      share_per_byte_[level] = 1 / ((kNoneFound - kAllFound) * bytes);
    }
  }

  TaskCost Count(const TaskShape& task) const {
    TaskCost cost;
    const std::int64_t call_rows = task.few && p_.form == GemmForm::kDirect ? task.rows : std::min(c_.call_rows, task.rows),
                       call_columns = std::min(c_.call_columns, task.columns);
    cost.few = task.few;
    const bool whole = cost.few && (p_.form == GemmForm::kDirect || p_.output_bytes == 2);
    const bool direct = p_.form == GemmForm::kDirect;
    const bool unit = m_.kernel.unpack_overlaps;
    cost.once = MeetsOnce(p_, m_, call_rows);
    const bool ring = cost.once && !direct;  // through L1, the whole contraction at once
    const std::int64_t call_depth = whole || ring ? p_.k : std::min(c_.call_depth, p_.k);
    const std::int64_t row_calls = CeilDiv(task.rows, call_rows), column_calls = CeilDiv(task.columns, call_columns);
    const bool slices = p_.form == GemmForm::kUnpack && !cost.few;
    // A rest of less than half a slice joins the last one.
    const std::int64_t joined = slices ? CeilDiv(call_depth, kTileColumns) / 2 * kTileColumns : 0;
    const std::int64_t depth_calls = std::max<std::int64_t>(1, CeilDiv(p_.k - joined, call_depth));
    const double calls = static_cast<double>(row_calls * column_calls * (slices ? 1 : depth_calls));
    // Parts of the contraction are calls, or slices inside of one: those of the unpack form, and on a matrix unit those of the
    // direct form too, where it meets weights again (gemm/direct_gemm.h).
    std::int64_t depth = call_depth, parts = depth_calls;
    Pieces pieces{m_.kernel.left_panels, p_.form == GemmForm::kUnpack ? 2 : m_.kernel.right_panels};
    if (direct && unit && !cost.once && call_columns > kPanelRows) {
      pieces.right = 1;
      depth = std::min(depth, kSliceTiles * kTileColumns);
      // A rest of less than half a slice joins the last one.
      parts *= std::max<std::int64_t>(1, (CeilDiv(call_depth, kTileColumns) + kSliceTiles / 2) / kSliceTiles);
    }
    if (slices && unit && !ring && depth <= kSliceTiles * kTileColumns) pieces.left = 1;
    if (p_.form == GemmForm::kGradient && unit && call_rows > kPanelRows) pieces.right = 1;
    if (cost.few) {
      const auto tiles = static_cast<double>(CeilDiv(task.columns, kPanelRows) * CeilDiv(p_.k, kTileColumns));
      const std::int64_t rest = task.rows % call_rows, whole_calls = task.rows / call_rows;
      cost.passed_once = call_rows <= (direct ? kDirectPass : kRowsInRegisters);
      cost.cells_ns = tiles * static_cast<double>(whole_calls) * FewTileNs(call_rows);
      if (rest > 0) cost.cells_ns += tiles * FewTileNs(rest);
      if (direct && call_rows <= m_.kernel.most_few_rows) {
        // What lays the activations out for a superblock of panels was measured with a whole one.
        const auto lays = static_cast<double>(column_calls * CeilDiv(call_columns, kSuperblock * kPanelRows) * kSuperblock);
        const double panels = static_cast<double>(CeilDiv(task.columns, kPanelRows));
        cost.cells_ns *= 1 + kLaysOut * std::max(0.0, lays / panels - 1);
      } else if (!direct) {
        // Sums of a superblock of columns wait in C between superblocks of weights, or two of these, down a column.
        const std::int64_t sum_depth = (call_rows > kRowsInRegisters ? 2 : 1) * kSumDepth, visits = p_.k / sum_depth;
        const double sums = Product(task.rows, task.columns, 4) * static_cast<double>(visits);
        AddAgain(cost, Product(call_rows, kSumColumns, 4) + Product(call_rows, sum_depth, 2), 2 * sums, MemoryLevel::kL3);
      }
    } else {
      CountCells(task, call_rows, parts, pieces, cost);
    }
    const bool prefetches = direct && !cost.once && call_columns <= kMostPrefetched && column_calls > 1;
    cost.unfetched = Unfetched(task, cost, call_columns, prefetches, slices ? parts : 1);
    cost.calls_ns = calls * m_.kernel.call_ns;
    if (task.weights_from == MemoryLevel::kMemory && !cost.few)
      cost.lost_ns = LostNs(task, cost, call_columns, row_calls, call_depth, depth);

    // Loops over calls: how often each operand is read anew, and what is read in between.
    const double weights = Product(task.columns, p_.k, p_.weight_bytes), activations = Product(task.rows, p_.k, 2);
    const std::int64_t span = c_.order == LoopOrder::kDepth && !slices ? call_depth : p_.k;
    const double row_block = Product(call_rows, span, 2), column_block = Product(call_columns, span, 2);
    const double all_rows = Product(task.rows, span, 2), all_columns = Product(task.columns, span, 2);
    const bool rows_outer = c_.order == LoopOrder::kRows;
    const double weights_between = rows_outer ? all_columns + row_block : column_block + row_block;
    const double activations_between = rows_outer ? row_block + column_block : all_rows + column_block;
    Add(cost, task.weights_from, weights * ReadByEach(task.sharers));
    AddAgain(cost, weights_between, weights * static_cast<double>(row_calls - 1));
    // What is prefetched waits in L2 while the call before computes. Reading it from there is part of the memory's rate.
    if (prefetches && !cost.few) AddAgain(cost, 2 * Product(call_columns, p_.k, p_.weight_bytes), weights, MemoryLevel::kL3);
    Add(cost, task.activations_from, task.new_rows * activations);
    if (!p_.packed) cost.fetched_tiles = task.new_rows * activations / (2 * kTileElements);
    AddAgain(cost, Product(task.group_rows, p_.k, 2) + weights, (1 - task.new_rows) * activations, MemoryLevel::kL3);
    AddAgain(cost, activations_between, activations * static_cast<double>(column_calls - 1));

    if (!cost.few)
      CountInsideCalls(task, call_rows, call_columns, depth, pieces, weights * static_cast<double>(row_calls),
                       activations * static_cast<double>(column_calls), cost);
    CountResult(task, call_rows, call_columns, depth, parts, cost);
    return cost;
  }

 private:
  /// Panels of a cell, at most.
  struct Pieces {
    std::int64_t left, right;
  };

  static void Add(TaskCost& cost, MemoryLevel level, double bytes) { cost.bytes[static_cast<std::size_t>(level)] += bytes; }

  /// `bytes` are read again, after `between` bytes of other data: each level gives what it still has. Above `counted` that
  /// takes no time.
  void AddAgain(TaskCost& cost, double between, double bytes, MemoryLevel counted = MemoryLevel::kL1) const {
    if (bytes <= 0) return;
    for (std::size_t level = 0; level < 3; ++level) {
      const double found = bytes * std::clamp((none_found_[level] - between) * share_per_byte_[level], 0.0, 1.0);
      if (level >= static_cast<std::size_t>(counted)) cost.bytes[level] += found;
      bytes -= found;
    }
    cost.bytes[3] += bytes;
  }

  /// Nanoseconds of a tile of weights in L2 times so many rows.
  double FewTileNs(std::int64_t rows) const {
    if (p_.form == GemmForm::kUnpack) return UnpackTileNs(rows);
    if (rows > m_.kernel.most_few_rows) return kTransposedShare * UnpackTileNs(rows + kTransposedRows);
    const std::int64_t most = m_.kernel.measured_rows;
    if (rows <= most) return MeasuredNs(0, rows);
    // Of more, eight are in a vector, and up to four in one of their own.
    const std::int64_t rest = rows % 8 > 4 ? 0 : rows % 8, whole = RoundUp(rows - rest, 8);
    return MeasuredNs(0, most) * static_cast<double>(whole) / static_cast<double>(most) +
           (rest > 0 ? MeasuredNs(0, rest) : 0.0);
  }

  /// Of the unpack form: up to twelve rows in each pass.
  double UnpackTileNs(std::int64_t rows) const {
    const std::int64_t most = m_.kernel.measured_rows;
    if (rows <= most) return MeasuredNs(1, rows);
    // As in two passes, for one alone may go tile by tile.
    const auto pass = [&](std::int64_t some) {
      const std::int64_t two = std::min(2 * some, most);
      return MeasuredNs(1, two) * static_cast<double>(some) / static_cast<double>(two);
    };
    const std::int64_t passes = CeilDiv(rows, kRowsInRegisters), more = rows % passes;
    return static_cast<double>(passes - more) * pass(rows / passes) +
           (more > 0 ? static_cast<double>(more) * pass(rows / passes + 1) : 0.0);
  }

  double MeasuredNs(std::size_t form, std::int64_t rows) const {
    return m_.kernel.few_tile_ns[form][static_cast<std::size_t>(rows - 1)];
  }

  /// Cache lines of weights.
  double Lines(std::int64_t columns, std::int64_t depth) const { return Product(columns, depth, p_.weight_bytes) / 64; }

  /// Calls of a task of the direct form that begin with weights which no other call prefetches.
  static double Begins(std::int64_t call_columns, std::int64_t column_calls) {
    return call_columns <= kMostPrefetched ? 1.0 : static_cast<double>(column_calls);
  }

  /// The wait for weights from memory that nothing prefetches, or too early.
  /// @param depth  of a part of the contraction
  double LostNs(const TaskShape& task, const TaskCost& cost, std::int64_t call_columns, std::int64_t row_calls,
                std::int64_t call_depth, std::int64_t depth) const {
    const double line_ns = m_.latency_ns[3] / kLostAtATime;
    const std::int64_t column_calls = CeilDiv(task.columns, call_columns);
    const bool unit = m_.kernel.unpack_overlaps;
    if (p_.form == GemmForm::kUnpack && !unit) {
      const double share = Product(kTileColumns, depth, p_.weight_bytes) / static_cast<double>(m_.cache_bytes[1]);
      return (1 - cost.unfetched) * Lines(task.columns, p_.k) * std::min(share, 1.0) * line_ns;
    }
    // Nothing is unpacked or computed beside the first part of a call: a slice of a column, or what a stream is ahead.
    if (p_.form == GemmForm::kUnpack) {
      const double calls = static_cast<double>(row_calls * column_calls);
      return calls * Lines(kTileColumns, std::min(call_depth, kRightTiles * kTileColumns)) * line_ns;
    }
    // Nor beside the first piece of a task, or of each call whose weights no other call prefetches.
    if (p_.form == GemmForm::kDirect && unit && !cost.once) {
      const std::int64_t piece = std::min(call_columns, m_.kernel.left_panels * kPanelRows);
      return Begins(call_columns, column_calls) * Lines(piece, depth) * line_ns;
    }
    return 0;
  }

  /// Share of a task's weights that nothing prefetches.
  /// @param slices  of the contraction, in the unpack form
  double Unfetched(const TaskShape& task, const TaskCost& cost, std::int64_t call_columns, bool prefetches,
                   std::int64_t slices) const {
    // Kernels that meet each weight once have the next ones fetched all along (gemm/direct_gemm.h, unpack_stream.h), but where
    // other tasks wait for the same ones.
    if (task.sharers > 1) return 1;
    if (cost.once || p_.form == GemmForm::kGradient) return 0;
    const std::int64_t column_calls = CeilDiv(task.columns, call_columns);
    // The first slice of a tile column of each call.
    if (p_.form == GemmForm::kUnpack)
      return static_cast<double>(column_calls) / static_cast<double>(CeilDiv(task.columns, kTileColumns) * slices);
    if (cost.few && task.group_rows <= m_.kernel.most_few_rows) {
      // Runs of a superblock's columns have the next one prefetched (gemm/few_rows.h).
      const double tiles = static_cast<double>(CeilDiv(task.columns, kPanelRows) * CeilDiv(p_.k, kTileColumns));
      return std::min(1.0, static_cast<double>(kSuperblock * (prefetches ? 1 : column_calls)) / tiles);
    }
    if (cost.few) return prefetches ? 1 / static_cast<double>(column_calls) : 1.0;
    // A call prefetches piece after piece. What a matrix unit waits for before the first one is time lost.
    if (m_.kernel.unpack_overlaps) return 0;
    const std::int64_t piece = std::min(call_columns, m_.kernel.left_panels * kPanelRows);
    return Begins(call_columns, column_calls) * static_cast<double>(piece) / static_cast<double>(task.columns);
  }

  /// Time of the steps of `left` x `right` panels along one step of the contraction, and how many cells they are.
  std::pair<double, double> Cells(std::int64_t left, std::int64_t right, const Pieces& most) const {
    const std::int64_t whole_left = left / most.left, rest_left = left % most.left;
    // The direct form's passes are of even width.
    const std::int64_t passes = CeilDiv(right, most.right), even = p_.form == GemmForm::kDirect ? right / passes : most.right;
    const std::int64_t rest = right - even * passes;  // that many passes are wider, or the last one is narrower
    // Measured in the direct form, whose right factor passes L1 where a matrix unit loads it. In the unpack form the left does.
    const bool mirrored = p_.form == GemmForm::kUnpack && m_.kernel.unpack_overlaps;
    const auto row = [&](std::int64_t na) {
      const auto of = [&](std::int64_t nb) {
        const auto a = static_cast<std::size_t>(na - 1), b = static_cast<std::size_t>(nb - 1);
        return mirrored ? m_.kernel.step_ns[b][a] : m_.kernel.step_ns[a][b];
      };
      if (rest >= 0)
        return static_cast<double>(passes - rest) * of(even) + (rest > 0 ? static_cast<double>(rest) * of(even + 1) : 0.0);
      return static_cast<double>(passes - 1) * of(even) + of(even + rest);
    };
    const double ns = static_cast<double>(whole_left) * row(most.left) + (rest_left > 0 ? row(rest_left) : 0.0);
    const std::int64_t cells = (whole_left + (rest_left > 0 ? 1 : 0)) * passes;
    return {ns, static_cast<double>(cells)};
  }

  /// The same for a call's panels of rows and of columns.
  std::pair<double, double> CellsOfCall(std::int64_t rows, std::int64_t columns, const Pieces& most) const {
    if (p_.form == GemmForm::kDirect) return Cells(columns, rows, most);
    if (p_.form == GemmForm::kUnpack || !m_.kernel.unpack_overlaps) return Cells(rows, columns, most);
    // A matrix unit (gemm/gradient_gemm.h): two panels of rows meet one of columns at a time, a last one alone two.
    auto [ns, cells] = Cells(rows / 2 * 2, columns, {2, 1});
    if (rows % 2 != 0) {
      const auto [ns_of_last, cells_of_last] = Cells(1, columns, {1, m_.kernel.right_panels});
      ns += ns_of_last;
      cells += cells_of_last;
    }
    return {ns, cells};
  }

  void CountCells(const TaskShape& task, std::int64_t call_rows, std::int64_t parts, const Pieces& most, TaskCost& cost) const {
    const KernelFigures& kernel = m_.kernel;
    const double of_widest =
        static_cast<double>(most.left * most.right) / static_cast<double>(kernel.left_panels * kernel.right_panels);
    const double visits_ns = of_widest * (kernel.cell_ns + static_cast<double>(parts - 1) * kernel.again_ns);
    const std::int64_t k_steps = CeilDiv(p_.k, kTileColumns);
    const auto steps = static_cast<double>(k_steps);
    const std::int64_t panels = CeilDiv(p_.form == GemmForm::kUnpack ? RoundUp(task.columns, 32) : task.columns, kPanelRows);
    const auto of_rows = [&](std::int64_t rows, double calls) {
      if (rows == 0) return;
      const std::int64_t row_panels = CeilDiv(rows, kPanelRows);
      const auto [ns, cells] = CellsOfCall(row_panels, panels, most);
      cost.cells_ns += calls * (ns * steps + cells * visits_ns);
      if (p_.form == GemmForm::kUnpack) {
        cost.unpack_ns += calls * static_cast<double>(CeilDiv(p_.k, kPanelRows)) *
                          static_cast<double>(CeilDiv(task.columns, kTileColumns)) * kernel.unpack_tile_ns;
      }
    };
    const std::int64_t whole_calls = task.rows / call_rows;
    of_rows(call_rows, static_cast<double>(whole_calls));
    of_rows(task.rows % call_rows, 1.0);
  }

  /// A call reads one operand group by group and the other once for each of these groups.
  void CountInsideCalls(const TaskShape& task, std::int64_t call_rows, std::int64_t call_columns, std::int64_t depth,
                        const Pieces& most, double weights, double activations, TaskCost& cost) const {
    const std::int64_t left = most.left * kPanelRows, right = most.right * kPanelRows;
    const bool gradient = p_.form == GemmForm::kGradient;
    // Kept: the operand whose groups are the outer loop of the kernel.
    const std::int64_t kept_group = p_.form == GemmForm::kUnpack ? kTileColumns : left;
    const std::int64_t passed_group = p_.form == GemmForm::kUnpack ? left : right;
    const std::int64_t kept_size = gradient ? call_rows : call_columns, passed_size = gradient ? call_columns : call_rows;
    double kept = gradient ? activations : weights;
    const double passed = gradient ? weights : activations;
    const double passes = static_cast<double>(CeilDiv(passed_size, passed_group));
    const double kept_between = Product(kept_group + passed_group, depth, 2);
    if (p_.form == GemmForm::kUnpack) {
      // Written once unpacked, then read from where it was written: L1 where it is needed once.
      kept = Product(task.columns, p_.k, 2) * weights / Product(task.columns, p_.k, p_.weight_bytes);
      if (!cost.once) AddAgain(cost, 2 * kept_between, kept * (passes + 1));
    } else {
      AddAgain(cost, kept_between, kept * (passes - 1));
    }
    double groups = static_cast<double>(CeilDiv(kept_size, kept_group));
    // The unpack form has its tile column twice, as it is stored and unpacked.
    const std::int64_t columns = p_.form == GemmForm::kUnpack ? 2 * kept_group : kept_group;
    if (p_.form == GemmForm::kUnpack && depth < p_.k) {
      // A superblock of columns meets the activations of all slices before the next one does.
      const auto superblocks = static_cast<double>(CeilDiv(kept_size, kSumColumns));
      AddAgain(cost, Product(passed_size + 2 * kSumColumns, p_.k, 2), passed * (superblocks - 1));
      groups -= superblocks - 1;
    }
    AddAgain(cost, Product(passed_size + columns, depth, 2), passed * (groups - 1));
  }

  void CountResult(const TaskShape& task, std::int64_t call_rows, std::int64_t call_columns, std::int64_t depth,
                   std::int64_t parts, TaskCost& cost) const {
    const double fp32 = Product(task.rows, task.columns, 4);
    // Streaming stores write once; others read the line first.
    const double factor = p_.form == GemmForm::kUnpack && p_.output_bytes == 2 ? 1.0 : 2.0;
    const bool unit = m_.kernel.unpack_overlaps && p_.form != GemmForm::kGradient;
    const double latency_ns = m_.latency_ns[static_cast<std::size_t>(task.result_to)];
    if (p_.form != GemmForm::kUnpack && p_.output_bytes == 2) {  // rounded from a block of fp32
      AddAgain(cost, Product(call_rows, call_columns, 4), 2 * fp32);
      // No products are computed meanwhile.
      const double lines = std::ceil(static_cast<double>(2 * call_rows) / 64);
      const double stores = call_rows >= task.group_rows ? kStoresInTurn : std::min(kStores * lines, kStoresInTurn);
      cost.store_ns = Product(task.rows, task.columns, 2) / 64 * latency_ns / stores;
    } else if (unit && p_.output_bytes == 4 && p_.form == GemmForm::kDirect) {
      // A tile's lines are waited for before the next products. (In the unpack form sums of slices before were there.)
      cost.store_ns = fp32 / 64 * latency_ns / kStoresInTurn;
    } else {
      Add(cost, task.result_to, factor * Product(task.rows, task.columns, static_cast<double>(p_.output_bytes)));
    }
    if (parts == 1) return;
    const bool slices = p_.form == GemmForm::kUnpack && !cost.few;
    if (slices) call_columns = std::min(call_columns, kSumColumns);
    const double between = c_.order == LoopOrder::kDepth && !slices
                               ? fp32 + Product(task.rows + task.columns, depth, 2)
                               : Product(call_rows, call_columns, 4) + Product(call_rows + call_columns, depth, 2);
    // On a matrix unit, whose sums take more than L1, cells that go on with them were measured with sums in L2.
    AddAgain(cost, between, 2 * fp32 * static_cast<double>(parts - 1),
             m_.kernel.unpack_overlaps ? MemoryLevel::kL3 : MemoryLevel::kL1);
  }

  const GemmProblem& p_;
  const GemmConfiguration& c_;
  const MachineModel& m_;
  std::array<double, 3> none_found_{}, share_per_byte_{};
};

/// Milliseconds that a thread needs for a task, apart from waiting: overlapped times, and their shares.
struct TaskTime {
  double ms = 0;
  std::array<double, kGemmParts> parts{};
};

double& PartOf(std::array<double, kGemmParts>& parts, GemmPart part) { return parts[static_cast<std::size_t>(part)]; }

/// The rate at which weights come from memory, as all threads together would have it that get as much as each of the tasks:
/// tasks fewer than threads leave more of the memory to each other.
double MemoryGbps(const GemmProblem& problem, const MachineModel& machine, double tasks, bool few) {
  const KernelFigures& kernel = machine.kernel;
  const bool unpack = problem.form == GemmForm::kUnpack;
  const std::vector<double>& by_threads = few      ? (unpack ? kernel.few_unpack_gbps : kernel.few_direct_gbps)
                                          : unpack ? kernel.unpack_gbps
                                                   : kernel.direct_gbps;
  const double all = problem.form == GemmForm::kGradient ? machine.gbps[3] : by_threads.back();
  const double threads = machine.threads;
  if (tasks >= threads) return all;
  const double some = std::min(by_threads[static_cast<std::size_t>(tasks) - 1], all);
  return std::max(some * threads / tasks, all);
}

/// @param memory_gbps  at which weights would come for all threads together
TaskTime TimeOf(const TaskCost& cost, double flops, const GemmProblem& problem, const MachineModel& machine,
                double memory_gbps) {
  const double threads = machine.threads;
  const KernelFigures& kernel = machine.kernel;
  // A rate of x GB/s is x bytes a nanosecond.
  const auto supply = [&](MemoryLevel level, double gbps) {
    return cost.bytes[static_cast<std::size_t>(level)] * threads / gbps * kNsToMs;
  };
  const double products = (cost.cells_ns + cost.calls_ns) * kNsToMs, unpack = cost.unpack_ns * kNsToMs;
  // A matrix unit has few registers to load tiles ahead into: it waits for those from L2. Vectors wait for bytes at most.
  const bool unit = kernel.unpack_overlaps;
  const double l2 = supply(MemoryLevel::kL2, machine.gbps[1]);
  const double tiles = unit ? (cost.once ? kWithoutSlices : 1.0) * l2 : 0.0;
  const double cells = products + tiles;
  const double memory = supply(MemoryLevel::kMemory, memory_gbps) + cost.lost_ns * kNsToMs;
  const double storing = cost.store_ns * kNsToMs;
  const double fetching = kWaitedForFetched * cost.fetched_tiles * machine.fetch_ns * (threads - 1) / threads * kNsToMs;
  // Beside the products, all that overlaps with them: L2 and L3. What vectors unpack comes on top, also where a matrix unit
  // leaves them idle: it and its prefetches take the fill buffers that tiles are loaded through. (AMX, 48 to 256 rows, weights
  // in L2, ns a stored tile: 59, 71, 98, 116, 208, which are 24 and 11.5 for each panel.) Memory
  // comes beside all of it there, and beside the unpacking where vectors compute, too.
  const bool unpack_first = problem.form == GemmForm::kUnpack && !unit && !cost.few;
  const bool unpacks = problem.form == GemmForm::kUnpack;
  const double overlap = cost.few  ? (cost.passed_once ? kernel.few_overlap : kPassedOverlap)
                         : unpacks ? (cost.once ? kRingOverlap : kernel.unpack_overlap)
                                   : kernel.overlap;
  const Overlap beside(overlap);
  const double busy = cells + (unit ? unpack : 0.0);
  const double l3 = supply(MemoryLevel::kL3, machine.gbps[2]), waited = unit ? kWaitedForL3 * l3 : 0.0;
  const std::array<double, 3> powers = {beside.Power(busy), unit ? 0.0 : beside.Power(l2), beside.Power(l3 - waited)};
  const double sum = powers[0] + powers[1] + powers[2];
  const double by_itself = beside.Root(sum) + waited, computing = (cost.few                ? 1.0
                                                                   : unpacks && !cost.once ? machine.unpack_factor
                                                                                           : machine.direct_factor) *
                                                                  by_itself;
  double memory_share = 0, unpack_share = 0, computing_share = computing;
  if (unpack_first) {
    const Together way(unpack, memory, Overlap(kUnpackOverlap), Overlap(1), cost.unfetched);
    memory_share = way.second;
    unpack_share = way.first;
  } else {
    const Together whole(computing, memory, beside, Overlap(cost.few ? 1.0 : std::min(overlap, kNotPrefetched)),
                         cost.unfetched);
    memory_share = whole.second;
    computing_share = whole.first;
  }
  TaskTime time;
  time.ms = computing_share + memory_share + unpack_share + storing + fetching;
  if (sum <= 0) return time;
  const double beside_products = computing_share * (1 - waited / by_itself);
  const auto share = [&](std::size_t i) { return beside_products * powers[i] / sum; };
  // What the cells take: the ceiling's time for the flops that count, what edges add, and the rest, which is L1.
  const double least = flops / (machine.compute_gflops / threads) * kNsToMs;
  const double whole =
      kernel.step_ns[static_cast<std::size_t>(kernel.left_panels - 1)]
                    [static_cast<std::size_t>((problem.form == GemmForm::kUnpack ? 2 : kernel.right_panels) - 1)] /
      static_cast<double>(kernel.left_panels * (problem.form == GemmForm::kUnpack ? 2 : kernel.right_panels));
  const double without_edges = std::min(products, std::max(least, flops / (2.0 * 16 * 16 * 32) * whole * kNsToMs));
  const double arithmetic = std::min(least, products);
  const double scale = busy > 0 ? share(0) / busy : 0.0;
  if (unit) unpack_share = scale * unpack;
  PartOf(time.parts, GemmPart::kArithmetic) = scale * arithmetic;
  PartOf(time.parts, GemmPart::kL1) = scale * (without_edges - arithmetic);
  PartOf(time.parts, GemmPart::kEdge) = scale * (products - without_edges);
  PartOf(time.parts, GemmPart::kL2) = share(1) + scale * tiles;
  PartOf(time.parts, GemmPart::kL3) = share(2) + computing_share - beside_products + fetching;
  PartOf(time.parts, GemmPart::kMemory) = memory_share;
  PartOf(time.parts, GemmPart::kPacking) = unpack_share + storing;
  return time;
}

/// Tasks of one kind: their time on one thread while all threads have one, and in the last round.
struct Tasks {
  double count = 0, work = 0, late_work = 0;

  double Each() const { return count > 0 ? work / count : 0; }
  double Late() const { return count > 0 ? late_work / count : 0; }
};

/// When the last of equal tasks ends that threads take one after the other, first those of whole columns.
double Rounds(const Tasks& whole, const Tasks& rest, double threads) {
  const double full = std::floor(whole.count / threads), left = whole.count - full * threads;
  const double beside = left > 0 ? threads - left : 0;  // others begin in that round
  double span = full * whole.Each();
  if (left > 0) span += rest.count <= beside ? whole.Late() : whole.Each();
  const double behind = std::max(rest.count - beside, 0.0), full_behind = std::floor(behind / threads);
  span += full_behind * rest.Each();
  if (behind > full_behind * threads) span += rest.Late();
  return span;
}

}  // namespace

bool IsFew(const GemmProblem& problem, std::int64_t rows, const MachineModel& machine) {
  if (problem.form == GemmForm::kGradient || machine.kernel.measured_rows == 0) return false;
  return problem.form == GemmForm::kUnpack ||
         AreStoredRows(rows, machine.kernel.most_few_rows, machine.kernel.most_stored_rows);
}

PackingCut CutPacking(const GemmProblem& problem, int threads) {
  std::int64_t chunks = 0;
  for (const GroupRows& group : problem.groups) chunks += group.groups * CeilDiv(group.rows, PackingCut::kRows);
  const std::int64_t all = CeilDiv(problem.k, kTileColumns);
  const std::int64_t columns = CeilDiv(all, threads == 1 ? 1 : std::min(PartsForThreads(chunks, threads), all));
  return {columns, chunks * CeilDiv(all, columns)};
}

std::int64_t TaskRows(std::int64_t rows, const GemmConfiguration& configuration, bool whole) {
  if (whole) return RoundUp(rows, kPanelRows);
  return RoundUp(CeilDiv(rows, CeilDiv(rows, configuration.task_rows)), kPanelRows);
}

std::string_view GemmPartName(GemmPart part) {
  constexpr std::array<std::string_view, kGemmParts> kNames = {"arithmetic", "l1",   "l2",         "l3",      "dram",
                                                               "packing",    "edge", "scheduling", "dispatch"};
  return kNames[static_cast<std::size_t>(part)];
}

GemmEstimate EstimateGemm(const GemmProblem& problem, const GemmConfiguration& configuration, const MachineModel& machine) {
  const TaskCounter counter(problem, configuration, machine);
  const double threads = machine.threads;
  double all_rows = 0, all_tiles = 0;
  for (const GroupRows& group : problem.groups) {
    const auto groups = static_cast<double>(group.groups);
    all_rows += static_cast<double>(group.rows) * groups;
    all_tiles += Product(CeilDiv(group.rows, kPanelRows), CeilDiv(problem.k, kTileColumns), groups);
  }
  const double l3 = kUsable * static_cast<double>(machine.l3_bytes);
  const double packed_bytes = all_rows * static_cast<double>(problem.k) * 2;
  const double result_bytes = all_rows * static_cast<double>(problem.n) * static_cast<double>(problem.output_bytes);
  const double group_weights = Product(problem.n, problem.k, problem.weight_bytes);

  const double column_tasks = static_cast<double>(CeilDiv(problem.n, configuration.task_columns));
  const auto whole_few = [&](const GroupRows& group) {
    return problem.form == GemmForm::kDirect && IsFew(problem, group.rows, machine);
  };
  double all_tasks = 0, largest_task = 0;
  for (const GroupRows& group : problem.groups) {
    const std::int64_t rows = TaskRows(group.rows, configuration, whole_few(group));
    all_tasks += static_cast<double>(group.groups * CeilDiv(group.rows, rows)) * column_tasks;
    largest_task =
        std::max(largest_task, Product(std::min(rows, group.rows), std::min(configuration.task_columns, problem.n), 1));
  }
  const double last_round = all_tasks - (std::ceil(all_tasks / threads) - 1) * threads;
  const double like_it = all_rows * static_cast<double>(problem.n) / std::max(largest_task, 1.0);  // tasks like the largest
  GemmEstimate estimate;
  double work = 0, tasks = 0, longest = 0, slowed = 0;
  Tasks whole, rest;  // by their columns
  for (const GroupRows& group : problem.groups) {
    const std::int64_t rows = TaskRows(group.rows, configuration, whole_few(group));
    const std::int64_t chunks = CeilDiv(group.rows, rows);
    // Of a group's tasks a thread has so many, one column after the other.
    const double of_thread = static_cast<double>(chunks) * column_tasks / threads;
    const double new_rows = std::min(1.0, static_cast<double>(chunks) / std::max(of_thread, 1.0));
    // So many tasks of a column run beside each other and read its weights from memory; to others they come from L3.
    const bool shared = machine.threads > 2 && MeetsOnce(problem, machine, std::min(configuration.call_rows, rows));
    const double sharers = shared ? std::min(static_cast<double>(chunks), threads) : 1.0;
    const auto add = [&](std::int64_t task_rows, std::int64_t task_columns, double count, bool weights_again) {
      if (task_rows == 0 || task_columns == 0 || count == 0) return;
      Tasks& some = task_columns == configuration.task_columns ? whole : rest;
      const bool few = IsFew(problem, group.rows, machine);
      const bool near = problem.cached || (weights_again && group_weights <= l3);
      TaskShape shape{task_rows,
                      task_columns,
                      group.rows,
                      few,
                      near ? MemoryLevel::kL3 : MemoryLevel::kMemory,
                      MemoryLevel::kL3,
                      MemoryLevel::kL3,
                      new_rows,
                      near ? 1.0 : sharers};
      if (packed_bytes > l3) shape.activations_from = MemoryLevel::kMemory;
      if (result_bytes > l3 || (problem.output_bytes == 2 && problem.form == GemmForm::kUnpack))
        shape.result_to = MemoryLevel::kMemory;
      const double flops = 2.0 * Product(task_rows, task_columns, static_cast<double>(problem.k));
      const TaskCost cost = counter.Count(shape);
      // Fewer tasks than threads gain half of what so many threads alone have more of the memory, by logarithms. (AMX, 16
      // threads, tasks whose time is memory's: with all of it 5, 7, 9 and 12 take 0.65, 0.76, 0.82 and 0.9 of what they
      // really do, with none of it nine take 1.1.) Those of a last round, which follow others, were not seen apart.
      const double gbps = MemoryGbps(problem, machine, all_tasks, few), of_all = MemoryGbps(problem, machine, threads, few);
      const TaskTime time = TimeOf(cost, flops, problem, machine, std::sqrt(gbps * of_all));
      for (std::size_t i = 0; i < kGemmParts; ++i) estimate.parts[i] += count * time.parts[i] / threads;
      work += count * time.ms;
      tasks += count;
      some.count += count;
      some.work += count * time.ms;
      const auto late = [&] { return TimeOf(cost, flops, problem, machine, MemoryGbps(problem, machine, last_round, few)); };
      const bool same = last_round == threads || last_round == all_tasks || problem.groups.size() > 1;
      some.late_work += count * (same ? time.ms : late().ms);
      longest = std::max(longest, time.ms);
      slowed = std::max(slowed, time.ms - kMemoryLeft * time.parts[static_cast<std::size_t>(GemmPart::kMemory)]);
    };
    const auto groups = static_cast<double>(group.groups);
    const std::int64_t whole_columns = problem.n / configuration.task_columns;
    const auto add_columns = [&](std::int64_t task_rows, double count, bool again) {
      add(task_rows, configuration.task_columns, count * static_cast<double>(whole_columns), again);
      add(task_rows, problem.n % configuration.task_columns, count, again);
    };
    const std::int64_t whole_chunks = group.rows / rows;
    const double far = std::min(sharers, static_cast<double>(whole_chunks));
    add_columns(rows, groups * far, false);
    add_columns(rows, groups * (static_cast<double>(whole_chunks) - far), true);
    if (chunks > whole_chunks) add_columns(group.rows % rows, groups, static_cast<double>(chunks) > sharers);
  }
  // Equal tasks end in rounds, those of the last columns after the others; unequal ones fill up, and on average half of one
  // is waited for.
  const double even = work / threads;
  double span = even;
  if (machine.threads > 1 && tasks > 0) {
    // What the slowest thread's task takes longer, but for memory that faster threads leave it.
    const double slowest = machine.uneven[static_cast<std::size_t>(std::min(tasks, threads)) - 1] - 1, delay = slowest * slowed;
    const double waited = 0.5 * work / (problem.groups.size() == 1 ? like_it : tasks) * (threads - 1) / threads;
    const double rounds = Rounds(whole, rest, threads);
    // Threads that are not equally fast take more or fewer of several tasks each: their rounds fill up as well. (AMX, 16
    // threads, `uneven` 1.4 to 1.5; of 18, 21, 24, 28, 32, 36, 40, 48, 56, 112 and 140 equal tasks the last thread ends 0.42,
    // 0.50, 0.43, 0.44, 0.57, 0.47, 0.50, 0.45, 0.54, 0.53 and 0.62 of a task after the mean.)
    const double unlike = tasks > threads ? std::min(slowest / kUnlike, 1.0) : 0.0;
    const double shared = std::max(longest + delay, even + waited);
    const double ended = problem.groups.size() == 1 ? rounds : std::min(rounds, even + waited);
    // Not all of a group's tasks are equal: of 112 rows the first of two tasks has 64. (Two threads of Zen 4: 18% slower than
    // what was predicted to be as fast, all rows in each task.)
    const double alike = std::max(ended, longest) + delay;
    span = alike + unlike * (shared - alike);
  }
  PartOf(estimate.parts, GemmPart::kScheduling) = span - even;
  double packing = 0;
  if (!problem.packed) {
    // One thread reads what it writes before. Of several each takes the rows from those that have written them, and the lines
    // that it writes, too. (AMX, 16 threads, 80 products whose operands others have written: 285 ns a tile of bf16 and 395 of
    // fp32, where packing in a thread's own cache takes 90. That others read the tiles then from beyond their own L2 is in the
    // tasks' times.)
    const double read = machine.threads == 1 ? all_rows * static_cast<double>(problem.k * (problem.input_bytes + 4)) : 0.0;
    const double others = (threads - 1) / threads, given = static_cast<double>(problem.input_bytes) / 2;
    const double moved = machine.fetch_ns * others * given + machine.claim_ns * (given + 1) / 2;
    const double busy = packed_bytes / machine.kernel.pack_gbps + read / machine.gbps[2] + all_tiles * moved;
    const auto pieces = static_cast<double>(CutPacking(problem, machine.threads).pieces);
    const double begins = kPackingBegins * machine.latency_ns[static_cast<std::size_t>(MemoryLevel::kL3)] * others;
    packing = (std::max(busy / pieces, busy / threads + kPieceWaited * busy / pieces * others) + begins) * kNsToMs;
  }
  PartOf(estimate.parts, GemmPart::kPacking) += packing;
  const double jobs = problem.packed ? 1.0 : 2.0;
  const double dispatch = (jobs * machine.job_us + tasks / threads * machine.task_us) * 1e-3;
  PartOf(estimate.parts, GemmPart::kDispatch) = dispatch;
  estimate.milliseconds = span + packing + dispatch;
  const auto largest = std::max_element(estimate.parts.begin(), estimate.parts.end());
  estimate.bound = static_cast<GemmPart>(largest - estimate.parts.begin());
  return estimate;
}

}  // namespace moesaic
