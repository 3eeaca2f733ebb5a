#include "cpu_kernels/fused/linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/direct_rows.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Columns of sums that a task without a norm computes before it goes over them.
constexpr std::int64_t kChunkColumns = 512;
/// What a matrix unit needs of the contraction in L2 at a time: this slice and the next (gemm/direct_gemm.h).
constexpr std::int64_t kSlicesDepth = 1024;

/// Rows of a block, at most. Weights take longer to multiply with 128 rows than to bring; more only fill a cache that the other
/// thread of a core uses as well (256 rows: 2 to 12% longer on 16 AMX threads, up to 2% on two Zen 4 cores). But the unpack
/// form interleaves them for each block (128 rows: up to 6% longer on AMX).
constexpr std::int64_t kMostBlockRows = 128, kMostUnpackRows = 256;

/// The last blocks are divided by columns too where a part of one still has so many multiply-adds and columns, up to so many
/// parts: many times as long as waking and packing take. (docs/experiments, "The last blocks by columns")
constexpr std::int64_t kLeastPartWork = 40'000'000, kLeastPartColumns = 384, kMostParts = 4;

/// How the rows and columns of a result are divided into tasks. Changes no bit.
struct Plan {
  std::int64_t block_rows;     ///< a multiple of 32, where there is a product
  std::int64_t blocks;         ///< of rows
  std::int64_t whole;          ///< blocks of block_rows; those after them have half as many
  std::int64_t divided;        ///< the last blocks, whose columns are divided
  std::int64_t splits;         ///< of their columns
  std::int64_t split_columns;  ///< a multiple of 32, where there is a product

  std::int64_t undivided() const { return blocks - divided; }
  std::int64_t tasks() const { return undivided() + divided * splits; }
};

/// Rows [begin, end).
struct Rows {
  std::int64_t begin, end;
};

Rows RowsOf(const Plan& plan, std::int64_t block, std::int64_t all) {
  const std::int64_t halves = std::max<std::int64_t>(block - plan.whole, 0), half = plan.block_rows / 2;
  const std::int64_t begin = (block - halves) * plan.block_rows + halves * half;
  return {begin, std::min(begin + (block < plan.whole ? plan.block_rows : half), all)};
}

/// The sizes of a product: T rows, `columns` of the result, `depth` of the contraction.
struct Shape {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t depth;
};

/// Of a norm alone: whole rows.
Plan MakeNormPlan(const Shape& shape, std::int64_t row_bytes) {
  const std::int64_t rows = RowsPerTask(row_bytes);
  const std::int64_t blocks = CeilDiv(shape.rows, rows);
  return {rows, blocks, blocks, 0, 1, shape.columns};
}

/// The GEMM that computes a product.
enum class Form { kFp32, kDirect, kUnpack };

