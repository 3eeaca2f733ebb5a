#include "cpu_kernels/fused/attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Queries of a block, at most.
constexpr std::int64_t kMostQueries = 64;
/// Rows of keys and of values that are fetched before they are packed: the kernel itself runs ahead from there.
constexpr std::int64_t kRowsAhead = 128;
/// Bytes of a thread's scratch memory that stay for the next call, at most: very many keys take more.
constexpr std::int64_t kMostKept = 4 << 20;

/// The rows of one head, as kernels take them.
struct HeadRows {
  const TensorView& view;
  std::int64_t batch, first_column;

  BFloat16* Row(std::int64_t row) const {
    return static_cast<BFloat16*>(view.data) + batch * view.stride[0] + row * view.stride[1] + first_column;
  }
};

/// One call of Attention(): the memory and the steps of its tasks.
class AttentionRun {
 public:
  AttentionRun(const AttentionArgs& args, Pool& pool)
      : args_(args),
        pool_(pool),
        queries_(args.q.shape[1]),
        keys_(args.k.shape[1]),
        head_size_(args.q.shape[2] / args.heads),
        heads_together_(args.key_heads == 0 ? 1 : args.heads / args.key_heads),
        ld_scores_(SumsPitch(RoundUp(keys_, kTileColumns))),
        ld_out_(SumsPitch(RoundUp(head_size_, kTileColumns))) {
    // Scores and what they are rounded to, of a block, in half of L2.
    const std::int64_t fitting = HostCaches().l2 / 2 / (6 * RoundUp(keys_, kTileColumns));
    block_ = std::clamp<std::int64_t>(fitting / kPanelRows * kPanelRows, kPanelRows, kMostQueries);
    const std::int64_t heads = args.q.shape[0] * args.heads, blocks = CeilDiv(queries_, block_);
    // Two tasks a thread, so that nobody waits long for the last one.
    parts_ = std::min(blocks, CeilDiv(2 * pool.num_threads(), heads));
    blocks_of_part_ = CeilDiv(blocks, parts_);
    parts_ = CeilDiv(blocks, blocks_of_part_);
  }

  void Run() {
    Carver one;
    Take(one);
    const std::int64_t bytes = one.used();
    const Scratch scratch(pool_.num_threads() * bytes, bytes <= kMostKept);
    pool_.ParallelFor(args_.q.shape[0] * args_.heads * parts_, [&](std::int64_t i, int worker) {
      Carver carver(scratch.data() + worker * bytes);
      Head(i / parts_ / args_.heads, i / parts_ % args_.heads, i % parts_, Take(carver));
    });
  }

 private:
  /// Of one worker. Factors of both products, and their results.
  struct Memory {
    TileMatrix keys;     ///< pairs: the right factor that contracts along a head's numbers
    TileMatrix values;   ///< row pairs: the one that contracts along the keys
    TileMatrix queries;  ///< stored
    TileMatrix powers;   ///< operand: probabilities before they are divided by their sum
    float* scores;       ///< [block_][ld_scores_]
    float* out;          ///< [block_][ld_out_]
    float* inverse_sums;
    const void** rows;  ///< of keys, values or queries, while they are packed
  };

  Memory Take(Carver& carver) const {
    const auto tiles = [&](TileMatrix matrix) {
      matrix.data = carver.Take<BFloat16>(matrix.size());
      return matrix;
    };
    Memory memory{};
    memory.keys = tiles(TileMatrix::Activations(nullptr, keys_, head_size_));
    memory.values = tiles(TileMatrix::RowPairs(nullptr, keys_, head_size_));
    memory.queries = tiles(TileMatrix::Activations(nullptr, block_, head_size_));
    memory.powers = tiles(TileMatrix::Activations(nullptr, block_, keys_));
    memory.scores = carver.Take<float>(block_ * ld_scores_);
    memory.out = carver.Take<float>(block_ * ld_out_);
    memory.inverse_sums = carver.Take<float>(block_);
    memory.rows = carver.Take<const void*>(std::max(keys_, block_));
    return memory;
  }

