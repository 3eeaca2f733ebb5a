#include "cpu_kernels/fused/attention_grad.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cpu_kernels/fused/attention_steps.h"
#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/scratch.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Queries and keys of a block: scores, their gradients and the tiles of both take 480 KB.
constexpr std::int64_t kQueries = 256, kKeys = 128;
/// Keys of a block that not all of its queries see: half of what is computed there is for nothing.
constexpr std::int64_t kKeysOfDiagonal = 64;

/// One call of AttentionGrad(): the memory and the steps of its tasks. A group is the heads of queries that share keys.
class AttentionGradRun {
 public:
  AttentionGradRun(const AttentionGradArgs& args, Pool& pool)
      : args_(args),
        forward_(args.forward),
        pool_(pool),
        segments_(SegmentsOf(forward_)),
        keys_(MostKeys(segments_)),
        head_size_(forward_.q.shape[2] / forward_.heads),
        heads_together_(HeadsTogether(forward_)),
        sums_of_head_(RoundUp(keys_, kPanelRows) * ld_),
        heads_left_(static_cast<std::size_t>(std::ssize(segments_) * forward_.heads / heads_together_), heads_together_),
        slot_of_(heads_left_.size(), -1) {}

  void Run() {
    Carver one;
    Take(one);
    const std::int64_t threads = pool_.num_threads(), heads = std::ssize(segments_) * forward_.heads;
    // Heads are taken in their order. So of the groups that are begun and not done, each but the last begun has a thread at
    // work, and whoever begins another is one more: slots for as many as threads are enough. Most are never taken, and cost no
    // memory then.
    const std::int64_t slots = std::min(threads, heads / heads_together_);
    const std::int64_t slot_bytes = heads_together_ * 2 * sums_of_head_ * static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t slot = slots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
    const std::int64_t touched = std::min(slots, threads / heads_together_ + 2) * slot_bytes + threads * one.used();
    const Scratch scratch(slots * slot_bytes + threads * one.used(), IsKept(touched, threads));
    sums_ = reinterpret_cast<float*>(scratch.data());
    packed_.assign(static_cast<std::size_t>(threads), -1);
    std::atomic<std::int64_t> next{0};
    pool_.ParallelFor(heads, [&](std::int64_t, int worker) {
      Carver carver(scratch.data() + slots * slot_bytes + worker * one.used());
      const std::int64_t head = next.fetch_add(1), group = head / heads_together_;
      const std::int64_t slot = Begin(group);
      Head(head, slot, Take(carver), packed_[static_cast<std::size_t>(worker)]);
      if (!End(group)) return;
      Merge(group, slot);
      const std::lock_guard lock(mutex_);
      free_slots_.push_back(slot);
    });
  }

 private:
  /// Of one worker.
  struct Memory {
    TileMatrix keys, values;             ///< stored [S][D]
    TileMatrix keys_t;                   ///< operand [D][S]
    TileMatrix queries, d_out;           ///< pairs of a block [queries][D]
    TileMatrix query_rows, d_out_rows;   ///< its row pairs
    TileMatrix probabilities, d_scores;  ///< operand [keys][queries]
    TileMatrix d_score_pairs;            ///< row pairs [keys][queries]
    float *scores, *d_probabilities;     ///< [keys][kLdBlock]
    float* d_queries;                    ///< [D][kLdBlock]
    float* turned;                       ///< [16][ld_]
    float* delta;                        ///< [kQueries]
    std::int32_t* first_rows;            ///< [kQueries]
    const void** rows;
  };

