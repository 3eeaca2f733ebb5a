// The configurations that are tried, and the choice among them.
#include <algorithm>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tile_evaluator.h"
#include "cpu_kernels/tile_evaluator/gemm_model.h"

namespace moesaic {
namespace {

/// Columns of a superblock: what a task or a call of less than all columns is a multiple of.
constexpr std::int64_t kColumnGrid = 128;
/// Of a part of the contraction: a superblock of the direct form, and what one partial sum of the onednn tier covers.
constexpr std::int64_t kDepthGrid = kSuperblock * kTileColumns;

struct Axes {
  std::array<std::int64_t, 5> task_rows;
  std::array<std::int64_t, 4> task_columns;
  std::array<std::int64_t, 3> call_rows;
  std::array<std::int64_t, 5> call_columns;
  std::array<std::int64_t, 2> call_depth;
};

Axes AxesOf(const GemmProblem& problem, const MachineModel& machine) {
  std::int64_t rows = 0, groups = 0;
  for (const GroupRows& group : problem.groups) {
    rows = std::max(rows, group.rows);
    groups += group.groups;
  }
  const std::int64_t all_rows = RoundUp(rows, kPanelRows), all_columns = RoundUp(problem.n, kColumnGrid);
  const std::int64_t unit =
      kPanelRows * (problem.form == GemmForm::kDirect ? machine.kernel.right_panels : machine.kernel.left_panels);
  const auto of_unit = [&](std::int64_t target) { return std::min(all_rows, std::max(unit, target / unit * unit)); };
  const auto shared = [&](std::int64_t parts) {
    return std::min(all_columns, RoundUp(CeilDiv(problem.n, parts), kColumnGrid));
  };
  const auto columns = [&](std::int64_t target) { return std::min(all_columns, target); };
  // As the engine's layer cuts it where it does, but no more than keeps what is prefetched in L2.
  const std::int64_t slice = UnpackSlice(machine.kernel.unpack_overlaps, CeilDiv(problem.k, kTileColumns),
                                         CeilDiv(rows, kPanelRows), machine.cache_bytes[1]);
  const bool cut = problem.form == GemmForm::kUnpack && slice > 0;
  const std::int64_t depth = std::min(4 * kDepthGrid, cut ? slice * kTileColumns : 4 * kDepthGrid);
  return {
      .task_rows = {all_rows, of_unit(384), of_unit(192), of_unit(96), of_unit(unit)},
      .task_columns = {all_columns, shared(CeilDiv(machine.threads, groups)), shared(PartsForThreads(groups, machine.threads)),
                       columns(2 * kColumnGrid)},
      .call_rows = {all_rows, of_unit(96), of_unit(32)},
      .call_columns = {columns(32), columns(64), columns(kColumnGrid), columns(4 * kColumnGrid), all_columns},
      .call_depth = {problem.k, std::min(problem.k, depth)},
  };
}

/// Whether every group takes a form for few rows along the whole contraction: the direct one, the unpack form where it rounds.
bool AllFewWhole(const GemmProblem& problem, const MachineModel& machine) {
  if (problem.form == GemmForm::kGradient || (problem.form == GemmForm::kUnpack && problem.output_bytes == 4)) return false;
  return std::ranges::all_of(problem.groups, [&](const GroupRows& group) { return IsFew(problem, group.rows, machine); });
}

/// Whether another candidate does the same, or nothing speaks for it.
/// @param matrix_unit  calls of up to two panels take no slices, and tasks of very many rows drive sums and slices out of L2
///                     (1,300 x 1,152 x 512, unpack form: a third longer; 4,096 x 768 x 512, direct: a quarter)
/// @param slices       a matrix unit's right factors stay in L1 along a part of the contraction only
/// @param whole_rows   the unpack form takes a call's rows a few at a time itself, while weights are in L1: so many stay
/// together
bool IsPruned(const GemmConfiguration& c, const GemmProblem& problem, bool matrix_unit, bool whole_depth, bool slices,
              std::int64_t whole_rows) {
  const bool one_row_call = c.call_rows >= c.task_rows, one_column_call = c.call_columns >= c.task_columns;
  if (whole_rows > 0 && (!one_row_call || c.task_rows < whole_rows)) return true;
  if (matrix_unit && problem.form != GemmForm::kGradient) {
    if (c.call_rows <= 2 * kPanelRows && !one_row_call) return true;
    if (c.task_rows > kMaxChunkRows) return true;
  }
  // The direct form lays few stored rows out for each superblock of panels; narrow calls of more are left out with them.
  if (whole_depth && problem.form == GemmForm::kDirect && c.call_columns < std::min(c.task_columns, kSuperblock * kPanelRows)) {
    return true;
  }
  if (c.call_depth < problem.k) {
    if (whole_depth) return true;
  } else if (c.order == LoopOrder::kDepth || slices) {
    return true;
  }
  // The unpack form's slices are no loop over calls.
  if (c.order == LoopOrder::kDepth && problem.form == GemmForm::kUnpack) return true;
  if (c.order == LoopOrder::kRows && (one_row_call || one_column_call)) return true;
  if (c.order == LoopOrder::kDepth && one_row_call && one_column_call) return true;
  return false;
}

/// visit(configuration, again) for every candidate; `again`: it was the same before. Pruned ones are never visited again.
template <typename Visit>
void ForEach(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space, Visit&& visit) {
  const Axes axes = AxesOf(problem, machine);
  const bool prune = space == CandidateSpace::kPruned, whole_depth = AllFewWhole(problem, machine);
  // Threads share the columns, where there is a superblock for each.
  const bool registers = problem.form == GemmForm::kUnpack && IsFew(problem, 1, machine),
             divisible = problem.n >= machine.threads * kSuperblock * kTileColumns;
  const std::int64_t whole_rows = !registers ? 0 : divisible ? std::min(axes.task_rows[0], kMaxChunkRows) : 1;
  // Products of up to two panels meet each right factor once.
  const bool slices = problem.form == GemmForm::kUnpack && machine.kernel.unpack_overlaps &&
                      axes.task_rows[0] > 2 * kPanelRows && axes.call_depth[1] < problem.k;
  const auto repeated = [](std::span<const std::int64_t> axis, std::size_t i) {
    const auto before = axis.first(i);
    return std::find(before.begin(), before.end(), axis[i]) != before.end();
  };
  for (std::size_t tr = 0; tr < axes.task_rows.size(); ++tr) {
    for (std::size_t tc = 0; tc < axes.task_columns.size(); ++tc) {
      const bool again = repeated(axes.task_rows, tr) || repeated(axes.task_columns, tc);
      if (prune && again) continue;
      GemmConfiguration c{axes.task_rows[tr], axes.task_columns[tc]};
      std::array<std::int64_t, 3> call_rows = axes.call_rows;
      for (std::int64_t& rows : call_rows) rows = std::min(rows, c.task_rows);
      std::array<std::int64_t, 5> call_columns = axes.call_columns;
      for (std::int64_t& columns : call_columns) columns = std::min(columns, c.task_columns);
      for (std::size_t cr = 0; cr < call_rows.size(); ++cr) {
        const bool again_rows = again || repeated(call_rows, cr);
        for (std::size_t cc = 0; cc < call_columns.size(); ++cc) {
          const bool again_columns = again_rows || repeated(call_columns, cc);
          for (std::size_t cd = 0; cd < axes.call_depth.size(); ++cd) {
            const bool again_depth = again_columns || repeated(axes.call_depth, cd);
            if (prune && again_depth) continue;
            for (const LoopOrder order : {LoopOrder::kColumns, LoopOrder::kRows, LoopOrder::kDepth}) {
              c.call_rows = call_rows[cr];
              c.call_columns = call_columns[cc];
              c.call_depth = axes.call_depth[cd];
              c.order = order;
              if (!prune || !IsPruned(c, problem, machine.kernel.unpack_overlaps, whole_depth, slices, whole_rows))
                visit(c, again_depth);
            }
          }
        }
      }
    }
  }
}

}  // namespace

bool Legal(const GemmProblem& problem, const GemmConfiguration& c) {
  const auto on_grid = [](std::int64_t value, std::int64_t grid, std::int64_t all) {
    return value >= 1 && (value % grid == 0 || value >= all);
  };
  if (c.task_rows < 1 || c.task_rows % kPanelRows != 0 || c.call_rows < 1 || c.call_rows % kPanelRows != 0) return false;
  if (!on_grid(c.task_columns, kColumnGrid, problem.n) || !on_grid(c.call_columns, kTileColumns, problem.n)) return false;
  if (problem.form == GemmForm::kGradient && problem.output_bytes != 4) return false;
  if (c.call_depth >= problem.k) return true;
  if (c.call_depth < 1 || c.call_depth % kDepthGrid != 0) return false;
  return problem.form != GemmForm::kDirect || kColumnGrid % c.call_columns == 0;
}

std::vector<GemmConfiguration> Candidates(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space) {
  std::vector<GemmConfiguration> all;
  ForEach(problem, machine, space, [&](const GemmConfiguration& c, bool) { all.push_back(c); });
  return all;
}

GemmAnswer ChooseGemm(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space) {
  GemmAnswer best;
  ForEach(problem, machine, space, [&](const GemmConfiguration& c, bool again) {
    ++best.candidates;
    if (again || !Legal(problem, c)) return;
    const GemmEstimate estimate = EstimateGemm(problem, c, machine);
    if (best.configuration.task_rows != 0 && estimate.milliseconds >= best.estimate.milliseconds) return;
    best.configuration = c;
    best.estimate = estimate;
  });
  return best;
}

std::vector<GemmAnswer> RankGemm(const GemmProblem& problem, const MachineModel& machine, CandidateSpace space,
                                 std::size_t count) {
  std::vector<GemmAnswer> answers;
  std::int64_t candidates = 0;
  ForEach(problem, machine, space, [&](const GemmConfiguration& c, bool again) {
    ++candidates;
    if (!again && Legal(problem, c)) answers.push_back({c, EstimateGemm(problem, c, machine), 0});
  });
  std::stable_sort(answers.begin(), answers.end(),
                   [](const GemmAnswer& a, const GemmAnswer& b) { return a.estimate.milliseconds < b.estimate.milliseconds; });
  if (answers.size() > count) answers.resize(count);
  for (GemmAnswer& answer : answers) answer.candidates = candidates;
  return answers;
}

}  // namespace moesaic
