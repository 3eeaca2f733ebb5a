#include "cpu_kernels/fused/log_probs.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/projection.h"
#include "cpu_kernels/fused/scratch.h"

namespace moesaic::fused {
namespace {

using threadpool::Pool;

/// Tokens of the vocabulary of which a row has statistics of their own: some chunks.
constexpr std::int64_t kPart = 4 * kChunk;

/// One call of LogProbs().
class LogProbsRun {
 public:
  LogProbsRun(const LogProbsArgs& args, const LogProbsResults& results, std::vector<std::int64_t> rows, Pool& pool)
      : args_(args), results_(results), pool_(pool), projection_(args, std::move(rows)) {}

  void Run() {
    const std::int64_t panels = CeilDiv(projection_.rows_count(), kPanelRows);
    Carver one;
    projection_.Take(one);
    const std::int64_t of_worker = one.used(), statistics_bytes = panels * parts_ * std::int64_t{sizeof(LogitStatistics)};
    const std::int64_t bytes = pool_.num_threads() * of_worker + statistics_bytes;
    const Scratch scratch(bytes, IsKept(bytes, pool_.num_threads()));
    statistics_ = reinterpret_cast<LogitStatistics*>(scratch.data() + pool_.num_threads() * of_worker);
    std::vector<std::int64_t> packed(static_cast<std::size_t>(pool_.num_threads()), -1);  // the block in a worker's memory
    std::vector<Projection::Memory> memory;
    for (int worker = 0; worker < pool_.num_threads(); ++worker) {
      Carver carver(scratch.data() + worker * of_worker);
      memory.push_back(projection_.Take(carver));
    }
    pool_.ParallelFor(projection_.blocks() * parts_, [&](std::int64_t i, int worker) {
      const std::int64_t block = i / parts_;
      const auto w = static_cast<std::size_t>(worker);
      if (packed[w] != block) {
        packed[w] = block;
        projection_.Pack(block, memory[w]);
      }
      Part(block, i % parts_, memory[w]);
    });
    pool_.ParallelFor(panels, [&](std::int64_t panel, int) { Finish(panel); });
  }

 private:
  /// Statistics of a block's rows, of one part of the vocabulary.
  void Part(std::int64_t block, std::int64_t part, const Projection::Memory& memory) const {
    const std::int64_t first = block * projection_.block_rows() / kPanelRows;
    const std::int64_t panels = CeilDiv(projection_.RowsOfBlock(block), kPanelRows);
    for (std::int64_t panel = 0; panel < panels; ++panel) statistics_[(first + panel) * parts_ + part] = {};
    const std::int64_t end = std::min((part + 1) * kPart, projection_.vocabulary());
    for (std::int64_t from = part * kPart; from < end; from += kChunk) {
      projection_.Multiply(block, from, FusedStage::kGemm, memory);
      const FusedRange range(FusedStage::kSoftmax, 0.0, 0.0);
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        const Targets targets(projection_, args_, (first + panel) * kPanelRows, from);
        FoldLogitsArgs fold;
        fold.block = projection_.Logits(panel, from, targets.values, memory);
        fold.statistics = &statistics_[(first + panel) * parts_ + part];
        projection_.kernels().fused.fold_logits(fold);
      }
    }
  }

