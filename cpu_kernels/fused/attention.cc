#include "cpu_kernels/fused/attention.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/attention_steps.h"
#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Queries of a block, at most.
constexpr std::int64_t kMostQueries = 64;
/// Bytes of a thread's scratch memory that stay for the next call, at most: very many keys take more.
constexpr std::int64_t kMostKept = 4 << 20;
/// Queries of a segment, at least, but for a row's last one: short sequences are computed together, with a mask.
constexpr std::int64_t kLeastQueries = 128;

/// One call of Attention(): the memory and the steps of its tasks.
class AttentionRun {
 public:
  AttentionRun(const AttentionArgs& args, Pool& pool)
      : args_(args),
        pool_(pool),
        head_size_(args.q.shape[2] / args.heads),
        heads_together_(HeadsTogether(args)),
        segments_(SegmentsOf(args)),
        ld_out_(SumsPitch(RoundUp(head_size_, kTileColumns))) {
    for (const Segment& segment : segments_) {
      keys_ = std::max(keys_, segment.keys);
      widest_ = std::max(widest_, Widest(segment));
    }
    ld_scores_ = SumsPitch(RoundUp(widest_, kTileColumns));
    // Scores and what they are rounded to, of a block, in half of L2.
    const std::int64_t fitting = HostL2Bytes() / 2 / (6 * RoundUp(widest_, kTileColumns));
    block_ = std::clamp<std::int64_t>(fitting / kPanelRows * kPanelRows, kPanelRows, kMostQueries);
    // Two tasks a thread at least, so that nobody waits long for the last one.
    const std::int64_t queries = args.q.shape[0] * args.q.shape[1] * args.heads;
    const std::int64_t queries_of_part = RoundUp(CeilDiv(queries, 2 * pool.num_threads()), block_);
    for (const Segment& segment : segments_) {
      for (std::int64_t head = 0; head < args.heads; ++head) {
        for (std::int64_t query = 0; query < segment.queries; query += queries_of_part) {
          tasks_.push_back({&segment, head, query, std::min(query + queries_of_part, segment.queries)});
        }
      }
    }
  }

  void Run() {
    Carver one;
    Take(one);
    const std::int64_t bytes = one.used();
    const Scratch scratch(pool_.num_threads() * bytes, bytes <= kMostKept);
    packed_.assign(static_cast<std::size_t>(pool_.num_threads()), {});
    pool_.ParallelFor(std::ssize(tasks_), [&](std::int64_t i, int worker) {
      Carver carver(scratch.data() + worker * bytes);
      Compute(tasks_[static_cast<std::size_t>(i)], Take(carver), packed_[static_cast<std::size_t>(worker)]);
    });
  }

 private:
  /// Queries of a head of a segment, [query, end).
  struct Task {
    const Segment* segment;
    std::int64_t head, query, end;
  };

  /// Of one worker. Factors of both products, and their results.
  struct Memory {
    TileMatrix keys;     ///< pairs: the right factor that contracts along a head's numbers
    TileMatrix values;   ///< row pairs: the one that contracts along the keys
    TileMatrix queries;  ///< stored
    TileMatrix powers;   ///< operand: probabilities before they are divided by their sum
    float* scores;       ///< [block_][ld_scores_]
    float* out;          ///< [block_][ld_out_]
    float* inverse_sums;
    std::int32_t* first_columns;  ///< where queries do not see all keys from the block's first one on
    const void** rows;            ///< of keys, values or queries, while they are packed
  };

  Memory Take(Carver& carver) const {
    Memory memory{};
    memory.keys = TakeTiles(carver, TileMatrix::Activations(nullptr, keys_, head_size_));
    memory.values = TakeTiles(carver, TileMatrix::RowPairs(nullptr, keys_, head_size_));
    memory.queries = TakeTiles(carver, TileMatrix::Activations(nullptr, block_, head_size_));
    memory.powers = TakeTiles(carver, TileMatrix::Activations(nullptr, block_, widest_));
    memory.scores = carver.Take<float>(block_ * ld_scores_);
    memory.out = carver.Take<float>(block_ * ld_out_);
    memory.inverse_sums = carver.Take<float>(block_);
    memory.first_columns = carver.Take<std::int32_t>(block_);
    memory.rows = carver.Take<const void*>(std::max(keys_, block_));
    return memory;
  }

