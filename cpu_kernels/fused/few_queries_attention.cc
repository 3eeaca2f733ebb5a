#include "cpu_kernels/fused/few_queries_attention.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/kernels.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Bytes of scratch memory that stay for the next call, at most, for each thread: very many keys take more.
constexpr std::int64_t kMostKept = 4 << 20;

BFloat16* RowAt(const TensorView& view, std::int64_t head, std::int64_t row) {
  return static_cast<BFloat16*>(view.data) + head * view.stride[0] + row * view.stride[1];
}

/// One call of FewQueriesAttention(): the memory and the steps of its tasks. A task takes kKeysTogether keys of a head of keys,
/// and all queries of the heads that share them.
class FewQueriesRun {
 public:
  FewQueriesRun(const FewQueriesAttentionArgs& args, Pool& pool)
      : args_(args),
        pool_(pool),
        queries_(args.q.shape[1]),
        keys_(args.k.shape[1]),
        size_(args.q.shape[2]),
        key_heads_(args.k.shape[0] / args.out.shape[0]),
        heads_together_(args.q.shape[0] / args.k.shape[0]),
        rows_(heads_together_ * queries_),
        parts_(CeilDiv(keys_, kKeysTogether)),
        left_(static_cast<std::size_t>(args.k.shape[0])) {}

  void Run() {
    Carver of_worker, of_all;
    Take(of_worker);
    TakeSums(of_all);
    const std::int64_t worker_bytes = of_worker.used(), bytes = pool_.num_threads() * worker_bytes + of_all.used();
    const Scratch scratch(bytes, bytes <= kMostKept * pool_.num_threads());
    Carver shared(scratch.data() + pool_.num_threads() * worker_bytes);
    TakeSums(shared);
    for (std::atomic<std::int64_t>& left : left_) left.store(parts_, std::memory_order_relaxed);
    pool_.ParallelFor(args_.k.shape[0] * parts_, [&](std::int64_t i, int worker) {
      Carver carver(scratch.data() + worker * worker_bytes);
      const Memory memory = Take(carver);
      const std::int64_t group = i / parts_;
      Attend(group, i % parts_, memory);
      if (left_[static_cast<std::size_t>(group)].fetch_sub(1, std::memory_order_acq_rel) == 1) Merge(group, memory);
    });
  }

 private:
  /// Of one worker.
  struct Memory {
    const BFloat16** q;  ///< [rows_]
    BFloat16** to;       ///< [rows_]
    std::int64_t* seen;  ///< [rows_]
    float* scratch;
  };

  Memory Take(Carver& carver) const {
    return {carver.Take<const BFloat16*>(rows_), carver.Take<BFloat16*>(rows_), carver.Take<std::int64_t>(rows_),
            carver.Take<float>(AttendFewScratch(size_))};
  }

  void TakeSums(Carver& carver) {
    const std::int64_t rows = args_.k.shape[0] * parts_ * rows_;
    most_ = carver.Take<float>(rows);
    sums_ = carver.Take<float>(rows);
    out_ = carver.Take<float>(rows * size_);
  }

  /// Keys from the `part`-th kKeysTogether on.
  void Attend(std::int64_t group, std::int64_t part, const Memory& memory) const {
    const std::int64_t first = part * kKeysTogether, keys = std::min(kKeysTogether, keys_ - first);
    const FusedRange range(FusedStage::kFewQueries, 4.0 * static_cast<double>(rows_ * keys * size_),
                           4.0 * static_cast<double>(keys * size_));
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t query = r % queries_;
      memory.q[r] = RowAt(args_.q, group * heads_together_ + r / queries_, query);
      const std::int64_t seen = args_.causal ? keys_ - queries_ + query + 1 : keys_;
      memory.seen[r] = std::clamp<std::int64_t>(seen - first, 0, keys);
    }
    const std::int64_t at = (group * parts_ + part) * rows_;
    AttendFewArgs attend;
    attend.q = memory.q;
    attend.rows = rows_;
    attend.size = size_;
    attend.scale = args_.scale;
    attend.k = RowAt(args_.k, group, first);
    attend.k_stride = args_.k.stride[1];
    attend.v = RowAt(args_.v, group, first);
    attend.v_stride = args_.v.stride[1];
    attend.keys = keys;
    attend.bias = args_.bias == nullptr ? nullptr : args_.bias + group / key_heads_ * keys_ + first;
    attend.seen = memory.seen;
    attend.scratch = memory.scratch;
    attend.most = most_ + at;
    attend.sums = sums_ + at;
    attend.out = out_ + at * size_;
    kernels_.fused.attend_few(attend);
  }

  void Merge(std::int64_t group, const Memory& memory) const {
    const FusedRange range(FusedStage::kFewQueries, 0.0, 4.0 * static_cast<double>(parts_ * rows_ * size_));
    const std::int64_t batch = group / key_heads_, first_head = group % key_heads_ * heads_together_;
    for (std::int64_t r = 0; r < rows_; ++r) {
      memory.to[r] = RowAt(args_.out, batch, r % queries_) + (first_head + r / queries_) * size_;
    }
    const std::int64_t at = group * parts_ * rows_;
    MergeAttendedArgs merge;
    merge.parts = parts_;
    merge.rows = rows_;
    merge.size = size_;
    merge.most = most_ + at;
    merge.sums = sums_ + at;
    merge.out = out_ + at * size_;
    merge.to = memory.to;
    kernels_.fused.merge_attended(merge);
  }

  const FewQueriesAttentionArgs& args_;
  Pool& pool_;
  const std::int64_t queries_, keys_, size_, key_heads_, heads_together_, rows_, parts_;
  std::vector<std::atomic<std::int64_t>> left_;  ///< parts of each group that are not done
  const KernelTier& kernels_ = ChosenKernels();
  float *most_ = nullptr, *sums_ = nullptr, *out_ = nullptr;  ///< of each group, part and row
};

}  // namespace

void FewQueriesAttention(const FewQueriesAttentionArgs& args, Pool& pool) {
  CheckThreeDimensions(args.q, "q");
  CheckThreeDimensions(args.k, "k");
  CheckThreeDimensions(args.out, "out");
  const std::int64_t heads = args.q.shape[0], queries = args.q.shape[1], size = args.q.shape[2];
  const std::int64_t key_heads = args.k.shape[0], keys = args.k.shape[1], batch = args.out.shape[0];
  if (size == 0 || size % 32 != 0) {
    throw std::invalid_argument("q has " + std::to_string(size) + " columns; expected a multiple of 32");
  }
  if (batch == 0) throw std::invalid_argument("out has 0 sequences; expected one at least");
  if (key_heads == 0 || heads % key_heads != 0 || key_heads % batch != 0) {
    throw std::invalid_argument("k has " + std::to_string(key_heads) + " heads; expected a divisor of q's " +
                                std::to_string(heads) + " and a multiple of out's " + std::to_string(batch) + " sequences");
  }
  if (keys == 0) throw std::invalid_argument("k has no rows; expected one at least");
  if (args.causal) CheckCausal(queries, keys);
  CheckRows(args.q, "q", heads, queries, size);
  CheckRows(args.k, "k", key_heads, keys, size);
  CheckRows(args.v, "v", key_heads, keys, size);
  CheckRows(args.out, "out", batch, queries, heads / batch * size);
  if (queries == 0) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  FewQueriesRun(args, pool).Run();
}

}  // namespace moesaic::fused