  /// What all parts say of a panel's rows.
  void Finish(std::int64_t panel) const {
    const FusedRange range(FusedStage::kSoftmax, 0.0, 0.0);
    const LogitStatistics* const of_parts = statistics_ + panel * parts_;
    for (std::int64_t i = 0; i < kPanelRows && panel * kPanelRows + i < projection_.rows_count(); ++i) {
      const std::int64_t row = projection_.Row(panel * kPanelRows + i);
      double most = -HUGE_VAL, before = -HUGE_VAL, sum = 0.0, weighted = 0.0, squares = 0.0, total = 0.0;
      for (std::int64_t part = 0; part < parts_; ++part) {
        most = std::max<double>(most, of_parts[part].most[i]);
        before = std::max<double>(before, of_parts[part].before[i]);
      }
      for (std::int64_t part = 0; part < parts_; ++part) {
        const LogitStatistics& known = of_parts[part];
        total += known.total[i];
        if (known.most[i] == LogitStatistics::kNone && known.sum[i] == 0.0f) continue;  // all -infinity
        const double shift = known.most[i] - most, shrink = std::exp(shift);
        sum += shrink * known.sum[i];
        weighted += shrink * (known.weighted[i] + shift * known.sum[i]);
        squares += shrink * shrink * known.squares[i];
      }
      const double target = of_parts[args_.targets[row] / kPart].target[i], log_sum = most + std::log(sum);
      if (results_.log_probs != nullptr) results_.log_probs[row] = static_cast<float>(target - log_sum);
      if (results_.log_sums != nullptr) results_.log_sums[row] = static_cast<float>(log_sum);
      if (results_.entropies != nullptr) results_.entropies[row] = static_cast<float>(std::log(sum) - weighted / sum);
      if (results_.log_squares != nullptr) {
        results_.log_squares[row] = static_cast<float>(std::log(squares) - 2.0 * std::log(sum));
      }
      if (results_.mean_logits != nullptr) {
        results_.mean_logits[row] = static_cast<float>(total / static_cast<double>(projection_.vocabulary()));
      }
      if (results_.are_top1 != nullptr) results_.are_top1[row] = target >= most && target > before ? 1 : 0;
    }
  }

  const LogProbsArgs& args_;
  const LogProbsResults& results_;
  Pool& pool_;
  const Projection projection_;
  const std::int64_t parts_ = CeilDiv(projection_.vocabulary(), kPart);
  LogitStatistics* statistics_ = nullptr;  ///< [panels][parts]
};

}  // namespace

void CheckLogProbs(const LogProbsArgs& args) {
  CheckMatrix(args.x, "x");
  if (args.targets == nullptr && args.x.shape[0] > 0) throw std::invalid_argument("targets is null; expected one of each row");
  const std::int64_t vocabulary = args.weight == nullptr ? args.x.shape[1] : args.weight->rows();
  if (args.weight == nullptr) {
    Check(args.x, "x", args.x.shape[0], vocabulary, args.x.dtype);
  } else {
    Check(args.x, "x", args.x.shape[0], args.weight->columns(), args.weight->dtype(), "w was packed");
  }
  if (vocabulary > INT32_MAX - kChunk) {
    throw std::invalid_argument("the vocabulary has " + std::to_string(vocabulary) + " tokens; expected less than 2^31 - 512");
  }
  for (std::int64_t row = 0; row < args.x.shape[0]; ++row) {
    if (args.targets[row] >= vocabulary) {
      throw std::invalid_argument("targets[" + std::to_string(row) + "] is " + std::to_string(args.targets[row]) +
                                  "; expected less than " + std::to_string(vocabulary) + ", the size of the vocabulary");
    }
  }
}

std::vector<std::vector<std::int64_t>> Pieces(const std::vector<std::int64_t>& rows) {
  constexpr std::int64_t kMost = 2048;
  const auto count = static_cast<std::int64_t>(rows.size()), most = CeilDiv(count, CeilDiv(count, kMost));
  std::vector<std::vector<std::int64_t>> pieces;
  for (std::int64_t first = 0; first < count; first += most) {
    const auto begin = rows.begin() + first;
    pieces.emplace_back(begin, begin + std::min(most, count - first));
  }
  return pieces;
}

void LogProbs(const LogProbsArgs& args, const LogProbsResults& results, Pool& pool) {
  CheckLogProbs(args);
  const std::int64_t rows = args.x.shape[0];
  for (float* array : {results.log_probs, results.log_sums, results.entropies, results.log_squares, results.mean_logits}) {
    if (array != nullptr) std::fill_n(array, rows, 0.0f);
  }
  if (results.are_top1 != nullptr) std::fill_n(results.are_top1, rows, std::uint8_t{0});
  std::vector<std::int64_t> counted;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (args.targets[row] >= 0) counted.push_back(row);
  }
  if (counted.empty()) return;
  const Pool::Turn turn(pool);  // as many threads to its end as scratch memory is taken for
  for (std::vector<std::int64_t>& piece : Pieces(counted)) LogProbsRun(args, results, std::move(piece), pool).Run();
}

}  // namespace moesaic::fused