  void Head(std::int64_t batch, std::int64_t head, std::int64_t part, const Memory& memory) const {
    const std::int64_t column = head * head_size_, key_column = head / heads_together_ * head_size_;
    const HeadRows q{args_.q, batch, column}, k{args_.k, batch, key_column}, v{args_.v, batch, key_column};
    const float* const bias = args_.bias == nullptr ? nullptr : args_.bias + batch * keys_;
    const std::int64_t begin = part * blocks_of_part_ * block_, end = std::min(begin + blocks_of_part_ * block_, queries_);
    const std::int64_t needed = args_.causal ? keys_ - queries_ + end : keys_;
    Fetch(k, 0, std::min(needed, kRowsAhead));
    Fetch(v, 0, std::min(needed, kRowsAhead));
    Pack(k, 0, needed, &PackRowsArgs::pairs, memory.keys, memory.rows);
    Fetch(q, begin, std::min(block_, end - begin));
    Pack(v, 0, needed, &PackRowsArgs::row_pairs, memory.values, memory.rows);
    for (std::int64_t first = begin; first < end; first += block_) {
      const std::int64_t rows = std::min(block_, end - first);
      Pack(q, first, rows, &PackRowsArgs::stored, memory.queries, memory.rows);
      Fetch(q, first + rows, std::min(block_, end - first - rows));
      // Keys behind the last query's own are left out, in whole tiles.
      const std::int64_t before = keys_ - queries_ + first, seen = args_.causal ? before + rows : keys_;
      TileMatrix keys = memory.keys, values = memory.values, powers = memory.powers;
      keys.panels = CeilDiv(seen, kPanelRows);
      values.columns = powers.columns = CeilDiv(seen, kTileColumns);
      Multiply(memory.queries, keys, {rows, seen, head_size_}, memory.scores, ld_scores_);
      Softmax(rows, seen, args_.causal ? before + 1 : 0, bias, powers, memory);
      Multiply(powers, values, {rows, head_size_, seen}, memory.out, ld_out_);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t c = 0; c < head_size_; ++c) memory.out[i * ld_out_ + c] *= memory.inverse_sums[i];
      }
      StoreRowsArgs store;
      store.in = memory.out;
      store.ld = ld_out_;
      store.rows = rows;
      store.columns = head_size_;
      store.out = HeadRows{args_.out, batch, column}.Row(first);
      store.dtype = DType::kBFloat16;
      store.out_stride = args_.out.stride[1];
      kernels_.store_rows(store);
    }
    FinishStores();
  }

  /// Rows [first, first + count) of a head as tiles.
  void Pack(const HeadRows& head, std::int64_t first, std::int64_t count, TileMatrix PackRowsArgs::* order,
            const TileMatrix& tiles, const void** pointers) const {
    const FusedRange range(FusedStage::kPack, 0.0, 4.0 * static_cast<double>(count * head_size_));
    for (std::int64_t i = 0; i < count; ++i) pointers[i] = head.Row(first + i);
    PackRowsArgs pack;
    pack.rows = pointers;
    pack.dtype = DType::kBFloat16;
    pack.count = count;
    pack.columns = head_size_;
    pack.*order = tiles;
    pack.panels = RoundUp(count, order == &PackRowsArgs::row_pairs ? kTileColumns : kPanelRows) / kPanelRows;
    pack.tile_columns = CeilDiv(head_size_, kTileColumns);
    kernels_.pack_rows(pack);
  }

  /// Brings rows of a head to L2: they lie too far apart for the hardware to run ahead.
  void Fetch(const HeadRows& head, std::int64_t first, std::int64_t count) const {
    for (std::int64_t i = first; i < first + count; ++i) {
      for (std::int64_t c = 0; c < head_size_; c += kTileColumns) __builtin_prefetch(head.Row(i) + c, 0, 2);
    }
  }

  /// Of a product.
  struct Sizes {
    std::int64_t rows, columns, depth;
  };

  /// c[i][n] = sum over k: left[i][k] right[k][n].
  void Multiply(const TileMatrix& left, const TileMatrix& right, const Sizes& sizes, float* c, std::int64_t ldc) const {
    const FusedRange range(FusedStage::kGemm, 2.0 * static_cast<double>(sizes.rows * sizes.columns * sizes.depth), 0.0);
    const GradientSegment segment{left, right};
    GradientGemmArgs gemm;
    gemm.segments = {&segment, 1};
    gemm.panels = CeilDiv(sizes.rows, kPanelRows);
    gemm.c = c;
    gemm.ldc = ldc;
    kernels_.gradient_gemm(gemm);
  }

  /// Scores become powers, rounded to bf16 tiles. What divides them comes after the product: the largest power is 1 to the last
  /// bit, where probabilities that are equal would all be rounded in one direction.
  /// @param keys  of which the first row sees `first_sees`, or all where that is 0
  void Softmax(std::int64_t rows, std::int64_t keys, std::int64_t first_sees, const float* bias, const TileMatrix& powers,
               const Memory& memory) const {
    const FusedRange range(FusedStage::kSoftmax, 0.0, 6.0 * static_cast<double>(rows * keys));
    SoftmaxRowsArgs softmax;
    softmax.x = memory.scores;
    softmax.ld = ld_scores_;
    softmax.rows = rows;
    softmax.columns = keys;
    softmax.first_sees = first_sees;
    softmax.scale = args_.scale;
    softmax.bias = bias;
    softmax.powers = powers;
    softmax.inverse_sums = memory.inverse_sums;
    kernels_.fused.softmax_rows(softmax);
  }

  const AttentionArgs& args_;
  Pool& pool_;
  const std::int64_t queries_, keys_, head_size_, heads_together_, ld_scores_, ld_out_;
  const KernelTier& kernels_ = ChosenKernels();
  std::int64_t block_ = 0, parts_ = 0, blocks_of_part_ = 0;
};

}  // namespace

void Attention(const AttentionArgs& args, Pool& pool) {
  CheckThreeDimensions(args.q, "q");
  CheckThreeDimensions(args.k, "k");
  const std::int64_t batch = args.q.shape[0], queries = args.q.shape[1], keys = args.k.shape[1], columns = args.q.shape[2];
  if (args.heads < 1 || columns % args.heads != 0) {
    throw std::invalid_argument("heads is " + std::to_string(args.heads) + "; expected a divisor of q's " +
                                std::to_string(columns) + " columns");
  }
  const std::int64_t key_heads = args.key_heads == 0 ? args.heads : args.key_heads;
  if (key_heads < 1 || args.heads % key_heads != 0) {
    throw std::invalid_argument("key_heads is " + std::to_string(key_heads) + "; expected a divisor of " +
                                std::to_string(args.heads) + " heads");
  }
  if (args.causal) CheckCausal(queries, keys);
  const std::int64_t key_columns = columns / args.heads * key_heads;
  CheckRows(args.q, "q", batch, queries, columns);
  CheckRows(args.k, "k", batch, keys, key_columns);
  CheckRows(args.v, "v", batch, keys, key_columns);
  CheckRows(args.out, "out", batch, queries, columns);
  if (keys == 0) throw std::invalid_argument("k has no rows; expected one at least");
  if (batch == 0 || queries == 0 || columns == 0) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  AttentionRun(args, pool).Run();
}

}  // namespace moesaic::fused