Plan MakePlan(const Shape& shape, Form form, bool whole_rows, int threads) {
  const std::int64_t columns = RoundUp(shape.columns, 32), depth = RoundUp(shape.depth, 32);
  const bool is_bf16 = form != Form::kFp32, sliced = form == Form::kDirect && ChosenKernels().unpack_overlaps;
  const std::int64_t input_bytes =
      is_bf16 ? 2 * (sliced ? std::min(depth, kSlicesDepth) : depth) : 4 * std::min(depth, kFp32Depth);
  const std::int64_t row_bytes = input_bytes + 4 * (whole_rows ? columns : std::min(columns, kChunkColumns));
  // Beside the rows: two tile columns of weights, unpacked, or a cell's panels of them and the next ones.
  const std::int64_t panels = 64 * (sliced ? std::min(depth, kSlicesDepth) : depth) * ChosenKernels().left_panels;
  const std::int64_t fixed = form == Form::kUnpack ? 128 * depth : form == Form::kDirect ? panels : 64 << 10;
  const std::int64_t budget = std::max<std::int64_t>(HostL2Bytes() / 8 * 7 - fixed, 0);
  // A block's whole operand is kept, and read again for each chunk of columns: no more of it than L2 holds.
  const std::int64_t operand_rows = is_bf16 ? HostL2Bytes() / (2 * depth) : budget / row_bytes;
  const std::int64_t fitting = std::min(budget / row_bytes, operand_rows);
  // Two passes of a cell at least and, of many blocks, whole ones: 128 rows are three where it takes 48, and one is not full.
  const std::int64_t pass = kPanelRows * (form == Form::kDirect ? ChosenKernels().right_panels : 2);
  const std::int64_t most_rows = form == Form::kUnpack ? kMostUnpackRows : kMostBlockRows;
  const std::int64_t unit = shape.rows > 2 * threads * kMostBlockRows ? pass : 32;
  const std::int64_t most = std::clamp(fitting, 2 * pass, most_rows) / unit * unit;
  Plan plan{};
  // Larger ones only where each thread still has two.
  const std::int64_t half = RoundUp(CeilDiv(shape.rows, 2 * threads), 32);
  plan.block_rows = std::min({most, std::max(half, kMostBlockRows), RoundUp(shape.rows, 32)});
  plan.blocks = plan.whole = CeilDiv(shape.rows, plan.block_rows);
  plan.block_rows = RoundUp(CeilDiv(shape.rows, plan.blocks), 32);  // of few blocks the last one has as many
  plan.splits = plan.blocks >= threads ? 1 : std::min(CeilDiv(2 * threads, plan.blocks), CeilDiv(columns, 64));
  plan.divided = plan.splits > 1 ? plan.blocks : 0;
  const std::int64_t of_half = form == Form::kDirect ? kPanelRows : 32;
  if (threads > 1 && plan.blocks > threads && plan.block_rows % (2 * of_half) == 0) {
    // Threads are not equally fast, least of all two of one core: the last block of each is cut in halves.
    plan.whole = std::max<std::int64_t>(shape.rows / plan.block_rows - threads, 0);
    plan.blocks = plan.whole + CeilDiv(shape.rows - plan.whole * plan.block_rows, plan.block_rows / 2);
    const std::int64_t work = plan.block_rows / 2 * columns * depth;
    plan.splits = std::clamp<std::int64_t>(std::min(work / kLeastPartWork, columns / kLeastPartColumns), 1, kMostParts);
    plan.divided = plan.splits > 1 ? threads : 0;
  }
  plan.split_columns = RoundUp(CeilDiv(columns, plan.splits), 32);
  plan.splits = CeilDiv(columns, plan.split_columns);
  return plan;
}

template <typename T>
T* RowAt(const TensorView& view, std::int64_t row) {
  return static_cast<T*>(view.data) + row * view.stride[0];
}

/// Whether what is read and written does not fit the cores' own caches by far, so that writing past them saves reading. The
/// last level does not count: on a rented host most of it is others'.
bool BeyondCaches(std::int64_t bytes, const Pool& pool) { return bytes > 2 * HostL2Bytes() * pool.num_threads(); }

std::int64_t ColumnsOf(const LinearArgs& args) {
  if (args.weight == nullptr) return args.x.shape[1];
  return args.transposed ? args.weight->columns() : args.weight->rows();
}

/// One call of Linear(): the memory and the steps of its tasks.
class LinearRun {
 public:
  LinearRun(const LinearArgs& args, Pool& pool)
      : args_(args),
        pool_(pool),
        shape_{args.x.shape[0], ColumnsOf(args), args.x.shape[1]},
        form_(args.x.dtype == DType::kFloat32 ? Form::kFp32
              : args.transposed               ? Form::kUnpack
                                              : Form::kDirect),
        has_norm_(args.norm != Norm::kNone),
        plan_(args.weight == nullptr ? MakeNormPlan(shape_, 2 * shape_.columns * SizeOf(args.x.dtype))
                                     : MakePlan(shape_, form_, has_norm_, pool.num_threads())),
        // A line beyond a multiple of 4 KB: rows of sums must not share cache sets.
        ld_(RoundUp(has_norm_ ? shape_.columns : std::min(shape_.columns, kChunkColumns), 32) + 16),
        ld_input_(RoundUp(shape_.depth, 16) + 16),
        ones_(args.gamma == nullptr && has_norm_ ? shape_.columns : 0, 1.0f),
        zeros_(shape_.columns, 0.0f),
        // Beside products memory has time to bring the lines of out, and stores past the caches wait for it. Those of a norm
        // alone save a third of what memory brings, but on 16 AMX threads they take longer than that.
        stream_(args.weight == nullptr && !ChosenKernels().unpack_overlaps && args.out.data != args.x.data &&
                BeyondCaches(2 * shape_.rows * shape_.columns * SizeOf(args.x.dtype), pool)) {}

