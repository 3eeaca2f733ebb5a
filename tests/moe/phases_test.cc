#include "moe/phases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::moe {
namespace {

std::vector<std::string> ChildrenOf(const std::string& parent) {
  std::vector<std::string> names;
  for (const PhaseInfo& info : PhaseTable()) {
    if (info.parent != info.phase && Info(info.parent).name == parent) names.push_back(info.name);
  }
  return names;
}

TEST(Phases, NamesAndTree) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(ChildrenOf("forward"), (Names{"routing", "allocate", "gather", "pack_input", "gate_up_gemm", "gate_up_lora",
                                          "activation", "pack_intermediate", "down_gemm", "down_lora", "merge"}));
  EXPECT_EQ(ChildrenOf("backward"), (Names{"backward_down", "backward_activation", "backward_gate_up"}));
  EXPECT_EQ(ChildrenOf("backward_down"), (Names{"D0_prepare", "D1_scatter", "D2_pack", "D3_gemm", "D4_lora_grad"}));
  EXPECT_EQ(ChildrenOf("backward_activation"), (Names{"A1_silu_backward"}));
  EXPECT_EQ(ChildrenOf("backward_gate_up"), (Names{"GU0_prepare", "GU1_base_pass_gate", "GU1_base_pass_up", "GU2_pack_for_lora",
                                                   "GU3_lora_pass_gate", "GU3_lora_pass_up", "GU4_merge"}));
  const Names steps = {"pack_dG", "P", "dB", "dX_lora", "dA"};
  EXPECT_EQ(ChildrenOf("GU3_lora_pass_gate"), steps);
  EXPECT_EQ(ChildrenOf("GU3_lora_pass_up"), steps);
}

// The names under which the measurements were published that this engine is compared with.
TEST(Phases, PublishedNames) {
  const std::map<std::string, std::string> expected = {{"D0_prepare", "D0_prepare+memset"},
                                                       {"D1_scatter", "D1_scatter"},
                                                       {"D2_pack", "D2_quantize"},
                                                       {"D3_gemm", "D3_gemm"},
                                                       {"D4_lora_grad", "D4_lora_grad"},
                                                       {"A1_silu_backward", "silu_backward"},
                                                       {"GU0_prepare", "GU0_prepare+memset"},
                                                       {"GU1_base_pass_gate", "base_pass(gate)"},
                                                       {"GU1_base_pass_up", "base_pass(up)"},
                                                       {"GU2_pack_for_lora", "GU2_requantize_for_lora"},
                                                       {"GU3_lora_pass_gate", "lora_pass(gate)"},
                                                       {"GU3_lora_pass_up", "lora_pass(up)"},
                                                       {"GU4_merge", ""}};
  std::size_t seen = 0;
  for (const PhaseInfo& info : PhaseTable()) {
    const auto entry = expected.find(info.name);
    if (entry == expected.end()) continue;
    EXPECT_EQ(info.published_name, entry->second) << info.name;
    ++seen;
  }
  EXPECT_EQ(seen, expected.size());
}

TEST(Phases, EveryPhaseHasAFormulaAndItsOwnRange) {
  std::set<profiling::RangeId> ids;
  for (const PhaseInfo& info : PhaseTable()) {
    EXPECT_STRNE(info.formula, "") << info.name;
    EXPECT_TRUE(ids.insert(RangeOf(info.phase)).second) << info.name << " shares a range";
  }
}

TEST(Phases, RangeCountsUnderTheNameOfItsParent) {
  profiling::SetTimersEnabled(true);
  profiling::Reset();
  {
    PhaseRange range(Phase::kD3Gemm, {100.0, 50.0});
  }
  {
    PhaseRange range(Phase::kGU3UpP);
  }
  const std::vector<profiling::RangeStats> snapshot = profiling::Snapshot();
  profiling::SetTimersEnabled(false);
  profiling::Reset();
  const auto find = [&](const std::string& category, const std::string& name) {
    const auto at = std::find_if(snapshot.begin(), snapshot.end(),
                                 [&](const profiling::RangeStats& s) { return s.category == category && s.name == name; });
    return at == snapshot.end() ? profiling::RangeStats{} : *at;
  };
  EXPECT_EQ(find("backward_down", "D3_gemm").calls, 1);
  EXPECT_EQ(find("backward_down", "D3_gemm").flops, 100.0);
  EXPECT_EQ(find("backward_down", "D3_gemm").bytes, 50.0);
  EXPECT_EQ(find("backward", "backward_down").calls, 1);
  EXPECT_EQ(find("backward", "backward_down").thread_ns, find("backward_down", "D3_gemm").thread_ns);
  EXPECT_EQ(find("backward", "backward_gate_up").calls, 1) << "the phase in GU3_lora_pass_up";
  EXPECT_EQ(find("GU3_lora_pass_up", "P").calls, 1);
  EXPECT_EQ(find("GU3_lora_pass_gate", "P").calls, 0);
}

}  // namespace
}  // namespace moesaic::moe