  /// The keys and values that lie in a worker's memory: how many, and whose.
  struct Packed {
    const Segment* segment = nullptr;
    std::int64_t key_head = 0, count = 0;
  };

  void Compute(const Task& task, const Memory& memory, Packed& packed) const {
    const Segment& segment = *task.segment;
    const std::int64_t column = task.head * head_size_, key_head = task.head / heads_together_, end = task.end;
    const HeadRows q{args_.q, segment.batch, segment.query, column, head_size_};
    const HeadRows out{args_.out, segment.batch, segment.query, column, head_size_};
    // Whole tiles: what of a value that a query does not see passes through, NaN alone, does not depend on who packed it.
    const std::int64_t seen = segment.keys - segment.queries + end;
    const std::int64_t needed = args_.causal ? std::min(RoundUp(seen, kTileColumns), segment.keys) : segment.keys;
    q.Fetch(task.query, std::min(block_, end - task.query));
    if (packed.segment != &segment || packed.key_head != key_head || packed.count < needed) {
      packed = {&segment, key_head, needed};
      PackKeys(segment, key_head * head_size_, needed, memory);
    }
    PackRowsArgs stored;
    stored.stored = memory.queries;
    for (std::int64_t first = task.query; first < end; first += block_) {
      const std::int64_t rows = std::min(block_, end - first);
      q.Pack(kernels_, first, rows, stored, memory.rows);
      q.Fetch(first + rows, std::min(block_, end - first - rows));
      const Block block = KeysOf(segment, task.head, first, rows);
      TileMatrix queries = memory.queries, powers = memory.powers;
      queries.panels = powers.panels = CeilDiv(rows, kPanelRows);
      powers.columns = CeilDiv(block.keys, kTileColumns);
      const TileMatrix keys = FromPanel(memory.keys, block.key / kPanelRows, CeilDiv(block.keys, kPanelRows));
      const TileMatrix values = FromColumn(memory.values, block.key / kTileColumns, powers.columns);
      Multiply(kernels_, FusedStage::kGemm, queries, keys, Flops(rows, block.keys, head_size_), memory.scores, ld_scores_);
      Softmax(block, powers, memory);
      Multiply(kernels_, FusedStage::kGemm, powers, values, Flops(rows, head_size_, block.keys), memory.out, ld_out_);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t c = 0; c < head_size_; ++c) memory.out[i * ld_out_ + c] *= memory.inverse_sums[i];
      }
      out.Store(kernels_, memory.out, ld_out_, first, rows);
    }
  }

  /// Some queries of a head, and the keys that they see.
  struct Block {
    const Segment& segment;
    std::int64_t head, query, rows;
    std::int64_t key, keys;   ///< the first, and how many: those before and behind are left out, in whole tiles
    std::int64_t first_sees;  ///< of these keys the first query; 0: all queries see all
  };

  Block KeysOf(const Segment& segment, std::int64_t head, std::int64_t query, std::int64_t rows) const {
    const std::int64_t own = segment.keys - segment.queries + query, end = args_.causal ? own + rows : segment.keys;
    const std::int64_t key = segment.FirstKey(query, rows, args_.causal ? own : end - 1);
    return {segment, head, query, rows, key, end - key, args_.causal ? own + 1 - key : 0};
  }

  /// Keys that a block of queries sees, at most.
  std::int64_t Widest(const Segment& segment) const {
    if (segment.first_keys == nullptr) return segment.keys;
    std::int64_t most = 1;  // of one query
    for (std::int64_t i = 0; i < segment.queries; ++i) {
      const std::int64_t end = args_.causal ? segment.keys - segment.queries + i + 1 : segment.keys;
      most = std::max(most, end - std::max<std::int64_t>(segment.first_keys[i] - segment.key, 0));
    }
    return std::min(most + kMostQueries + kTileColumns, segment.keys);
  }

  void PackKeys(const Segment& segment, std::int64_t column, std::int64_t count, const Memory& memory) const {
    const HeadRows k{args_.k, segment.batch, segment.key, column, head_size_};
    const HeadRows v{args_.v, segment.batch, segment.key, column, head_size_};
    k.Fetch(0, std::min(count, kRowsAhead));
    v.Fetch(0, std::min(count, kRowsAhead));
    PackRowsArgs pairs, row_pairs;
    pairs.pairs = memory.keys;
    row_pairs.row_pairs = memory.values;
    k.Pack(kernels_, 0, count, pairs, memory.rows);
    v.Pack(kernels_, 0, count, row_pairs, memory.rows);
  }

  /// Scores become powers, rounded to bf16 tiles. What divides them comes after the product: the largest power is 1 to the last
  /// bit, where probabilities that are equal would all be rounded in one direction.
  void Softmax(const Block& block, const TileMatrix& powers, const Memory& memory) const {
    const FusedRange range(FusedStage::kSoftmax, 0.0, 6.0 * static_cast<double>(block.rows * block.keys));
    const Segment& segment = block.segment;
    SoftmaxRowsArgs softmax;
    softmax.x = memory.scores;
    softmax.ld = ld_scores_;
    softmax.rows = block.rows;
    softmax.columns = block.keys;
    softmax.first_sees = block.first_sees;
    if (segment.first_keys != nullptr) {
      for (std::int64_t i = 0; i < block.rows; ++i) {
        const std::int64_t first = segment.first_keys[block.query + i] - segment.key - block.key;
        memory.first_columns[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(first, 0, block.keys));
      }
      softmax.first_columns = memory.first_columns;
    }
    softmax.scale = args_.scale;
    if (args_.bias != nullptr) softmax.bias = args_.bias + segment.batch * args_.k.shape[1] + segment.key + block.key;
    softmax.powers = powers;
    softmax.inverse_sums = memory.inverse_sums;
    // Among those of all heads.
    const std::int64_t row = (segment.batch * args_.heads + block.head) * args_.q.shape[1] + segment.query + block.query;
    softmax.most = args_.most == nullptr ? nullptr : args_.most + row;
    kernels_.fused.softmax_rows(softmax);
    if (args_.inverse_sums != nullptr) std::copy_n(memory.inverse_sums, block.rows, args_.inverse_sums + row);
  }

  const AttentionArgs& args_;
  Pool& pool_;
  const std::int64_t head_size_, heads_together_;
  const std::vector<Segment> segments_;
  const std::int64_t ld_out_;
  const KernelTier& kernels_ = ChosenKernels();
  std::int64_t keys_ = 0;  ///< of a segment, at most
  std::int64_t widest_ = 0, ld_scores_ = 0, block_ = 0;
  std::vector<Task> tasks_;
  std::vector<Packed> packed_;  ///< of each worker
};

}  // namespace

