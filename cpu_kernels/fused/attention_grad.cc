#include "cpu_kernels/fused/attention_grad.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/attention_steps.h"
#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/scratch.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Queries and keys of a block. Its scores and their gradients, and the tiles of both, stay in L2.
constexpr std::int64_t kQueries = 256, kKeys = 128;
/// Keys of a block that not all of its queries see: half of what is computed there is for nothing.
constexpr std::int64_t kKeysOfDiagonal = 64;
/// Bytes of scratch memory that stay for the next call, at most.
constexpr std::int64_t kMostKept = 64 << 20;

TileMatrix FromPanel(TileMatrix tiles, std::int64_t panel, std::int64_t panels) {
  tiles.data = tiles.Tile(panel, 0);
  tiles.panels = panels;
  return tiles;
}

TileMatrix FromColumn(TileMatrix tiles, std::int64_t column, std::int64_t columns) {
  tiles.data = tiles.Tile(0, column);
  tiles.columns = columns;
  return tiles;
}

/// One call of AttentionGrad(): the memory and the steps of its tasks.
class AttentionGradRun {
 public:
  AttentionGradRun(const AttentionGradArgs& args, Pool& pool)
      : args_(args),
        forward_(args.forward),
        pool_(pool),
        queries_(forward_.q.shape[1]),
        keys_(forward_.k.shape[1]),
        head_size_(forward_.q.shape[2] / forward_.heads),
        heads_together_(HeadsTogether(forward_)),
        sums_of_part_(RoundUp(keys_, kPanelRows) * ld_),
        left_(static_cast<std::size_t>(forward_.q.shape[0] * forward_.heads / heads_together_), heads_together_),
        slot_of_(left_.size(), -1) {}

