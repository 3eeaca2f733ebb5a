// A grouped GEMM run as a configuration of the evaluator says, on the engine's kernels and pool: what the model predicts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator/gemm_model.h"
#include "threadpool/pool.h"

namespace moesaic::bench {

/// Operands with values from a fixed generator, and the loops around the kernels. Results are the same bits for every legal
/// configuration and number of threads. Not thread safe.
class GroupedGemm {
 public:
  /// @param problem       its groups are taken in their order; its weights are bf16
  /// @param pool          must outlive this
  /// @param weight_bytes  of weights at least: copies of all groups' weights are used in turn, so that they come from memory
  ///                      where they exceed the caches
  /// Throws std::invalid_argument for an empty problem, std::bad_alloc.
  GroupedGemm(const KernelTier& tier, const GemmProblem& problem, threadpool::Pool& pool, std::int64_t weight_bytes = 0);

  /// One pass: packing (unless problem.packed) and products. Throws std::invalid_argument unless Legal().
  void Run(const GemmConfiguration& configuration);

  /// Milliseconds of `count` passes of each configuration, which take turns.
  std::vector<std::vector<double>> Measure(std::span<const GemmConfiguration> configurations, int count);

  /// C of a group and its operands, as numbers; after a Run().
  double Result(std::int64_t group, std::int64_t row, std::int64_t column) const;
  double Activation(std::int64_t group, std::int64_t row, std::int64_t k) const;
  double Weight(std::int64_t group, std::int64_t k, std::int64_t column) const;
  /// Of the bits of all results.
  std::uint64_t Digest() const;

 private:
  struct Group {
    std::int64_t rows;
    std::vector<TileMatrix> weights;  ///< by copy; gradient: row pairs
    TileMatrix activations;
    std::byte* x;  ///< [rows][K] of the input type
    std::byte* c;  ///< direct: [N rounded up to 16][ldc]; else [rows rounded up to 16][ldc]
    std::int64_t ldc;
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

  /// The few_rows of a group's GEMMs: its rows where the tier has a form for so few, else 0.
  std::int64_t FewRows(const Group& group) const {
    return problem_.form != GemmForm::kGradient && group.rows <= tier_.most_few_rows ? group.rows : 0;
  }
  void Fill(std::span<std::byte> memory, std::int64_t value_bytes);
  void PackActivations(int worker_count);
  void RunTask(const Task& task, const GemmConfiguration& configuration);
  /// Whether contractions are cut into calls. The unpack form's are cut inside of one, but for few rows, whose kernels do not:
  /// those continue from C, in fp32. (For few rows the direct form's order of summation depends on where a contraction ends.)
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
  std::vector<AlignedBuffer> weight_buffers_;
  AlignedBuffer x_, tiles_, c_;
  std::vector<Group> groups_;
  std::vector<Task> tasks_;
  std::uint64_t random_ = 1;
  std::size_t copies_ = 1;
  std::size_t copy_ = 0;
};

}  // namespace moesaic::bench