std::vector<Segment> SegmentsOf(const AttentionArgs& args) {
  const std::int64_t queries = args.q.shape[1], keys = args.k.shape[1], before = keys - queries;
  std::vector<Segment> segments;
  for (std::int64_t b = 0; b < args.q.shape[0]; ++b) {
    const std::int32_t* const first_keys = args.first_keys == nullptr ? nullptr : args.first_keys + b * queries;
    // From the last query on: it begins a sequence if neither it nor any behind it sees a key before its own.
    std::vector<std::int64_t> begins;
    std::int64_t first = keys;
    for (std::int64_t t = queries - 1; args.causal && first_keys != nullptr && t > 0; --t) {
      first = std::min<std::int64_t>(first, first_keys[t]);
      if (first >= before + t) begins.push_back(t);
    }
    begins.push_back(queries);
    std::sort(begins.begin(), begins.end());
    std::int64_t query = 0, key = 0;
    for (const std::int64_t end : begins) {
      if (end < queries && end - query < kLeastQueries) continue;
      Segment segment{b, query, end - query, key, before + end - key, nullptr};
      const auto begins_later = [&](std::int32_t begin) { return begin > segment.key; };
      if (first_keys != nullptr && std::any_of(first_keys + query, first_keys + end, begins_later)) {
        segment.first_keys = first_keys + query;
      }
      segments.push_back(segment);
      query = end;
      key = before + end;
    }
  }
  return segments;
}

void CheckAttention(const AttentionArgs& args) {
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
}

void Attention(const AttentionArgs& args, Pool& pool) {
  CheckAttention(args);
  if (args.q.shape[0] == 0 || args.q.shape[1] == 0 || args.q.shape[2] == 0) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  AttentionRun(args, pool).Run();
}

}  // namespace moesaic::fused