  void Run() {
    Carver one;
    Take(one);
    const std::int64_t heads = forward_.q.shape[0] * forward_.heads, groups = heads / heads_together_;
    // No more groups are begun and not done than threads are at work; a slot that was never taken costs no memory.
    const std::int64_t slots = std::min<std::int64_t>(pool_.num_threads(), groups);
    for (std::int64_t slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
    const std::int64_t all_slots = slots * heads_together_ * 2 * sums_of_part_ * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t bytes = all_slots + pool_.num_threads() * one.used();
    const Scratch scratch(bytes, bytes <= kMostKept);
    sums_ = reinterpret_cast<float*>(scratch.data());
    packed_.assign(static_cast<std::size_t>(pool_.num_threads()), -1);
    std::atomic<std::int64_t> next{0};
    pool_.ParallelFor(heads, [&](std::int64_t, int worker) {
      Carver carver(scratch.data() + all_slots + worker * one.used());
      // In their order, whichever thread comes: few groups are begun and not done.
      const std::int64_t head = next.fetch_add(1), group = head / heads_together_;
      const std::int64_t slot = Begin(group);
      Head(head, slot, Take(carver), packed_[static_cast<std::size_t>(worker)]);
      if (!End(group)) return;
      Merge(group, slot);
      const std::lock_guard lock(mutex_);
      free_.push_back(slot);
    });
  }

 private:
  /// Of one worker.
  struct Memory {
    TileMatrix keys, values;             ///< stored [S][D]
    TileMatrix keys_t;                   ///< operand [D][S]
    TileMatrix queries, d_out;           ///< pairs of a block [queries][D]
    TileMatrix queries_t, d_out_t;       ///< its row pairs
    TileMatrix power, d_scores;          ///< operand [keys][queries]
    TileMatrix d_scores_pairs;           ///< row pairs [keys][queries]
    float *scores, *d_power;             ///< [keys][ld_block_]
    float* d_queries;                    ///< [D][ld_block_]
    float* turned;                       ///< [16][ld_]
    float *most, *inverse_sums, *delta;  ///< [kQueries]
    const void** rows;
  };

  Memory Take(Carver& carver) const {
    const auto tiles = [&](TileMatrix matrix) {
      matrix.data = carver.Take<BFloat16>(matrix.size());
      return matrix;
    };
    const std::int64_t columns = RoundUp(head_size_, kTileColumns);
    Memory memory{};
    memory.keys = tiles(TileMatrix::Activations(nullptr, keys_, columns));
    memory.values = tiles(TileMatrix::Activations(nullptr, keys_, columns));
    memory.keys_t = tiles(TileMatrix::Activations(nullptr, columns, keys_));
    memory.queries = tiles(TileMatrix::Activations(nullptr, kQueries, columns));
    memory.d_out = tiles(TileMatrix::Activations(nullptr, kQueries, columns));
    memory.queries_t = tiles(TileMatrix::RowPairs(nullptr, kQueries, head_size_));
    memory.d_out_t = tiles(TileMatrix::RowPairs(nullptr, kQueries, head_size_));
    memory.power = tiles(TileMatrix::Activations(nullptr, kKeys, kQueries));
    memory.d_scores = tiles(TileMatrix::Activations(nullptr, kKeys, kQueries));
    memory.d_scores_pairs = tiles(TileMatrix::RowPairs(nullptr, kKeys, kQueries));
    memory.scores = carver.Take<float>(kKeys * kLdBlock);
    memory.d_power = carver.Take<float>(kKeys * kLdBlock);
    memory.d_queries = carver.Take<float>(columns * kLdBlock);
    memory.turned = carver.Take<float>(kPanelRows * ld_);
    memory.most = carver.Take<float>(kQueries);
    memory.inverse_sums = carver.Take<float>(kQueries);
    memory.delta = carver.Take<float>(kQueries);
    memory.rows = carver.Take<const void*>(std::max(keys_, kQueries));
    return memory;
  }

  /// The slot of a group, whose heads are done in any order.
  std::int64_t Begin(std::int64_t group) {
    const std::lock_guard lock(mutex_);
    std::int64_t& slot = slot_of_[static_cast<std::size_t>(group)];
    if (slot < 0) {
      slot = free_.back();
      free_.pop_back();
    }
    return slot;
  }

  /// Whether it was the last head of its group.
  bool End(std::int64_t group) {
    const std::lock_guard lock(mutex_);
    return --left_[static_cast<std::size_t>(group)] == 0;
  }

  /// Where the sums of a head for d_k (0) or d_v (1) go: [S][ld_].
  float* Sums(std::int64_t slot, std::int64_t head_of_group, int which) const {
    return sums_ + ((slot * heads_together_ + head_of_group) * 2 + which) * sums_of_part_;
  }

  /// Head `index` of all sequences.
  /// @param packed  the group whose keys and values lie in `memory`
  void Head(std::int64_t index, std::int64_t slot, const Memory& memory, std::int64_t& packed) const {
    const std::int64_t batch = index / forward_.heads, head = index % forward_.heads;
    const std::int64_t column = head * head_size_, key_column = head / heads_together_ * head_size_;
    HeadRows{forward_.q, batch, column, head_size_}.Fetch(0, std::min(kRowsAhead, queries_));
    if (packed != index / heads_together_) {
      packed = index / heads_together_;
      PackKeys(batch, key_column, memory);
    }
    for (std::int64_t first = 0; first < queries_; first += kQueries) {
      const std::int64_t count = std::min(kQueries, queries_ - first);
      PackQueries(batch, column, first, count, index * queries_ + first, memory);
      std::int64_t keys = 0;
      for (std::int64_t key = 0; key < keys_; key += keys) {
        // Causal, a key is seen by its own query and those behind it.
        const std::int64_t own = forward_.causal ? key - (keys_ - queries_) - first : -keys_;
        if (own >= count) break;
        keys = std::min(forward_.causal && own > -kKeys ? kKeysOfDiagonal : kKeys, keys_ - key);
        Block(batch, index % heads_together_, slot, {key, keys, first, count, own}, memory);
      }
      StoreQueries({args_.d_q, batch, column, head_size_}, first, count, memory);
    }
    FinishStores();
  }

  /// Keys and values; the keys once more, as the left factor of d_q.
  void PackKeys(std::int64_t batch, std::int64_t column, const Memory& memory) const {
    PackRowsArgs stored;
    stored.stored = memory.values;
    HeadRows{forward_.v, batch, column, head_size_}.Pack(kernels_, 0, keys_, stored, memory.rows);
    stored.stored = memory.keys;
    HeadRows{forward_.k, batch, column, head_size_}.Pack(kernels_, 0, keys_, stored, memory.rows);
    const FusedRange range(FusedStage::kPack, 0.0, 4.0 * static_cast<double>(keys_ * head_size_));
    for (std::int64_t c = 0; c < memory.keys.columns; ++c) {
      TransposePairsArgs transpose;
      transpose.pairs = memory.keys;
      transpose.stored = true;
      transpose.column = c;
      transpose.transposed = FromPanel(memory.keys_t, 2 * c, 2);
      kernels_.transpose_pairs(transpose);
    }
  }

  /// @param row  of the first query, among those of all heads
  void PackQueries(std::int64_t batch, std::int64_t column, std::int64_t first, std::int64_t count, std::int64_t row,
                   const Memory& memory) const {
    const HeadRows q{forward_.q, batch, column, head_size_}, d_out{args_.d_out, batch, column, head_size_};
    const HeadRows out{forward_.out, batch, column, head_size_};
    PackRowsArgs orders;
    orders.pairs = memory.queries;
    orders.row_pairs = memory.queries_t;
    d_out.Fetch(first, std::min(count, kRowsAhead));
    q.Pack(kernels_, first, count, orders, memory.rows);
    orders.pairs = memory.d_out;
    orders.row_pairs = memory.d_out_t;
    out.Fetch(first, count);
    d_out.Pack(kernels_, first, count, orders, memory.rows);
    q.Fetch(first + count, std::min(kRowsAhead, queries_ - first - count));
    const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 4.0 * static_cast<double>(count * head_size_));
    kernels_.fused.row_dots({d_out.Row(first), args_.d_out.stride[1], out.Row(first), forward_.out.stride[1], count, head_size_,
                             forward_.scale, memory.delta});
    std::copy_n(forward_.most + row, count, memory.most);
    std::copy_n(forward_.inverse_sums + row, count, memory.inverse_sums);
    std::fill(memory.most + count, memory.most + kQueries, std::numeric_limits<float>::infinity());
    std::fill(memory.inverse_sums + count, memory.inverse_sums + kQueries, 0.0f);
    std::fill(memory.delta + count, memory.delta + kQueries, 0.0f);
  }