  void Run() {
    Carver of_factors;
    factors_.Bind(of_factors);
    Carver one;
    Take(one);
    worker_bytes_ = one.used();
    // A norm waits for all columns of its rows: where they are divided, sums of all parts.
    const std::int64_t first = RowsOf(plan_, plan_.undivided(), shape_.rows).begin, rows = shape_.rows - first;
    const bool apart = has_norm_ && plan_.divided > 0;
    const std::int64_t sums_bytes = apart ? RoundUp(rows, 32) * ld_ * 4 : 0;
    const std::int64_t bytes = pool_.num_threads() * worker_bytes_ + of_factors.used() + sums_bytes;
    const Scratch scratch(bytes, IsKept(bytes, pool_.num_threads()));
    base_ = scratch.data();
    Carver shared(base_ + pool_.num_threads() * worker_bytes_);
    factors_.Bind(shared);
    auto* const sums = shared.Take<float>(sums_bytes / 4);
    pool_.ParallelFor(factors_.tasks(), [&](std::int64_t task, int) { factors_.Pack(task, kernels_); });
    // Of few rows all blocks are divided, and their norm is as well. Of many rows a block's last part brings it.
    const bool norm_at_the_end = apart && plan_.undivided() == 0;
    std::vector<std::atomic<std::int64_t>> parts_left(apart && !norm_at_the_end ? plan_.divided : 0);
    for (std::atomic<std::int64_t>& left : parts_left) left.store(plan_.splits, std::memory_order_relaxed);
    pool_.ParallelFor(plan_.tasks(), [&](std::int64_t i, int worker) {
      if (i < plan_.undivided()) return Block(RowsOf(plan_, i, shape_.rows), 0, shape_.columns, worker, nullptr);
      const std::int64_t d = (i - plan_.undivided()) / plan_.splits;
      const std::int64_t column = (i - plan_.undivided()) % plan_.splits * plan_.split_columns;
      const Rows block = RowsOf(plan_, plan_.undivided() + d, shape_.rows);
      float* const of_block = apart ? sums + (block.begin - first) * ld_ : nullptr;
      Block(block, column, std::min(column + plan_.split_columns, shape_.columns), worker, of_block);
      if (!parts_left.empty() && parts_left[d].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        Epilogue(block.begin, block.end - block.begin, 0, shape_.columns, of_block, nullptr, MemoryOf(worker));
      }
    });
    if (!norm_at_the_end) return;
    pool_.ParallelFor(CeilDiv(rows, kRowsApart), [&](std::int64_t i, int worker) {
      const std::int64_t row = i * kRowsApart;
      Epilogue(row, std::min(kRowsApart, rows - row), 0, shape_.columns, sums + row * ld_, nullptr, MemoryOf(worker));
    });
  }

 private:
  static constexpr std::int64_t kRowsApart = 4;

  /// Of one worker.
  struct Memory {
    TileMatrix input;        ///< bf16: a block of x
    BFloat16* unpacked;      ///< unpack form: its scratch
    float* transposed_sums;  ///< direct form: [columns at a time][SumsPitch(block_rows)]
    float* rows;             ///< fp32: [block_rows][ld_input_], a block of x
    float* fp32;             ///< fp32: scratch of the GEMM
    float* sums;             ///< [block_rows][ld_]; direct form: of a panel of rows
    float* values;           ///< with a norm: scratch of its kernel
    LowRankTiles::Block low_rank;
  };