  Memory Take(Carver& carver) const {
    const std::int64_t columns = RoundUp(head_size_, kTileColumns);
    Memory memory{};
    memory.keys = TakeTiles(carver, TileMatrix::Activations(nullptr, keys_, columns));
    memory.values = TakeTiles(carver, TileMatrix::Activations(nullptr, keys_, columns));
    memory.keys_t = TakeTiles(carver, TileMatrix::Activations(nullptr, columns, keys_));
    memory.queries = TakeTiles(carver, TileMatrix::Activations(nullptr, kQueries, columns));
    memory.d_out = TakeTiles(carver, TileMatrix::Activations(nullptr, kQueries, columns));
    memory.query_rows = TakeTiles(carver, TileMatrix::RowPairs(nullptr, kQueries, head_size_));
    memory.d_out_rows = TakeTiles(carver, TileMatrix::RowPairs(nullptr, kQueries, head_size_));
    memory.probabilities = TakeTiles(carver, TileMatrix::Activations(nullptr, kKeys, kQueries));
    memory.d_scores = TakeTiles(carver, TileMatrix::Activations(nullptr, kKeys, kQueries));
    memory.d_score_pairs = TakeTiles(carver, TileMatrix::RowPairs(nullptr, kKeys, kQueries));
    memory.scores = carver.Take<float>(kKeys * kLdBlock);
    memory.d_probabilities = carver.Take<float>(kKeys * kLdBlock);
    memory.d_queries = carver.Take<float>(columns * kLdBlock);
    memory.turned = carver.Take<float>(kPanelRows * ld_);
    memory.delta = carver.Take<float>(kQueries);
    memory.first_rows = carver.Take<std::int32_t>(kQueries);
    memory.rows = carver.Take<const void*>(std::max(keys_, kQueries));
    return memory;
  }

  /// The slot of a group, which its first head takes, whichever comes first.
  std::int64_t Begin(std::int64_t group) {
    const std::lock_guard lock(mutex_);
    std::int64_t& slot = slot_of_[static_cast<std::size_t>(group)];
    if (slot < 0) {
      slot = free_slots_.back();
      free_slots_.pop_back();
    }
    return slot;
  }

  /// Whether it was the last head of its group.
  bool End(std::int64_t group) {
    const std::lock_guard lock(mutex_);
    return --heads_left_[static_cast<std::size_t>(group)] == 0;
  }

  /// Where the sums of a head go: [S][ld_] each.
  struct Sums {
    float *d_k, *d_v;
  };

  Sums SumsOf(std::int64_t slot, std::int64_t head_of_group) const {
    float* const d_k = sums_ + (slot * heads_together_ + head_of_group) * 2 * sums_of_head_;
    return {d_k, d_k + sums_of_head_};
  }

  const Segment& SegmentOf(std::int64_t head) const { return segments_[static_cast<std::size_t>(head / forward_.heads)]; }

  /// The rows of a head: of queries.
  HeadRows Rows(const TensorView& view, std::int64_t index) const {
    const Segment& segment = SegmentOf(index);
    return {view, segment.batch, segment.query, index % forward_.heads * head_size_, head_size_};
  }

  /// Of the keys of a group.
  HeadRows KeyRows(const TensorView& view, std::int64_t group) const {
    const Segment& segment = SegmentOf(group * heads_together_);
    return {view, segment.batch, segment.key, group % (forward_.heads / heads_together_) * head_size_, head_size_};
  }

