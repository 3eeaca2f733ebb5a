#include "cpu_kernels/fused/ranges.h"

#include <array>

namespace moesaic::fused {

profiling::RangeId RangeOf(FusedStage stage) {
  static const std::array<profiling::RangeId, 16> ids = [] {
    constexpr std::array<const char*, 16> kNames = {"pack",
                                                    "gemm",
                                                    "low_rank",
                                                    "epilogue",
                                                    "norm",
                                                    "silu_mul",
                                                    "rotary",
                                                    "few_queries",
                                                    "softmax",
                                                    "backward_norm",
                                                    "backward_activation",
                                                    "backward_gemm",
                                                    "backward_low_rank",
                                                    "backward_silu_mul",
                                                    "backward_rotary",
                                                    "backward_softmax"};
    std::array<profiling::RangeId, 16> registered{};
    for (std::size_t i = 0; i < kNames.size(); ++i) registered[i] = profiling::RegisterRange(kNames[i], "fused");
    return registered;
  }();
  return ids[static_cast<std::size_t>(stage)];
}

}  // namespace moesaic::fused
