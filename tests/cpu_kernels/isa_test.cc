// Which kernels run: what is reported, what is forced, what is refused.
#include "cpu_kernels/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cpu_kernels/kernels.h"

namespace moesaic {
namespace {

bool CanRun(const IsaTier& tier) { return tier.supported && tier.permitted && tier.compiled; }

TEST(Isa, TiersBestFirst) {
  const std::vector<IsaTier>& tiers = IsaTiers();
  ASSERT_FALSE(tiers.empty());
  const auto named = [&](const char* name) {
    return std::find_if(tiers.begin(), tiers.end(), [&](const IsaTier& tier) { return tier.name == name; });
  };
  for (const char* name : {"amx_bf16", "avx512_bf16", "avx512", "onednn"}) EXPECT_NE(named(name), tiers.end()) << name;
  ASSERT_NE(named("portable"), tiers.end());
  EXPECT_TRUE(CanRun(*named("portable")));
  EXPECT_TRUE(std::find_if(tiers.begin(), tiers.end(), CanRun)->chosen || std::getenv("MOESAIC_ISA") != nullptr);
  EXPECT_EQ(std::count_if(tiers.begin(), tiers.end(), [](const IsaTier& tier) { return tier.chosen; }), 1);
  for (const IsaTier& tier : tiers) {
    if (tier.chosen) {
      EXPECT_EQ(tier.name, ChosenIsa());
      EXPECT_TRUE(CanRun(tier));
    }
    if (tier.permitted) {
      EXPECT_TRUE(tier.supported) << tier.name;
    }
  }
}

TEST(Isa, EveryTierThatCanRunComputesRight) {
  for (const IsaTier& tier : IsaTiers()) EXPECT_EQ(VerifyIsa(tier.name), CanRun(tier)) << tier.name;
  EXPECT_FALSE(VerifyIsa("sse9"));
}

TEST(Isa, ForcedTierIsUsedOrRefused) {
  const std::string before(ChosenKernels().name);
  for (const IsaTier& tier : IsaTiers()) {
    if (CanRun(tier)) {
      ForceIsa(tier.name);
      EXPECT_EQ(ChosenIsa(), tier.name);
      EXPECT_EQ(ChosenKernels().name, tier.name);
      ForceIsa("");
    } else {
      EXPECT_THROW(ForceIsa(tier.name), UnsupportedHostError) << tier.name;
    }
    EXPECT_EQ(ChosenIsa(), before) << "after " << tier.name;
  }
  try {
    ForceIsa("sse9");
    FAIL() << "an unknown name was accepted";
  } catch (const UnsupportedHostError& error) {
    EXPECT_NE(std::string(error.what()).find("sse9"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos) << error.what();
  }
  EXPECT_EQ(ChosenIsa(), before);
}

TEST(Isa, CpuHasAName) { EXPECT_FALSE(CpuName().empty()); }

}  // namespace
}  // namespace moesaic
