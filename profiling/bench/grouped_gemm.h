// A grouped GEMM run as a configuration of the evaluator says, on the engine's kernels and pool: what the model predicts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator/gemm_model.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

/// Memory full of weights, more than the caches hold, that GroupedGemms read on and on: whichever comes next, it finds nothing
/// in a cache. Not thread safe.
class FarWeights {
 public:
  /// Throws std::bad_alloc.
  FarWeights(threadpool::Pool& pool, std::int64_t bytes);

  std::int64_t bytes() const { return memory_.bytes(); }
  /// The bytes after those of the call before, or the first ones; aligned to 4 KiB.
  /// @param bytes  at most bytes()
  std::byte* Next(std::int64_t bytes);

 private:
  AlignedBuffer memory_;
  std::int64_t at_ = 0;
};

/// Operands with values from a fixed generator, and the loops around the kernels. Results are the same bits for every legal
/// configuration and number of threads. Not thread safe.
class GroupedGemm {
 public:
  /// @param problem  its groups are taken in their order; its weights are bf16
  /// @param pool     must outlive this
  /// @param far      each pass takes the next weights of these; null, or fewer than it needs: weights of its own
  ///
  /// Throws std::invalid_argument for an empty problem, std::bad_alloc.
  GroupedGemm(const KernelTier& tier, const GemmProblem& problem, threadpool::Pool& pool,
              std::shared_ptr<FarWeights> far = nullptr);

  /// One pass: packing (unless problem.packed) and products. Throws std::invalid_argument unless Legal().
  void Run(const GemmConfiguration& configuration);

  /// Milliseconds of `count` passes of each configuration, which take turns. Before each pass, as operators before do in a
  /// model, some thread writes each part of inputs, tiles and results, another one each time: no pass finds what the one before
  /// left in its own threads' caches.
  std::vector<std::vector<double>> Measure(std::span<const GemmConfiguration> configurations, int count);
  /// What packing took in a pass, nothing if problem.packed, and how unequal its tasks were.
  struct Pass {
    double packing_ms = 0;
    double uneven = 1;  ///< the longest task over their mean
  };
  /// Of `count` passes, measured as those. Throws as Run() does.
  std::vector<Pass> MeasurePasses(const GemmConfiguration& configuration, int count);

  /// C of a group and its operands, as numbers; after a Run().
  double Result(std::int64_t group, std::int64_t row, std::int64_t column) const;
  double Activation(std::int64_t group, std::int64_t row, std::int64_t k) const;
  double Weight(std::int64_t group, std::int64_t k, std::int64_t column) const;
  /// Of the bits of all results.
  std::uint64_t Digest() const;

 private:
  struct Group {
    std::int64_t rows;
    TileMatrix weights;  ///< gradient: row pairs
    TileMatrix activations;
    std::byte* x;      ///< [rows][K] of the input type
    std::byte* c;      ///< direct: [N rounded up to 16][ldc]; else [rows rounded up to 16][ldc]
    std::int64_t ldc;  ///< fp32: as SumsPitch gives it
  };
  /// What one worker computes: rows and columns of C of one group.
  struct Task {
    const Group* group;
    std::int64_t row, rows, column, columns;
  };
  /// One call of a kernel inside a task.
  struct Block {
    std::int64_t row, rows, column, columns, k, depth;
  };

  /// Whether the tier has a form for as many rows as a group has whose work grows with them.
  bool IsFew(const Group& group) const {
    if (problem_.form == GemmForm::kUnpack) return tier_.most_few_rows > 0;
    return problem_.form == GemmForm::kDirect && tier_.StoredRows(group.rows) > 0;
  }
  void Fill(std::span<std::byte> memory, std::int64_t value_bytes);
  std::int64_t BytesOf(const TileMatrix& weights) const { return RoundUp(weights.size() * 2, 4096); }
  /// The groups' weights, one after the other.
  void PlaceWeights(std::byte* at);
  void PackActivations(int worker_count);
  /// The next ones, if there are any.
  void PlaceFarWeights();
  /// What comes before a pass that is measured.
  void Scatter();
  /// The tasks that a configuration makes of the products.
  void CutTasks(const GemmConfiguration& configuration);
  void RunTask(const Task& task, const GemmConfiguration& configuration);
  /// Whether contractions are cut into calls. The unpack form's are cut inside of one, but where work grows with
  /// the rows: those kernels continue from C, in fp32. (Of few rows the direct form's order of summation depends on where a
  /// contraction ends; stored rows are never cut.)
  bool CutsInCalls(bool few) const {
    return problem_.form == GemmForm::kUnpack ? few && problem_.output_bytes == 4
                                              : problem_.form == GemmForm::kGradient || !few;
  }
  /// @param slice  of the contraction, where the kernel cuts it
  void Call(const Task& task, const Block& block, const PrefetchRange& prefetch, float* sums, std::int64_t sums_ld,
            std::int64_t slice);
  void CallDirect(const Task& task, const Block& block, const PrefetchRange& prefetch, float* sums, std::int64_t sums_ld);
  void CallUnpack(const Task& task, const Block& block, std::int64_t slice);
  void CallGradient(const Task& task, const Block& block);
  /// Rounds a block of sums, direct form.
  void Round(const Task& task, std::int64_t column, std::int64_t columns, std::int64_t row, std::int64_t rows,
             const float* sums, std::int64_t sums_ld);

  const KernelTier& tier_;
  const GemmProblem problem_;
  threadpool::Pool& pool_;
  std::shared_ptr<FarWeights> far_;
  AlignedBuffer weights_, x_, tiles_, c_;
  std::vector<Group> groups_;
  std::vector<Task> tasks_;
  std::uint64_t random_ = 1;
  std::int64_t scattered_ = 0;  ///< how often
};

}  // namespace moesaic::bench
