// Predicts the time of a grouped GEMM for a configuration of its blocking, and finds the best configuration.
//
//   C_g [M_g, N] = X_g [M_g, K] * W_g          g = 1..G, each group with a weight matrix of its own
//
// A configuration names two levels of tiles. A *task* computes `task_rows` x `task_columns` of C along the whole contraction on
// one thread: the data that it reuses should stay in L2. A *call* is one call of a kernel (kernels.h), `call_rows` x
// `call_columns` x `call_depth`: what it reuses should stay in L1. `order` says which loop over calls is the outermost. None of
// it changes the order of summation: parts of the contraction follow each other and continue from C in memory. The unpack
// form takes them as slices inside of a call, a superblock of columns at a time.
//
// The model counts, for one task, the cells (gemm/cell.h) and for each operand how often it is read and from which cache, which
// is the smallest that holds what is read in between. Times of arithmetic and of each level of memory overlap, but not
// perfectly: they combine as a power mean. Pure functions; thread safe.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cpu_kernels/tile_evaluator/machine_model.h"

namespace moesaic {

/// Changes whenever the same figures may give another answer, or have to be measured anew: part of every cached answer's key.
inline constexpr int kGemmModelVersion = 45;

/// Which function of KernelTier computes it.
enum class GemmForm { kDirect, kUnpack, kGradient };

/// So many groups of so many rows.
struct GroupRows {
  std::int64_t rows = 0;
  std::int64_t groups = 0;
};

struct GemmProblem {
  std::vector<GroupRows> groups;  ///< rows >= 1, groups >= 1, distinct rows
  std::int64_t k = 0;
  std::int64_t n = 0;
  std::int64_t input_bytes = 2;   ///< of a value of X: 4 or 2
  std::int64_t output_bytes = 4;  ///< of a value of C: 4 or 2
  double weight_bytes = 2;        ///< of a value of W
  GemmForm form = GemmForm::kDirect;
  bool packed = false;  ///< X lies in tiles already: nothing is packed
  bool cached = false;  ///< W lies in the last-level cache, from its use before
};

/// The outermost loop over the calls of a task.
enum class LoopOrder { kRows, kColumns, kDepth };

struct GemmConfiguration {
  std::int64_t task_rows = 0;  ///< at most; a group's rows are dealt evenly, in whole panels
  std::int64_t task_columns = 0;
  std::int64_t call_rows = 0;
  std::int64_t call_columns = 0;
  std::int64_t call_depth = 0;
  LoopOrder order = LoopOrder::kColumns;

  bool operator==(const GemmConfiguration&) const = default;
};

/// The parts of a prediction.
enum class GemmPart { kArithmetic, kL1, kL2, kL3, kMemory, kPacking, kEdge, kScheduling, kDispatch };
inline constexpr std::size_t kGemmParts = 9;
/// "arithmetic", "l1", ...
std::string_view GemmPartName(GemmPart part);

struct GemmEstimate {
  double milliseconds = 0;
  std::array<double, kGemmParts> parts{};  ///< milliseconds, their sum is the whole
  GemmPart bound = GemmPart::kArithmetic;  ///< the largest part
};

/// @param configuration  one of Candidates(), or any that Legal() accepts
GemmEstimate EstimateGemm(const GemmProblem& problem, const GemmConfiguration& configuration, const MachineModel& machine);

/// Columns of a call, at most, for which the direct form's next call has its weights prefetched meanwhile.
inline constexpr std::int64_t kMostPrefetched = 128;

/// Rows of the tasks of a group with so many rows: they are dealt evenly, in whole panels.
/// @param whole  all in one, by calls of all of them: the direct form of stored rows, which is another one for other numbers
std::int64_t TaskRows(std::int64_t rows, const GemmConfiguration& configuration, bool whole);

/// The pieces in which X becomes tiles before the product: some rows of a group, and tile columns of the contraction.
struct PackingCut {
  static constexpr std::int64_t kRows = 64;  ///< of a piece, at most
  std::int64_t columns = 0;                  ///< tile columns of a piece, at most
  std::int64_t pieces = 0;                   ///< of all groups
};
PackingCut CutPacking(const GemmProblem& problem, int threads);

/// Whether the tier has a form for as many rows as a group has whose work grows with them (gemm/few_rows.h, register_*.h).
bool IsFew(const GemmProblem& problem, std::int64_t rows, const MachineModel& machine);

/// Whether the kernels can run it: positive sizes on the grid of panels and superblocks; a part of the contraction, in the
/// direct form, only where calls lie within a row of superblocks; gradients in fp32.
bool Legal(const GemmProblem& problem, const GemmConfiguration& configuration);

enum class CandidateSpace {
  kPruned,     ///< what differs, and is not bad by rule
  kPublished,  ///< 20 tiles of L2 x 30 tiles of L1 x 3 orders = 1,800, as they are
};

std::vector<GemmConfiguration> Candidates(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space);

struct GemmAnswer {
  GemmConfiguration configuration;
  GemmEstimate estimate;
  std::int64_t candidates = 0;
};

/// The candidate with the least predicted time; of equal ones the first.
GemmAnswer ChooseGemm(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space);

/// The `count` best candidates, best first.
std::vector<GemmAnswer> RankGemm(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space,
                                 std::size_t count);

}  // namespace moesaic
