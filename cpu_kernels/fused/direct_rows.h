// How blocks of rows meet the direct form of the GEMM.
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {

/// DirectGemmArgs::row_count of a block of `rows` x `depth`. Few rows are summed up in another order: only where the call has
/// no more than few, however many threads divide it. More are met whole by each pair of panels: only where half of L2 holds
/// them. (Two Zen 5 cores, blocks of 122 rows x 3,072: 1.08 of the time of pairs.)
inline std::int64_t StoredRows(const KernelTier& kernels, std::int64_t rows, std::int64_t all_rows, std::int64_t depth) {
  if (all_rows <= kernels.most_few_rows) return rows;
  const bool in_half = 2 * rows * depth <= HostL2Bytes() / 2;
  return in_half && rows > kernels.most_few_rows ? kernels.StoredRows(rows) : 0;
}

}  // namespace moesaic::fused