  Memory Take(Carver& carver) const {
    Memory memory{};
    if (args_.weight != nullptr && form_ == Form::kFp32) {
      memory.rows = carver.Take<float>(plan_.block_rows * ld_input_);
      memory.fp32 = carver.Take<float>(kFp32GemmScratch);
    } else if (args_.weight != nullptr) {
      const TileMatrix shape = TileMatrix::Activations(nullptr, plan_.block_rows, shape_.depth);
      memory.input = shape;
      memory.input.data = carver.Take<BFloat16>(shape.size());
      if (!factors_.empty()) memory.low_rank = factors_.Take(carver, plan_.block_rows, form_ == Form::kDirect);
      // Of a low-rank change hi and, where it has one, lo.
      const std::array segments{GemmSegment{args_.weight->tiles(), {}}, GemmSegment{factors_.a(), {}},
                                GemmSegment{factors_.a(), {}}};
      if (form_ == Form::kUnpack) memory.unpacked = carver.Take<BFloat16>(UnpackScratchElements(segments));
      const std::int64_t most = plan_.undivided() > 0 ? shape_.columns : plan_.split_columns;
      const std::int64_t columns = has_norm_ ? RoundUp(most, 32) : std::min(RoundUp(most, 32), kChunkColumns);
      if (form_ == Form::kDirect) memory.transposed_sums = carver.Take<float>(columns * SumsPitch(plan_.block_rows));
    }
    const std::int64_t rows_of_sums = form_ == Form::kDirect ? kPanelRows : plan_.block_rows;
    memory.sums = carver.Take<float>(args_.weight != nullptr ? rows_of_sums * ld_ : 0);
    memory.values = carver.Take<float>(has_norm_ ? EpilogueScratch(shape_.columns) : 0);
    return memory;
  }
  Memory MemoryOf(int worker) const {
    Carver carver(base_ + worker * worker_bytes_);
    return Take(carver);
  }

  /// Columns [column, end) of a block.
  /// @param all_sums  where the sums of its rows go, for an epilogue of their own; null: the columns are finished here
  void Block(const Rows& block, std::int64_t column, std::int64_t end, int worker, float* all_sums) {
    Memory memory = MemoryOf(worker);
    const std::int64_t row = block.begin, rows = block.end - block.begin;
    if (args_.weight == nullptr) {
      Epilogue(row, rows, column, end, nullptr, nullptr, memory);
      if (stream_) FinishStores();
      return;
    }
    if (!args_.out.defined() && column > 0) return;  // the first part has kept all that is wanted
    PackInput(row, rows, memory);
    if (!factors_.empty()) MultiplyLowRank(row, rows, column == 0, memory);
    if (!args_.out.defined()) return;
    const std::int64_t step = has_norm_ ? end - column : kChunkColumns;
    const std::int64_t rows_at_once = form_ == Form::kDirect ? kPanelRows : rows;
    for (std::int64_t from = column; from < end; from += step) {
      const std::int64_t to = std::min(from + step, end);
      float* const sums = all_sums != nullptr ? all_sums + from : memory.sums;
      Product(block, from, to, end - column == shape_.columns, sums, memory);
      for (std::int64_t first = 0; first < rows; first += rows_at_once) {
        float* const of_rows = all_sums != nullptr ? sums + first * ld_ : sums;
        const float* const transposed = form_ == Form::kDirect ? memory.transposed_sums + first : nullptr;
        if (all_sums == nullptr) {
          Epilogue(row + first, std::min(rows_at_once, rows - first), from, to, of_rows, transposed, memory);
        } else if (transposed != nullptr) {
          TurnPanel(transposed, to - from, of_rows);
        }
      }
    }
  }

  void PackInput(std::int64_t row, std::int64_t rows, Memory& memory) const {
    const FusedRange range(FusedStage::kPack, 0.0, 2.0 * static_cast<double>(rows * shape_.depth * SizeOf(args_.x.dtype)));
    if (form_ == Form::kFp32) {
      const auto bytes = static_cast<std::size_t>(shape_.depth) * sizeof(float);
      for (std::int64_t i = 0; i < rows; ++i) {
        std::memcpy(memory.rows + i * ld_input_, RowAt<float>(args_.x, row + i), bytes);
      }
      return;
    }
    memory.input.panels = CeilDiv(rows, kPanelRows);
    const void* pointers[kMostUnpackRows];
    for (std::int64_t i = 0; i < rows; ++i) pointers[i] = RowAt<BFloat16>(args_.x, row + i);
    PackRowsArgs pack;
    pack.rows = pointers;
    pack.dtype = DType::kBFloat16;
    pack.count = rows;
    pack.columns = shape_.depth;
    if (form_ == Form::kUnpack) {
      pack.operand = memory.input;
    } else {
      (StoredRows(kernels_, rows, shape_.rows, shape_.depth) > 0 ? pack.stored : pack.pairs) = memory.input;
    }
    pack.panels = memory.input.panels;
    pack.tile_columns = memory.input.columns;
    kernels_.pack_rows(pack);
  }

