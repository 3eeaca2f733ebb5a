// Random layers over the whole range of shapes, on every tier of kernels, against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "cpu_kernels/isa.h"
#include "cpu_kernels/kernels.h"
#include "tests/moe/expect.h"

namespace moesaic::moe {
namespace {

/// Draws specs over the whole range of shapes, kept small enough for the reference: at most kMaxWork multiplications in a
/// projection and kMaxWeights weights in one.
class SpecGenerator {
 public:
  explicit SpecGenerator(std::uint64_t seed) : random_(seed) {}

  ProblemSpec Next() {
    constexpr std::int64_t kMaxWork = 6'000'000;
    constexpr std::int64_t kMaxWeights = 1'500'000;
    ProblemSpec spec;
    spec.seed = random_();
    spec.tokens = Below(601);
    spec.experts = 1 + LogBelow(64);
    spec.top_k = std::min<std::int64_t>(spec.experts, 1 + Below(8));
    spec.hidden = 32 + LogBelow(993);
    spec.intermediate = 32 + LogBelow(993);
    while (spec.experts * spec.hidden * spec.intermediate > kMaxWeights) Halve(spec.experts > 8 ? spec.experts : Larger(spec));
    spec.top_k = std::min(spec.top_k, spec.experts);
    while (spec.tokens * spec.top_k * spec.hidden * spec.intermediate > kMaxWork) {
      Halve(Larger(spec) >= 128 ? Larger(spec) : spec.tokens);
    }
    spec.routing = Below(3) == 0 ? Routing::kSkewed : Routing::kUniform;
    spec.skipped = Below(3) == 0 ? 0.2 : 0.0;
    spec.duplicates = Below(4) == 0;
    spec.activations = Below(2) == 0 ? DType::kFloat32 : DType::kBFloat16;
    spec.ids = Below(2) == 0 ? DType::kInt64 : DType::kInt32;
    for (std::int64_t n = Below(3); n > 0; --n) spec.adapters.push_back(NextAdapter());
    return spec;
  }

  /// A call whose adapters may be used in place: few rows of many experts, fp32 in PEFT's layout.
  ProblemSpec NextInPlace() {
    ProblemSpec spec = Next();
    spec.experts = 12 + LogBelow(53);
    spec.top_k = 1 + Below(8);
    spec.tokens = 32 + LogBelow(97);  // of fewer rows and rank 1 an error is that of few numbers
    spec.hidden = 48 + LogBelow(300);
    spec.intermediate = 48 + LogBelow(300);
    if (spec.adapters.empty()) spec.adapters.push_back(NextAdapter());
    for (AdapterSpec& adapter : spec.adapters) {
      adapter.dtype = DType::kFloat32;
      adapter.peft_strides = true;
    }
    return spec;
  }

 private:
  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  /// In [0, n), small values more often.
  std::int64_t LogBelow(std::int64_t n) {
    const double u = static_cast<double>(random_() >> 11) * 0x1p-53;
    return static_cast<std::int64_t>(std::exp(u * std::log(static_cast<double>(n) + 1.0))) - 1;
  }

  static std::int64_t& Larger(ProblemSpec& spec) { return spec.hidden > spec.intermediate ? spec.hidden : spec.intermediate; }
  static void Halve(std::int64_t& size) { size = (size + 1) / 2; }

  AdapterSpec NextAdapter() {
    AdapterSpec adapter;
    const auto rank = [this] { return 1 + LogBelow(64); };
    const std::int64_t form = Below(4);
    if (form == 0 || form == 3) adapter.gate_up = rank();
    if (form == 1 || form == 3) adapter.gate = rank();
    if (form == 1 || form == 2) adapter.up = rank();
    if (form != 2 || Below(2) == 0) adapter.down = rank();
    adapter.scale = Below(2) == 0 ? 2.0f : 0.25f;
    adapter.dtype = Below(2) == 0 ? DType::kFloat32 : DType::kBFloat16;
    adapter.peft_strides = Below(2) == 0;
    return adapter;
  }

  std::mt19937_64 random_;
};

/// Every tier of kernels, and a seed: 200 random layers on each tier that runs here.
class RandomLayer : public testing::TestWithParam<std::tuple<std::string, std::uint64_t>> {};

TEST_P(RandomLayer, MatchesReference) {
  const auto& [tier, seed] = GetParam();
  try {
    ForceIsa(tier);
  } catch (const UnsupportedHostError& error) {
    GTEST_SKIP() << error.what();
  }
  threadpool::Pool pool(2);
  SpecGenerator generator(seed);
  for (int i = 0; i < 50; ++i) ExpectMatchesReference(generator.Next(), pool);
  ForceIsa("");
}

TEST_P(RandomLayer, MatchesReferenceWithAdaptersInPlace) {
  const auto& [tier, seed] = GetParam();
  try {
    ForceIsa(tier);
  } catch (const UnsupportedHostError& error) {
    GTEST_SKIP() << error.what();
  }
  threadpool::Pool pool(2);
  SpecGenerator generator(seed);
  for (int i = 0; i < 20; ++i) ExpectMatchesReference(generator.NextInPlace(), pool);
  ForceIsa("");
}

std::vector<std::string> TierNames() {
  std::set<std::string> names;
  for (const KernelTier* tier : KernelTiers()) names.insert(tier->name);
  return {names.begin(), names.end()};
}

INSTANTIATE_TEST_SUITE_P(Tiers, RandomLayer,
                         testing::Combine(testing::ValuesIn(TierNames()), testing::Range<std::uint64_t>(1, 5)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_seed" + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace moesaic::moe
