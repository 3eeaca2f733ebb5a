// The phases of a layer: the one table that names them, in timers, NVTX ranges, tests and documents.
//
// One function computes one phase and opens it with one range:
//
//   PhaseRange range(Phase::kD3Gemm);
//
// Five are part of others and have no range of their own: pack_intermediate of activation and pack_dG of A1, which write tiles,
// and up's dX_lora and dA of gate's.
//
// Symbols are those of layer.h: T tokens, k slots a token, E experts, T_e rows of expert e; X_e = X[rows_e], D_e = dO[rows_e]
// (unweighted), w the routing weight of a row, s the scale of an adapter.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
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

/// The range of a phase: its name, in the category that its parent names ("layer" for the roots). Phases of backward that hold
/// others are sums of those. The first call registers all
/// of them, in the order of the table. Thread safe.
profiling::RangeId RangeOf(Phase phase);

/// Work of a phase that is fused with another one.
struct PhaseShare {
  Phase phase;
  profiling::Work work;
};

/// Opens the range of a phase on the calling thread until the end of the scope; not of one that only holds others, whose range
/// is around each of theirs (profiling::RangeKind::kSum).
class PhaseRange {
 public:
  /// @param work    what the phase is about to do itself
  /// @param shares  what fused phases do meanwhile: time is divided by flops, and marked as apportioned
  explicit PhaseRange(Phase phase, profiling::Work work = {}, std::initializer_list<PhaseShare> shares = {})
      : range_(RangeOf(phase), work, Shares(shares).view()) {}

 private:
  struct Shares {
    Shares(std::initializer_list<PhaseShare> from) {
      for (const PhaseShare& share : from) all[count++] = {RangeOf(share.phase), share.work};
    }
    std::span<const profiling::Share> view() const { return {all.data(), count}; }
    std::array<profiling::Share, profiling::Range::kMostShares> all;
    std::size_t count = 0;
  };
  profiling::Range range_;
};

}  // namespace moesaic::moe