  /// L or P of a block, from its input: the other factor of what the low-rank change adds.
  /// @param keep  whether args.low_rank.low gets it, if it is wanted
  void MultiplyLowRank(std::int64_t row, std::int64_t rows, bool keep, Memory& memory) const {
    const LowRank& change = args_.low_rank;
    const FusedRange range(args_.transposed ? FusedStage::kBackwardLowRank : FusedStage::kLowRank,
                           2.0 * static_cast<double>(rows * shape_.depth * change.rank()), 0.0);
    LowRankTiles::Kept kept;
    if (keep && change.low != nullptr) kept = {change.low + row, shape_.rows};
    if (form_ == Form::kDirect) {
      factors_.MultiplyByA(kernels_, memory.input, rows, StoredRows(kernels_, rows, shape_.rows, shape_.depth), kept,
                           memory.low_rank);
    } else {
      factors_.MultiplyByB(kernels_, memory.input, rows, memory.unpacked, kept, memory.low_rank);
    }
  }

  /// The products that a block's sums are of.
  Segments SegmentsOf(const Memory& memory) const {
    Segments segments;
    segments.Add(args_.weight->tiles(), memory.input);
    if (!factors_.empty()) segments.Add(args_.transposed ? factors_.a() : factors_.b(), memory.low_rank.low);
    return segments;
  }

  /// sums[t][c - from] for all rows of a block and columns [from, to), rows of ld_; in the direct form transposed_sums, and
  /// TurnPanel() turns them.
  /// @param undivided  the task has all columns
  void Product(const Rows& block, std::int64_t from, std::int64_t to, bool undivided, float* sums, Memory& memory) const {
    const std::int64_t rows = block.end - block.begin, rank = factors_.empty() ? 0 : args_.low_rank.rank();
    const FusedRange range(args_.transposed ? FusedStage::kBackwardGemm : FusedStage::kGemm,
                           2.0 * static_cast<double>(rows * (to - from) * (shape_.depth + rank)), 0.0);
    if (form_ == Form::kFp32) {
      Fp32GemmArgs gemm;
      gemm.a = memory.rows;
      gemm.lda = ld_input_;
      gemm.rows = rows;
      gemm.panels = args_.weight->panels();
      gemm.n = args_.weight->rows();
      gemm.k = args_.weight->columns();
      gemm.transposed = args_.transposed;
      gemm.first = from / 16;
      gemm.count = CeilDiv(to - from, 16);
      gemm.c = sums;
      gemm.ldc = ld_;
      gemm.scratch = memory.fp32;
      return kernels_.fused.fp32_gemm(gemm);
    }
    const TileMatrix& weights = args_.weight->tiles();
    const Segments segments = SegmentsOf(memory);
    if (form_ == Form::kDirect) {
      DirectGemmArgs gemm;
      gemm.segments = segments;
      gemm.first_panel = from / kPanelRows;
      gemm.panels = CeilDiv(to, kPanelRows) - gemm.first_panel;
      gemm.activation_panels = memory.input.panels;
      gemm.row_count = StoredRows(kernels_, rows, shape_.rows, shape_.depth);
      gemm.c = memory.transposed_sums;
      gemm.ldc = SumsPitch(plan_.block_rows);
      // After the last columns the next block begins with the first; where columns are split, nobody knows with which.
      const std::int64_t next = to < shape_.columns ? to / kPanelRows : 0;
      if (undivided) gemm.prefetch = {weights, next, weights.panels - next, 0, weights.columns};
      // The residual is read as soon as the products are there. (Gaps between its rows never are.)
      if (args_.residual.defined() && args_.residual.stride[0] == shape_.columns && to - from == shape_.columns) {
        const std::int64_t lines = rows * shape_.columns / (2 * kTileColumns);  // of each half
        gemm.prefetch.others[0] = RowAt<BFloat16>(args_.residual, block.begin);
        gemm.prefetch.others[1] = gemm.prefetch.others[0] + lines * kTileColumns;
        gemm.prefetch.lines = lines;
      }
      return kernels_.direct_gemm(gemm);
    }
    UnpackGemmArgs gemm;
    gemm.segments = segments;
    gemm.panels = memory.input.panels;
    gemm.first_column = from / kTileColumns;
    gemm.columns = CeilDiv(to - from, kTileColumns);
    gemm.c = sums;
    gemm.ldc = ld_;
    gemm.row_count = rows;
    gemm.depth = UnpackSlice(kernels_.unpack_overlaps, memory.input.columns, gemm.panels, HostL2Bytes());
    gemm.scratch = memory.unpacked;
    kernels_.unpack_gemm(gemm);
  }