  /// Head `index` of all segments.
  /// @param packed  the group whose keys and values lie in `memory`: few threads take several heads of one
  void Head(std::int64_t index, std::int64_t slot, const Memory& memory, std::int64_t& packed) const {
    const Segment& segment = SegmentOf(index);
    const HeadRows q = Rows(forward_.q, index);
    q.Fetch(0, std::min(kRowsAhead, segment.queries));
    if (packed != index / heads_together_) PackKeys(index / heads_together_, memory);
    packed = index / heads_together_;
    const Sums sums = SumsOf(slot, index % heads_together_);
    const bool masked = segment.first_keys != nullptr;
    for (float* const sum : {sums.d_k, sums.d_v}) {
      if (masked) std::fill_n(sum, RoundUp(segment.keys, kPanelRows) * ld_, 0.0f);
    }
    for (std::int64_t first = 0; first < segment.queries; first += kQueries) {
      const std::int64_t count = std::min(kQueries, segment.queries - first);
      PackQueries(index, first, count, memory);
      if (masked) std::fill_n(memory.d_queries, RoundUp(head_size_, kTileColumns) * kLdBlock, 0.0f);
      std::int64_t keys = 0;
      for (std::int64_t key = segment.FirstKey(first, count, segment.keys - 1); key < segment.keys; key += keys) {
        // Causal, a key is seen by its own query and those behind it.
        const std::int64_t diagonal = forward_.causal ? key - (segment.keys - segment.queries) - first : -segment.keys;
        if (diagonal >= count) break;
        keys = std::min(forward_.causal && diagonal > -kKeys ? kKeysOfDiagonal : kKeys, segment.keys - key);
        const std::int64_t end = LastThatSees(segment, first, count, key + keys);
        if (end > diagonal && end > 0) AddBlock(index, {key, keys, first, end, diagonal}, sums, memory);
      }
      StoreQueries(Rows(args_.d_q, index), first, count, memory);
    }
  }

  /// One behind the last of some queries that sees a key before `end`.
  static std::int64_t LastThatSees(const Segment& segment, std::int64_t query, std::int64_t count, std::int64_t end) {
    if (segment.first_keys == nullptr) return count;
    while (count > 0 && segment.first_keys[query + count - 1] >= segment.key + end) --count;
    return count;
  }

  /// Keys and values; the keys once more, as the left factor of d_q.
  void PackKeys(std::int64_t group, const Memory& memory) const {
    const std::int64_t count = SegmentOf(group * heads_together_).keys;
    PackRowsArgs stored;
    stored.stored = memory.values;
    KeyRows(forward_.v, group).Pack(kernels_, 0, count, stored, memory.rows);
    stored.stored = memory.keys;
    KeyRows(forward_.k, group).Pack(kernels_, 0, count, stored, memory.rows);
    const FusedRange range(FusedStage::kPack, 0.0, 4.0 * static_cast<double>(count * head_size_));
    for (std::int64_t c = 0; c < memory.keys.columns; ++c) {
      TransposePairsArgs transpose;
      transpose.pairs = FromPanel(memory.keys, 0, CeilDiv(count, kPanelRows));
      transpose.stored = true;
      transpose.column = c;
      transpose.transposed = FromPanel(memory.keys_t, 2 * c, 2);
      transpose.transposed.columns = CeilDiv(count, kTileColumns);
      kernels_.transpose_pairs(transpose);
    }
  }