  struct Part {
    std::int64_t key, keys;     ///< the first, and how many
    std::int64_t query, count;  ///< the first, and how many
    std::int64_t own;           ///< which of the queries sees the first key; those before it do not
  };

  /// What some queries and some keys add to all sums.
  void Block(std::int64_t batch, std::int64_t head_of_group, std::int64_t slot, const Part& block, const Memory& memory) const {
    const std::int64_t key = block.key, keys = block.keys;
    // Queries that see none of the keys are left out, in whole tiles.
    const std::int64_t skipped = std::max<std::int64_t>(block.own, 0) / kTileColumns * kTileColumns;
    const std::int64_t count = block.count - skipped, columns = CeilDiv(count, kTileColumns);
    const std::int64_t query_panels = columns * (kTileColumns / kPanelRows), key_panels = CeilDiv(keys, kPanelRows);
    const double flops = Flops(keys, count, head_size_);
    const TileMatrix queries = FromPanel(memory.queries, skipped / kPanelRows, query_panels);
    const TileMatrix d_out = FromPanel(memory.d_out, skipped / kPanelRows, query_panels);
    const TileMatrix queries_t = FromColumn(memory.queries_t, skipped / kTileColumns, columns);
    const TileMatrix d_out_t = FromColumn(memory.d_out_t, skipped / kTileColumns, columns);
    TileMatrix power = FromPanel(memory.power, 0, key_panels), d_scores = FromPanel(memory.d_scores, 0, key_panels);
    TileMatrix d_scores_pairs = FromPanel(memory.d_scores_pairs, 0, query_panels);
    power.columns = d_scores.columns = columns;
    d_scores_pairs.columns = CeilDiv(keys, kTileColumns);
    constexpr FusedStage kStage = FusedStage::kBackwardGemm;

    Multiply(kernels_, kStage, FromPanel(memory.keys, key / kPanelRows, key_panels), queries, flops, memory.scores, kLdBlock);
    Multiply(kernels_, kStage, FromPanel(memory.values, key / kPanelRows, key_panels), d_out, flops, memory.d_power, kLdBlock);
    SoftmaxGradArgs softmax;
    softmax.x = memory.scores;
    softmax.d_power = memory.d_power;
    softmax.ld = kLdBlock;
    softmax.rows = keys;
    softmax.columns = columns * kTileColumns;
    softmax.scale = forward_.scale;
    softmax.bias = forward_.bias == nullptr ? nullptr : forward_.bias + batch * keys_ + key;
    softmax.most = memory.most + skipped;
    softmax.inverse_sums = memory.inverse_sums + skipped;
    softmax.delta = memory.delta + skipped;
    softmax.first = std::max(block.own - skipped, -keys);
    softmax.power = power;
    softmax.d_x = d_scores;
    softmax.d_x_pairs = d_scores_pairs;
    {
      const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 14.0 * static_cast<double>(keys * count));
      kernels_.fused.softmax_grad(softmax);
    }
    // Queries of a block before this one have seen these keys.
    const bool seen = block.query > 0 && block.own < 0;
    Multiply(kernels_, kStage, power, d_out_t, flops, Sums(slot, head_of_group, 1) + key * ld_, ld_, seen);
    Multiply(kernels_, kStage, d_scores, queries_t, flops, Sums(slot, head_of_group, 0) + key * ld_, ld_, seen);
    Multiply(kernels_, kStage, FromColumn(memory.keys_t, key / kTileColumns, d_scores_pairs.columns), d_scores_pairs, flops,
             memory.d_queries + skipped, kLdBlock, key > 0);
  }

  /// Their gradients, which lie transposed.
  void StoreQueries(const HeadRows& d_q, std::int64_t first, std::int64_t count, const Memory& memory) const {
    const FusedRange range(FusedStage::kBackwardGemm, 0.0, 6.0 * static_cast<double>(count * head_size_));
    for (std::int64_t i = 0; i < count; i += kPanelRows) {
      kernels_.fused.turn_panel({memory.d_queries + i, kLdBlock, RoundUp(head_size_, kPanelRows), memory.turned, ld_});
      d_q.Store(kernels_, memory.turned, ld_, first + i, std::min(kPanelRows, count - i));
    }
  }

  /// The sums of a group's heads, added up in their order.
  void Merge(std::int64_t group, std::int64_t slot) const {
    const FusedRange range(FusedStage::kBackwardGemm, 0.0,
                           (8.0 * static_cast<double>(heads_together_) + 4.0) * static_cast<double>(keys_ * head_size_));
    const std::int64_t key_heads = forward_.heads / heads_together_;
    const std::int64_t batch = group / key_heads, column = group % key_heads * head_size_;
    for (const int which : {0, 1}) {
      float* const total = Sums(slot, 0, which);
      for (std::int64_t head = 1; head < heads_together_; ++head) {
        const float* const sums = Sums(slot, head, which);
        for (std::int64_t i = 0; i < keys_ * ld_; ++i) total[i] += sums[i];
      }
      HeadRows{which == 0 ? args_.d_k : args_.d_v, batch, column, head_size_}.Store(kernels_, total, ld_, 0, keys_);
    }
    FinishStores();
  }

  static constexpr std::int64_t kLdBlock = SumsPitch(kQueries);

  const AttentionGradArgs& args_;
  const AttentionArgs& forward_;
  Pool& pool_;
  const std::int64_t queries_, keys_, head_size_, heads_together_;
  const std::int64_t ld_ = SumsPitch(RoundUp(head_size_, kPanelRows));  ///< of d_k's and d_v's sums
  const std::int64_t sums_of_part_;
  const KernelTier& kernels_ = ChosenKernels();
  float* sums_ = nullptr;
  std::vector<std::int64_t> packed_;   ///< of each worker: the group whose keys and values it has packed; -1: none
  std::mutex mutex_;                   ///< of all below
  std::vector<std::int64_t> left_;     ///< heads of each group that are not done
  std::vector<std::int64_t> slot_of_;  ///< of each group; -1: not begun
  std::vector<std::int64_t> free_;     ///< slots
};

}  // namespace

void AttentionGrad(const AttentionGradArgs& args, Pool& pool) {
  const AttentionArgs& forward = args.forward;
  Check(forward);
  const std::int64_t batch = forward.q.shape[0], queries = forward.q.shape[1], keys = forward.k.shape[1];
  CheckRows(args.d_out, "d_out", batch, queries, forward.q.shape[2]);
  CheckRows(args.d_q, "d_q", batch, queries, forward.q.shape[2]);
  CheckRows(args.d_k, "d_k", batch, keys, forward.k.shape[2]);
  CheckRows(args.d_v, "d_v", batch, keys, forward.k.shape[2]);
  if (forward.most == nullptr || forward.inverse_sums == nullptr) {
    throw std::invalid_argument("forward has no most or no inverse_sums; expected those that Attention() wrote");
  }
  if (queries == 0) throw std::invalid_argument("q has no rows; expected one at least");
  if (batch == 0 || forward.q.shape[2] == 0) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  AttentionGradRun(args, pool).Run();
}

}  // namespace moesaic::fused
