// The phases of a layer: the one table that names them, in timers, NVTX ranges, tests and documents.
//
// One function computes one phase and opens it with one range:
//
//   PhaseRange range(Phase::kD3Gemm);
//
// Symbols are those of layer.h: T tokens, k slots a token, E experts, T_e rows of expert e; X_e = X[rows_e], D_e = dO[rows_e]
// (unweighted), w the routing weight of a row, s the scale of an adapter.
#pragma once

#include <cstddef>
#include <span>

#include "profiling/range.h"

namespace moesaic::moe {

/// In the order of the table: parents before their steps, steps in the order of execution.
enum class Phase {
  kForward,
  kRouting,
  kAllocate,
  kGather,
  kPackInput,
  kGateUpGemm,
  kGateUpLora,
  kActivation,
  kPackIntermediate,
  kDownGemm,
  kDownLora,
  kMerge,

  kBackward,
  kBackwardDown,
  kD0Prepare,
  kD1Scatter,
  kD2Pack,
  kD3Gemm,
  kD4LoraGrad,
  kBackwardActivation,
  kA1SiluBackward,
  kBackwardGateUp,
  kGU0Prepare,
  kGU1BasePassGate,
  kGU1BasePassUp,
  kGU2PackForLora,
  kGU3LoraPassGate,
  kGU3GatePackDG,
  kGU3GateP,
  kGU3GateDB,
  kGU3GateDXLora,
  kGU3GateDA,
  kGU3LoraPassUp,
  kGU3UpPackDG,
  kGU3UpP,
  kGU3UpDB,
  kGU3UpDXLora,
  kGU3UpDA,
  kGU4Merge,
};

inline constexpr std::size_t kNumPhases = static_cast<std::size_t>(Phase::kGU4Merge) + 1;

/// One row of the table. `parent` is the phase itself for the two roots, forward and backward.
struct PhaseInfo {
  Phase phase;
  Phase parent;
  const char* name;
  const char* published_name;  ///< in the published measurements that this engine is compared with; "" where there is none
  const char* formula;
  const char* reads;
  const char* writes;
  const char* parallel_over;
};

/// Every phase; entry i is Phase(i).
std::span<const PhaseInfo, kNumPhases> PhaseTable();

inline const PhaseInfo& Info(Phase phase) { return PhaseTable()[static_cast<std::size_t>(phase)]; }

/// The range of a phase: its name, in the category that its parent names ("layer" for the roots). The first call registers all
/// of them, in the order of the table. Thread safe.
profiling::RangeId RangeOf(Phase phase);

/// Opens the range of a phase on the calling thread until the end of the scope.
class PhaseRange {
 public:
  explicit PhaseRange(Phase phase) : range_(RangeOf(phase)) {}

  /// Adds to the work counted for this phase (only read while timers are on).
  void AddWork(double flops, double bytes) { range_.AddWork(flops, bytes); }

  /// This much of the work belongs to a phase that is fused with this one: time is divided by flops, and marked as apportioned.
  void Share(Phase other, double flops, double bytes) { range_.Share(RangeOf(other), flops, bytes); }

 private:
  profiling::Range range_;
};

}  // namespace moesaic::moe