  /// sums[t][c] for 16 rows of a block.
  void TurnPanel(const float* transposed, std::int64_t columns, float* sums) const {
    const FusedRange range(FusedStage::kGemm, 0.0, 0.0);
    TurnPanelArgs turn;
    turn.transposed = transposed;
    turn.transposed_ld = SumsPitch(plan_.block_rows);
    turn.columns = RoundUp(columns, 16);
    turn.sums = sums;
    turn.ld = ld_;
    kernels_.fused.turn_panel(turn);
  }

  /// Everything after the GEMM, for rows [row, row + rows) and columns [from, to).
  /// @param sums        of these rows; with `transposed`, where these lie instead, scratch
  void Epilogue(std::int64_t row, std::int64_t rows, std::int64_t from, std::int64_t to, float* sums, const float* transposed,
                const Memory& memory) const {
    const FusedRange range(has_norm_ ? FusedStage::kNorm : FusedStage::kEpilogue, 0.0,
                           static_cast<double>(rows * (to - from) * SizeOf(args_.x.dtype)));
    RowEpilogueArgs epilogue;
    epilogue.dtype = args_.x.dtype;
    epilogue.rows = rows;
    epilogue.columns = to - from;
    epilogue.sums = sums;
    epilogue.ld = ld_;
    epilogue.transposed = transposed;
    epilogue.transposed_ld = SumsPitch(plan_.block_rows);
    epilogue.bias = (args_.bias != nullptr ? args_.bias : zeros_.data()) + from;
    epilogue.addend = AddressOf(args_.addend, row, from);
    epilogue.addend_stride = args_.addend.stride[0];
    epilogue.activation = args_.activation;
    const TensorView& residual = args_.weight == nullptr ? args_.x : args_.residual;
    epilogue.residual = AddressOf(residual, row, from);
    epilogue.residual_stride = residual.stride[0];
    epilogue.norm = args_.norm;
    epilogue.gamma = args_.gamma != nullptr ? args_.gamma : ones_.data();
    epilogue.beta = args_.beta != nullptr ? args_.beta : zeros_.data();
    epilogue.epsilon = args_.epsilon;
    epilogue.values = memory.values;
    epilogue.out = AddressOf(args_.out, row, from);
    epilogue.out_stride = args_.out.stride[0];
    epilogue.stream = stream_;
    epilogue.pre = AddressOf(args_.pre, row, from);
    epilogue.pre_stride = args_.pre.stride[0];
    epilogue.normalized = AddressOf(args_.normalized, row, from);
    epilogue.inverse_std = args_.inverse_std != nullptr ? args_.inverse_std + row : nullptr;
    kernels_.fused.row_epilogue(epilogue);
  }

  const LinearArgs& args_;
  Pool& pool_;
  const Shape shape_;
  const Form form_;
  const bool has_norm_;
  const Plan plan_;
  const std::int64_t ld_, ld_input_;
  const std::vector<float> ones_, zeros_;
  const bool stream_;
  const KernelTier& kernels_ = ChosenKernels();
  LowRankTiles factors_{args_.low_rank};
  std::int64_t worker_bytes_ = 0;
  char* base_ = nullptr;
};