  void PackQueries(std::int64_t index, std::int64_t first, std::int64_t count, const Memory& memory) const {
    const HeadRows q = Rows(forward_.q, index), d_out = Rows(args_.d_out, index), out = Rows(forward_.out, index);
    PackRowsArgs orders;
    orders.pairs = memory.queries;
    orders.row_pairs = memory.query_rows;
    d_out.Fetch(first, std::min(count, kRowsAhead));
    q.Pack(kernels_, first, count, orders, memory.rows);
    orders.pairs = memory.d_out;
    orders.row_pairs = memory.d_out_rows;
    out.Fetch(first, count);
    d_out.Pack(kernels_, first, count, orders, memory.rows);
    q.Fetch(first + count, std::min(kRowsAhead, SegmentOf(index).queries - first - count));
    const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 4.0 * static_cast<double>(count * head_size_));
    kernels_.fused.row_dots({d_out.Row(first), args_.d_out.stride[1], out.Row(first), forward_.out.stride[1], count, head_size_,
                             forward_.scale, memory.delta});
  }

  struct Block {
    std::int64_t key, keys;       ///< the first, and how many
    std::int64_t query, queries;  ///< the first, and how many
    std::int64_t diagonal;        ///< which of the queries sees the first key; those before it do not
  };

  /// What some queries and some keys of a head add to all sums.
  void AddBlock(std::int64_t index, const Block& block, const Sums& sums, const Memory& memory) const {
    // Queries that see none of the keys are left out, in whole tiles.
    const std::int64_t skipped = std::max<std::int64_t>(block.diagonal, 0) / kTileColumns * kTileColumns;
    const std::int64_t count = block.queries - skipped, columns = CeilDiv(count, kTileColumns);
    const std::int64_t query_panels = columns * (kTileColumns / kPanelRows), key_panels = CeilDiv(block.keys, kPanelRows);
    const TileMatrix queries = FromPanel(memory.queries, skipped / kPanelRows, query_panels);
    const TileMatrix d_out = FromPanel(memory.d_out, skipped / kPanelRows, query_panels);
    const TileMatrix query_rows = FromColumn(memory.query_rows, skipped / kTileColumns, columns);
    const TileMatrix d_out_rows = FromColumn(memory.d_out_rows, skipped / kTileColumns, columns);
    const TileMatrix keys = FromPanel(memory.keys, block.key / kPanelRows, key_panels);
    const TileMatrix values = FromPanel(memory.values, block.key / kPanelRows, key_panels);
    const TileMatrix keys_t = FromColumn(memory.keys_t, block.key / kTileColumns, CeilDiv(block.keys, kTileColumns));
    TileMatrix probabilities = FromPanel(memory.probabilities, 0, key_panels);
    TileMatrix d_scores = FromPanel(memory.d_scores, 0, key_panels);
    TileMatrix d_score_pairs = FromPanel(memory.d_score_pairs, 0, query_panels);
    probabilities.columns = d_scores.columns = columns;
    d_score_pairs.columns = keys_t.columns;

    const auto multiply = [&](const TileMatrix& left, const TileMatrix& right, float* c, std::int64_t ldc, bool accumulate) {
      Multiply(kernels_, FusedStage::kBackwardGemm, left, right, Flops(block.keys, count, head_size_), c, ldc, accumulate);
    };
    multiply(keys, queries, memory.scores, kLdBlock, false);
    multiply(values, d_out, memory.d_probabilities, kLdBlock, false);
    SoftmaxGradArgs softmax;
    softmax.x = memory.scores;
    softmax.d_probability = memory.d_probabilities;
    softmax.ld = kLdBlock;
    softmax.rows = block.keys;
    softmax.columns = count;
    softmax.scale = forward_.scale;
    const Segment& segment = SegmentOf(index);
    if (forward_.bias != nullptr) {
      softmax.bias = forward_.bias + segment.batch * forward_.k.shape[1] + segment.key + block.key;
    }
    // Among those of all heads.
    const std::int64_t head = segment.batch * forward_.heads + index % forward_.heads;
    const std::int64_t row = head * forward_.q.shape[1] + segment.query + block.query + skipped;
    softmax.most = args_.most + row;
    softmax.inverse_sums = args_.inverse_sums + row;
    softmax.delta = memory.delta + skipped;
    softmax.diagonal = block.diagonal - skipped;
    softmax.first_rows = FirstRows(segment, block, skipped, memory);
    softmax.probability = probabilities;
    softmax.d_x = d_scores;
    softmax.d_x_pairs = d_score_pairs;
    {
      const FusedRange range(FusedStage::kBackwardSoftmax, 0.0, 14.0 * static_cast<double>(block.keys * count));
      kernels_.fused.softmax_grad(softmax);
    }
    // Queries of a block before this one have seen these keys; or all sums are 0 at first.
    const bool added = segment.first_keys != nullptr, seen = added || (block.query > 0 && block.diagonal < 0);
    multiply(probabilities, d_out_rows, sums.d_v + block.key * ld_, ld_, seen);
    multiply(d_scores, query_rows, sums.d_k + block.key * ld_, ld_, seen);
    multiply(keys_t, d_score_pairs, memory.d_queries + skipped, kLdBlock, added || block.key > 0);
  }

  /// Of the block's queries but those left out: the first row of it that each sees; null where all see all.
  static const std::int32_t* FirstRows(const Segment& segment, const Block& block, std::int64_t skipped, const Memory& memory) {
    if (segment.first_keys == nullptr) return nullptr;
    const std::int32_t* const keys = segment.first_keys + block.query;
    const std::int64_t first = segment.key + block.key;
    if (*std::max_element(keys + skipped, keys + block.queries) <= first) return nullptr;
    for (std::int64_t i = skipped; i < block.queries; ++i) {
      memory.first_rows[i] = static_cast<std::int32_t>(std::max<std::int64_t>(keys[i] - first, 0));
    }
    return memory.first_rows + skipped;
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
    const std::int64_t keys = SegmentOf(group * heads_together_).keys;
    const FusedRange range(FusedStage::kBackwardGemm, 0.0,
                           (8.0 * static_cast<double>(heads_together_) + 4.0) * static_cast<double>(keys * head_size_));
    const Sums total = SumsOf(slot, 0);
    for (std::int64_t head = 1; head < heads_together_; ++head) {
      const Sums sums = SumsOf(slot, head);
      Add(sums.d_k, total.d_k, keys);
      Add(sums.d_v, total.d_v, keys);
    }
    KeyRows(args_.d_k, group).Store(kernels_, total.d_k, ld_, 0, keys);
    KeyRows(args_.d_v, group).Store(kernels_, total.d_v, ld_, 0, keys);
  }

  void Add(const float* sums, float* total, std::int64_t keys) const {
    for (std::int64_t s = 0; s < keys; ++s) {
      for (std::int64_t c = s * ld_; c < s * ld_ + head_size_; ++c) total[c] += sums[c];
    }
  }

  static std::int64_t MostKeys(const std::vector<Segment>& segments) {
    std::int64_t keys = 0;
    for (const Segment& segment : segments) keys = std::max(keys, segment.keys);
    return keys;
  }

  static constexpr std::int64_t kLdBlock = SumsPitch(kQueries);

  const AttentionGradArgs& args_;
  const AttentionArgs& forward_;
  Pool& pool_;
  const std::vector<Segment> segments_;
  const std::int64_t keys_;  ///< of a segment, at most
  const std::int64_t head_size_, heads_together_;
  const std::int64_t ld_ = SumsPitch(RoundUp(head_size_, kPanelRows));  ///< of d_k's and d_v's sums
  const std::int64_t sums_of_head_;
  const KernelTier& kernels_ = ChosenKernels();
  float* sums_ = nullptr;
  std::vector<std::int64_t> packed_;      ///< of each worker, -1: none
  std::mutex mutex_;                      ///< of all below
  std::vector<std::int64_t> heads_left_;  ///< of each group, those that are not done
  std::vector<std::int64_t> slot_of_;     ///< of each group; -1: not begun
  std::vector<std::int64_t> free_slots_;
};

}  // namespace

void AttentionGrad(const AttentionGradArgs& args, Pool& pool) {
  const AttentionArgs& forward = args.forward;
  CheckAttention(forward);
  const std::int64_t batch = forward.q.shape[0], queries = forward.q.shape[1], keys = forward.k.shape[1];
  CheckRows(args.d_out, "d_out", batch, queries, forward.q.shape[2]);
  CheckRows(args.d_q, "d_q", batch, queries, forward.q.shape[2]);
  CheckRows(args.d_k, "d_k", batch, keys, forward.k.shape[2]);
  CheckRows(args.d_v, "d_v", batch, keys, forward.k.shape[2]);
  if (queries == 0) throw std::invalid_argument("q has no rows; expected one at least");
  if (batch == 0 || forward.q.shape[2] == 0) return;
  if (args.most == nullptr || args.inverse_sums == nullptr) {
    throw std::invalid_argument("most or inverse_sums is null; expected what Attention() wrote");
  }
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  AttentionGradRun(args, pool).Run();
}

}  // namespace moesaic::fused
