#include "cpu_kernels/tile_evaluator.h"

#include <unistd.h>

#include <algorithm>

#include "cpu_kernels/gemm/tiles.h"

namespace moesaic {
namespace {

const Blocking* g_forced = nullptr;

}  // namespace

std::int64_t HostL2Bytes() {
  static const std::int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return found > 0 ? found : std::int64_t{1} << 20;
}

std::int64_t ChunkRows(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const std::int64_t row_bytes = 6 * hidden + 10 * intermediate;
  const std::int64_t in_cache = 13 * kMiB / 2 / row_bytes / 32 * 32, least = 33 * kMiB / row_bytes / 32 * 32;
  const std::int64_t usual = std::clamp<std::int64_t>(in_cache, std::clamp<std::int64_t>(least, 32, 192), kMaxChunkRows);
  // Half as many again are still one chunk: two would read the weights twice.
  const bool one = 2 * rows <= 3 * usual && rows <= kMaxChunkRows;
  const std::int64_t chunks = one ? 1 : CeilDiv(rows, usual);
  return RoundUp(CeilDiv(rows, chunks), 32);
}

std::int64_t PartsForThreads(std::int64_t pieces, int threads, std::int64_t tasks_of_thread) {
  return CeilDiv(tasks_of_thread * threads, std::max<std::int64_t>(1, pieces));
}

std::int64_t PartsOfLongJob(std::int64_t rows, std::int64_t all_rows, int threads) {
  if (threads == 1 || rows == 0) return 1;
  return CeilDiv(std::int64_t{2} * threads * rows, all_rows);
}

std::int64_t UnitsOfPart(std::int64_t units, std::int64_t parts) {
  return std::max<std::int64_t>(1, units / std::max<std::int64_t>(1, parts));
}

std::int64_t ColumnsOfPart(std::int64_t columns, std::int64_t parts) {
  if (parts <= 1) return columns;
  // Superblocks of weights are 8 columns wide: a narrower task would read them in pieces.
  return std::min(columns, std::max<std::int64_t>(8, columns / parts / 8 * 8));
}

std::int64_t LoraTaskElements(std::int64_t parameters, int threads) {
  constexpr std::int64_t kLeast = 16 * 1024, kMost = 64 * 1024;
  return std::clamp(parameters / (std::int64_t{3} * threads), kLeast, kMost);
}

std::int64_t UnpackSlice(bool matrix_unit, std::int64_t tiles, std::int64_t panels, std::int64_t l2_bytes) {
  if (matrix_unit) return panels > 2 ? 8 : 0;
  if (tiles * panels * 1024 <= l2_bytes / 2) return 0;
  return std::max<std::int64_t>(8, l2_bytes / 4096 / panels / 8 * 8);
}

std::int64_t GradientColumns(bool matrix_unit, std::int64_t rows, std::int64_t l2_bytes) {
  const std::int64_t bytes = std::min(kGradientBytes, l2_bytes / (matrix_unit ? 8 : 2));
  const std::int64_t of_column = 64 * RoundUp(std::max<std::int64_t>(rows, 1), 32);
  return std::clamp<std::int64_t>(bytes / of_column, 4, matrix_unit ? 16 : kMostGradientColumns);
}

std::int64_t StepBlocks(bool matrix_unit, std::int64_t rows, std::int64_t hidden, std::int64_t l2_bytes) {
  // Every step is timed: four blocks together open a quarter of the ranges.
  std::int64_t bytes = std::int64_t{matrix_unit ? 256 : 64} << 10, most = 4;
  if (matrix_unit && 2 * rows * hidden > l2_bytes / 4) {
    bytes = kMostStepBytes;
    most = 8;
  }
  return std::clamp<std::int64_t>(bytes / (256 * std::max<std::int64_t>(rows, 1)), 1, most);
}

std::int64_t RowsPerTask(std::int64_t row_bytes) {
  return std::max<std::int64_t>(1, (256 << 10) / std::max<std::int64_t>(1, row_bytes));
}

std::int64_t TokensPerMerge(std::int64_t tokens, int threads) {
  if (threads == 1) return 32;
  return std::clamp<std::int64_t>(CeilDiv(tokens, std::int64_t{4} * threads), 1, 32);
}

Blocking ChooseBlocking(const BlockingQuery& query) {
  if (g_forced != nullptr) return *g_forced;
  Blocking blocking;
  // With many jobs each stays whole on one core, whose cache then holds its activations.
  const std::int64_t in_flight = query.slots < query.threads ? std::min(query.slots, query.jobs) : query.jobs;
  const bool whole = query.threads == 1 || in_flight >= kWholeJobsOfThread * query.threads;
  const std::int64_t parts = whole ? 1 : PartsForThreads(in_flight, query.threads, kLayerTasksOfThread);
  blocking.intermediate_units_per_task = UnitsOfPart(CeilDiv(query.intermediate, kIntermediateUnit), parts);
  blocking.hidden_columns_per_task = ColumnsOfPart(CeilDiv(query.hidden, 32), parts);
  blocking.tokens_per_merge = TokensPerMerge(query.tokens, query.threads);
  blocking.blocks_per_step = StepBlocks(query.matrix_unit, query.rows, query.hidden, HostL2Bytes());
  blocking.gradient_columns = GradientColumns(query.matrix_unit, query.rows, HostL2Bytes());
  // The longest contraction is that of gate and up, in backward.
  blocking.unpack_depth =
      UnpackSlice(query.matrix_unit, CeilDiv(query.intermediate, 16), CeilDiv(query.rows, 16), HostL2Bytes());
  if (whole && query.threads > 1) {
    blocking.tail_jobs = std::min<std::int64_t>(query.jobs, query.threads);
    blocking.tail_parts = 4;
  }
  return blocking;
}

ScopedBlocking::ScopedBlocking(const Blocking& blocking) {
  static Blocking forced;
  forced = blocking;
  g_forced = &forced;
}

ScopedBlocking::~ScopedBlocking() { g_forced = nullptr; }

}  // namespace moesaic