void Validate(const LinearArgs& args) {
  CheckMatrix(args.x, "x");
  const std::int64_t columns = ColumnsOf(args);
  if (args.low_rank.defined() && args.weight == nullptr) {
    throw std::invalid_argument("lora_a is given without a weight; expected both");
  }
  if (args.weight != nullptr) {
    const PackedMatrix& weight = *args.weight;
    const std::int64_t depth = args.transposed ? weight.rows() : weight.columns();
    if (args.x.shape[1] != depth) {
      throw std::invalid_argument("x has " + std::to_string(args.x.shape[1]) + " columns; expected " + std::to_string(depth) +
                                  ", as w was packed from [" + std::to_string(weight.rows()) + ", " +
                                  std::to_string(weight.columns()) + "]");
    }
    if (args.x.dtype != weight.dtype()) {
      throw std::invalid_argument(std::string("x is ") + NameOf(args.x.dtype) + "; expected " + NameOf(weight.dtype()) +
                                  ", as w was packed");
    }
    if (args.low_rank.defined()) {
      CheckLowRank(args.low_rank, weight.rows(), weight.columns());
      if (args.x.dtype != DType::kBFloat16) throw std::invalid_argument("x is float32; expected bfloat16, with lora_a");
    }
  }
  const std::int64_t rows = args.x.shape[0];
  Check(args.x, "x", rows, args.x.shape[1], args.x.dtype);
  // Without a result only what a low-rank change makes of x is wanted, and nothing may follow.
  if (args.out.defined() || args.low_rank.low == nullptr || args.norm != Norm::kNone) {
    Check(args.out, "out", rows, columns, args.x.dtype);
  }
  if (args.addend.defined()) Check(args.addend, "addend", rows, columns, args.x.dtype);
  if (args.residual.defined()) Check(args.residual, "residual", rows, columns, args.x.dtype);
  if (args.pre.defined()) Check(args.pre, "pre", rows, columns, args.x.dtype);
  if (args.normalized.defined()) Check(args.normalized, "normalized", rows, columns, args.x.dtype);
  if (!(args.epsilon >= 0.0f)) {
    throw std::invalid_argument("eps is " + std::to_string(args.epsilon) + "; expected 0 or more");
  }
}

}  // namespace

void Linear(const LinearArgs& args, Pool& pool) {
  Validate(args);
  if (args.x.shape[0] == 0 || ColumnsOf(args) == 0) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  LinearRun(args, pool).Run();
}

void NormGrad(const NormGradArgs& args, Pool& pool) {
  constexpr std::int64_t kRows = 64;
  CheckMatrix(args.d_out, "d_out");
  const std::int64_t rows = args.d_out.shape[0], columns = args.d_out.shape[1], blocks = CeilDiv(rows, kRows);
  Check(args.normalized, "normalized", rows, columns, args.d_out.dtype, "d_out");
  Check(args.d_in, "d_in", rows, columns, args.d_out.dtype, "d_out");
  const KernelTier& kernels = ChosenKernels();
  const std::vector<float> ones(args.gamma == nullptr ? columns : 0, 1.0f);
  const std::int64_t ld = RoundUp(columns, 16);
  const Scratch scratch(2 * blocks * ld * static_cast<std::int64_t>(sizeof(float)));
  auto* const sums = reinterpret_cast<float*>(scratch.data());
  pool.ParallelFor(blocks, [&](std::int64_t block, int) {
    const std::int64_t row = block * kRows;
    NormBackwardArgs part;
    part.dtype = args.d_out.dtype;
    part.rows = std::min(kRows, rows - row);
    part.columns = columns;
    part.norm = args.norm;
    part.d_out = AddressOf(args.d_out, row, 0);
    part.normalized = AddressOf(args.normalized, row, 0);
    part.inverse_std = args.inverse_std + row;
    part.gamma = args.gamma != nullptr ? args.gamma : ones.data();
    part.d_in = AddressOf(args.d_in, row, 0);
    part.d_gamma = sums + 2 * block * ld;
    part.d_beta = part.d_gamma + ld;
    std::memset(part.d_gamma, 0, static_cast<std::size_t>(2 * ld) * sizeof(float));
    const FusedRange range(FusedStage::kBackwardNorm, 0.0, 3.0 * static_cast<double>(part.rows * columns * SizeOf(part.dtype)));
    kernels.fused.norm_backward(part);
  });
  constexpr std::int64_t kColumns = 256;
  pool.ParallelFor(CeilDiv(columns, kColumns), [&](std::int64_t i, int) {
    const std::int64_t end = std::min((i + 1) * kColumns, columns);
    std::fill(args.d_gamma + i * kColumns, args.d_gamma + end, 0.0f);
    std::fill(args.d_beta + i * kColumns, args.d_beta + end, 0.0f);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const float* from = sums + 2 * block * ld;
      for (std::int64_t c = i * kColumns; c < end; ++c) {
        args.d_gamma[c] += from[c];
        args.d_beta[c] += from[ld + c];
      }
    }
  });
}

void ActivationGrad(Activation activation, const TensorView& d_out, const TensorView& pre, const TensorView& d_pre,
                    Pool& pool) {
  CheckMatrix(d_out, "d_out");
  const std::int64_t rows = d_out.shape[0], columns = d_out.shape[1], size = SizeOf(d_out.dtype);
  Check(pre, "pre", rows, columns, d_out.dtype, "d_out");
  Check(d_pre, "d_pre", rows, columns, d_out.dtype, "d_out");
  const KernelTier& kernels = ChosenKernels();
  const std::int64_t step = RowsPerTask(3 * columns * size);
  pool.ParallelFor(CeilDiv(rows, step), [&](std::int64_t i, int) {
    ActivationBackwardArgs part;
    part.dtype = d_out.dtype;
    part.activation = activation;
    part.count = std::min(step, rows - i * step) * columns;
    part.d_out = AddressOf(d_out, i * step, 0);
    part.pre = AddressOf(pre, i * step, 0);
    part.d_pre = AddressOf(d_pre, i * step, 0);
    const FusedRange range(FusedStage::kBackwardActivation, 0.0, 3.0 * static_cast<double>(part.count * size));
    kernels.fused.activation_backward(part);
  });
}

void SiluMulRows(const TensorView& x, const TensorView& out, Pool& pool) {
  CheckMatrix(x, "x");
  const std::int64_t rows = x.shape[0], columns = x.shape[1] / 2, size = SizeOf(x.dtype);
  if (x.shape[1] % 2 != 0) {
    throw std::invalid_argument("x has " + std::to_string(x.shape[1]) + " columns; expected an even number, [gate; up]");
  }
  Check(x, "x", rows, 2 * columns, x.dtype);
  Check(out, "out", rows, columns, x.dtype);
  const KernelTier& kernels = ChosenKernels();
  const std::int64_t step = RowsPerTask(3 * columns * size);
  const bool stream = out.data != x.data && BeyondCaches(3 * rows * columns * size, pool);
  pool.ParallelFor(CeilDiv(rows, step), [&](std::int64_t i, int) {
    SiluMulArgs part;
    part.dtype = x.dtype;
    part.rows = std::min(step, rows - i * step);
    part.columns = columns;
    part.gate = AddressOf(x, i * step, 0);
    part.up = AddressOf(x, i * step, columns);
    part.in_stride = x.stride[0];
    part.out = AddressOf(out, i * step, 0);
    part.out_stride = out.stride[0];
    part.stream = stream;
    const FusedRange range(FusedStage::kSiluMul, 0.0, 3.0 * static_cast<double>(part.rows * columns * size));
    kernels.fused.silu_mul(part);
    if (stream) FinishStores();
  });
}

void SiluMulGrad(const TensorView& d_out, const TensorView& x, const TensorView& d_x, Pool& pool) {
  CheckMatrix(x, "x");
  const std::int64_t rows = x.shape[0], columns = x.shape[1] / 2, size = SizeOf(x.dtype);
  Check(x, "x", rows, 2 * columns, x.dtype);
  Check(d_out, "d_out", rows, columns, x.dtype);
  Check(d_x, "d_x", rows, 2 * columns, x.dtype);
  const KernelTier& kernels = ChosenKernels();
  const std::int64_t step = RowsPerTask(5 * columns * size);
  pool.ParallelFor(CeilDiv(rows, step), [&](std::int64_t i, int) {
    SiluMulBackwardArgs part;
    part.dtype = x.dtype;
    part.rows = std::min(step, rows - i * step);
    part.columns = columns;
    part.d_out = AddressOf(d_out, i * step, 0);
    part.out_stride = d_out.stride[0];
    part.gate = AddressOf(x, i * step, 0);
    part.up = AddressOf(x, i * step, columns);
    part.in_stride = x.stride[0];
    part.d_gate = AddressOf(d_x, i * step, 0);
    part.d_up = AddressOf(d_x, i * step, columns);
    part.d_in_stride = d_x.stride[0];
    const FusedRange range(FusedStage::kBackwardSiluMul, 0.0, 5.0 * static_cast<double>(part.rows * columns * size));
    kernels.fused.silu_mul_backward(part);
  });
}

}  // namespace moesaic::fused
