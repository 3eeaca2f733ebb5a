// The sampler's kernels on every tier that runs here, against plain loops in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"

namespace moesaic {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class SamplingKernelsTest : public testing::TestWithParam<const KernelTier*> {
 protected:
  const SamplingKernels& Kernels() const { return *GetParam()->sampling; }
};

/// A row of one type, and its values as the kernels see them.
struct TypedRow {
  std::vector<std::uint32_t> memory;
  std::vector<float> values;
  LogitRow row;

  TypedRow(std::int64_t size, DType dtype, float deviation, unsigned seed) : memory(static_cast<std::size_t>(size)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, deviation);
    const TensorView view{memory.data(), dtype, 2, {1, size, 0}, {0, 1, 0}};
    for (std::int64_t i = 0; i < size; ++i) {
      StoreFloat(view, 0, i, 0, random() % 20 == 0 ? -kInfinity : normal(random));
      values.push_back(LoadFloat(view, 0, i));
    }
    row = {memory.data(), dtype, size};
  }
};

TEST_P(SamplingKernelsTest, ScanGivesMaximaAndSumsOfBlocks) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t size : {1, 15, 16, 17, 255, 256, 257, 1000}) {
      for (const double temperature : {0.05, 1.0, 3.0}) {
        const TypedRow data(size, dtype, 4, static_cast<unsigned>(size));
        const std::int64_t blocks = data.row.blocks();
        std::vector<float> max(static_cast<std::size_t>(blocks)), sum(max), bound(max);
        ScanBlocksArgs maxima{data.row, 0, blocks, 1 / temperature, max.data()};
        maxima.bound = bound.data();
        Kernels().scan_blocks(maxima);
        const std::vector<float> with_bounds = max;
        Kernels().scan_blocks({data.row, 0, blocks, 1 / temperature, max.data(), sum.data()});
        ASSERT_EQ(with_bounds, max);
        for (std::int64_t b = 0; b < blocks; ++b) {
          const auto begin = data.values.begin() + b * kSamplingBlock;
          const auto end = data.values.begin() + std::min(size, (b + 1) * kSamplingBlock);
          const float expected = *std::max_element(begin, end);
          ASSERT_EQ(max[static_cast<std::size_t>(b)], expected);
          double exact = 0, parts[16] = {};
          if (expected > -kInfinity) {
            for (auto x = begin; x != end; ++x) {
              const double weight = std::exp((static_cast<double>(*x) - expected) / temperature);
              double& part = parts[(x - begin) % 16];
              part = std::max(part, weight);
              exact += weight;
            }
          }
          const double most = 16 * std::accumulate(parts, parts + 16, 0.0);
          // Each term to 2e-7, and sixteen additions a lane; a difference of logits is rounded before it is divided by T.
          const double rounding = 4e-7 + 2e-7 / temperature;
          ASSERT_NEAR(sum[static_cast<std::size_t>(b)], exact, rounding * exact) << "V " << size << ", T " << temperature;
          ASSERT_NEAR(bound[static_cast<std::size_t>(b)], most, rounding * most) << "V " << size << ", T " << temperature;
          ASSERT_LE(sum[static_cast<std::size_t>(b)], bound[static_cast<std::size_t>(b)] * 1.00001f);  // as the draw takes it
        }
      }
    }
  }
}

TEST_P(SamplingKernelsTest, ScanFindsNanAndInfinity) {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
    for (const std::size_t place : {0u, 100u, 255u, 256u, 270u}) {
      std::vector<float> x(271, 1.0f);
      x[place] = special;
      for (const bool with_sum : {false, true}) {
        float max[2], sum[2], bound[2];
        ScanBlocksArgs args{{x.data(), DType::kFloat32, 271}, 0, 2, 1, max, with_sum ? sum : nullptr};
        if (!with_sum) args.bound = bound;
        Kernels().scan_blocks(args);
        const std::size_t b = place / 256;
        if (!with_sum) {
          EXPECT_EQ(bound[b], 0.0f) << place;
        }
        EXPECT_TRUE(std::isnan(special) ? std::isnan(max[b]) : max[b] == kInfinity) << place;
        EXPECT_EQ(max[1 - b], 1.0f);
      }
    }
  }
}

/// Bitwise, but for the sign of a maximum of zero, of which normal numbers have none.
TEST_P(SamplingKernelsTest, ScansOfPiecesAreThoseOfTheWhole) {
  constexpr std::int64_t kBlocks = 23;
  std::mt19937 random(5);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const TypedRow data(kBlocks * kSamplingBlock - 100, dtype, 3, 7);
    struct Results {
      std::vector<float> maxima, bound, max, sum, above, coarse_max, coarse_sum;
      bool operator==(const Results&) const = default;
    };
    const auto scan = [&](const std::vector<std::int64_t>& cuts) {
      const std::vector<float> none(kBlocks, -1.0f);
      Results r{none, none, none, none, none, none, none};
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const std::int64_t first = cuts[i], last = cuts[i + 1];
        ScanBlocksArgs maxima{data.row, first, last, 0.8, r.maxima.data()};
        maxima.bound = r.bound.data();
        Kernels().scan_blocks(maxima);
        Kernels().scan_blocks({data.row, first, last, 0.8, r.max.data(), r.sum.data(), r.above.data(), 0.5f});
        Kernels().scan_coarsely({data.row, first, last, 0.8, 2.0f, r.coarse_max.data(), r.coarse_sum.data()});
      }
      return r;
    };
    const Results whole = scan({0, kBlocks});
    EXPECT_EQ(whole.maxima, whole.max);
    EXPECT_EQ(whole.maxima, whole.coarse_max);
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<std::int64_t> cuts{0, kBlocks};
      for (int i = 0; i < 3; ++i) cuts.push_back(static_cast<std::int64_t>(random() % (kBlocks + 1)));
      std::sort(cuts.begin(), cuts.end());
      ASSERT_TRUE(scan(cuts) == whole) << testing::PrintToString(cuts);
    }
  }
}

TEST_P(SamplingKernelsTest, CollectTakesWhatIsBetween) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t size : {1, 16, 31, 256, 257, 700, 1000, 2000}) {
      const TypedRow data(size, dtype, 2, static_cast<unsigned>(size) + 1);
      const std::int64_t blocks = data.row.blocks();
      std::vector<float> max(static_cast<std::size_t>(blocks));
      Kernels().scan_blocks({data.row, 0, blocks, 1, max.data(), nullptr});
      std::vector<float> values(static_cast<std::size_t>(size) + 16);
      std::vector<std::int32_t> columns(values.size());
      std::vector<double> mass(static_cast<std::size_t>(blocks), -1.0);
      for (const bool with_mass : {false, true}) {
        const float low = 0.5f, high = with_mass ? 1.5f : kInfinity;
        const std::int64_t count = Kernels().collect({data.row, 0, blocks, max.data(), low, high, 2.0, 1.0,
                                                      with_mass ? mass.data() : nullptr, values.data(), columns.data()});
        std::int64_t next = 0;
        std::vector<double> expected(mass.size());
        for (std::int64_t i = 0; i < size; ++i) {
          const float x = data.values[static_cast<std::size_t>(i)];
          if (x > high) expected[static_cast<std::size_t>(i / kSamplingBlock)] += std::exp(static_cast<double>(x) - 2);
          if (x < low || x > high) continue;
          ASSERT_LT(next, count);
          ASSERT_EQ(values[static_cast<std::size_t>(next)], x);
          ASSERT_EQ(columns[static_cast<std::size_t>(next)], i);
          ++next;
        }
        ASSERT_EQ(next, count);
        if (!with_mass) continue;
        for (std::size_t b = 0; b < mass.size(); ++b) ASSERT_NEAR(mass[b], expected[b], 1e-6 * expected[b]);
      }
    }
  }
}

TEST_P(SamplingKernelsTest, WeightsAreThoseOfTheLibrary) {
  std::vector<float> x;
  for (int i = 0; i < 2000; ++i) x.push_back(-0.4f * static_cast<float>(i));
  x.push_back(-kInfinity);
  std::vector<double> weights(x.size());
  Kernels().weights({x.data(), static_cast<std::int64_t>(x.size()), 0.0, 0.9, weights.data()});
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double argument = static_cast<double>(x[i]) / 0.9;
    if (argument > -708) {
      ASSERT_NEAR(weights[i] / std::exp(argument), 1, 1e-15 * (1 - argument)) << x[i];  // the argument's own rounding
    } else {
      ASSERT_EQ(weights[i], 0) << x[i];
    }
  }
}

TEST_P(SamplingKernelsTest, ScanCutsSums) {
  const float high = 0.75f;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const TypedRow data(1000, dtype, 1, 3);
    std::vector<float> max(4), sum(4), above(4);
    Kernels().scan_blocks({data.row, 0, 4, 1.0, max.data(), sum.data(), above.data(), high});
    std::vector<double> expected(4);
    for (std::size_t i = 0; i < data.values.size(); ++i) {
      const float x = data.values[i], top = max[i / kSamplingBlock];
      if (x > high) expected[i / kSamplingBlock] += std::exp(static_cast<double>(x) - top);
    }
    // 2e-7 of each block's sum, as sum[b] is (sampling_kernels.h).
    for (std::size_t b = 0; b < 4; ++b) ASSERT_NEAR(above[b], expected[b], 2e-7 * sum[b]) << b;
  }
}

/// Against 2^(x c - m) of the same rounded c; off by 3e-6 a term, 5e-7 in adding up, and without fused multiply-adds the
/// rounding of x c.
TEST_P(SamplingKernelsTest, CoarseSumsAreWithinTheirBound) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t size : {1, 17, 256, 1000}) {
      for (const double temperature : {0.05, 1.0, 3.0}) {
        const TypedRow data(size, dtype, 4, static_cast<unsigned>(size));
        const std::int64_t blocks = data.row.blocks();
        const double c = CoarseScale(1 / temperature);
        const float top = *std::max_element(data.values.begin(), data.values.end());
        const float m = top > -kInfinity ? static_cast<float>(std::round(c * top)) - 2 : 0.0f;
        std::vector<float> max(static_cast<std::size_t>(blocks)), sum(max);
        Kernels().scan_coarsely({data.row, 0, blocks, 1 / temperature, m, max.data(), sum.data()});
        for (std::int64_t b = 0; b < blocks; ++b) {
          const auto begin = data.values.begin() + b * kSamplingBlock;
          const auto end = data.values.begin() + std::min(size, (b + 1) * kSamplingBlock);
          ASSERT_EQ(max[static_cast<std::size_t>(b)], *std::max_element(begin, end));
          double exact = 0;
          for (auto x = begin; x != end; ++x) exact += std::exp2(c * static_cast<double>(*x) - m);
          const double most = 3.5e-6 + 4.2e-8 * (std::abs(m) + 140);
          ASSERT_NEAR(sum[static_cast<std::size_t>(b)], exact, most * exact + 300 * 0x1p-126) << "V " << size;
        }
      }
    }
  }
}

TEST_P(SamplingKernelsTest, CoarseScanFindsNanAndInfinity) {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), kInfinity, 3e38f}) {
    for (const std::size_t place : {0u, 100u, 255u, 256u, 270u}) {
      std::vector<float> x(271, 1.0f);
      x[place] = special;
      float max[2], sum[2];
      Kernels().scan_coarsely({{x.data(), DType::kFloat32, 271}, 0, 2, 1, 1, max, sum});
      const std::size_t b = place / 256;
      EXPECT_TRUE(std::isnan(special) ? std::isnan(max[b]) : max[b] == special) << place;
      EXPECT_EQ(max[1 - b], 1.0f);
    }
  }
}

TEST_P(SamplingKernelsTest, ASampleIsSpreadOverTheRow) {
  for (const std::int64_t size : {kSamplingRun, kSamplingRun + 1, std::int64_t{100}, std::int64_t{8193}, std::int64_t{50000}}) {
    std::vector<float> row(static_cast<std::size_t>(size)), values(kSamplingSample);
    std::iota(row.begin(), row.end(), 0.0f);
    Kernels().sample({row.data(), DType::kFloat32, size}, values.data());
    EXPECT_EQ(values[0], 0);
    EXPECT_GE(values[kSamplingSample - 1], static_cast<float>(size - 1 - kSamplingRun));
    for (std::size_t i = 1; i < values.size(); ++i) {
      const bool begins = static_cast<std::int64_t>(i) % kSamplingRun == 0;
      ASSERT_TRUE(begins ? values[i] >= values[i - 1] - (kSamplingRun - 1) : values[i] == values[i - 1] + 1)
          << size << " " << i;
    }
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {  // half of the bytes
      std::vector<std::uint16_t> ones(static_cast<std::size_t>(size), 0x3c00);
      Kernels().sample({ones.data(), dtype, size}, values.data());
      ASSERT_EQ(std::count(values.begin(), values.end(), values[0]), kSamplingSample);
    }
  }
}

/// The mass above the estimate is p within three standard deviations of 4,096 normal logits' (0.9%), and the density below it
/// within four of some hundred elements'.
TEST_P(SamplingKernelsTest, TheEstimateIsNearTheBoundary) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const TypedRow data(50000, DType::kFloat32, 1, seed);
    const TopPEstimate estimate = Kernels().estimate_top_p({data.row, 1.0, 0.9});
    const float top = *std::max_element(data.values.begin(), data.values.end());
    ASSERT_LE(estimate.top, top);
    ASSERT_GT(estimate.top, top - 2);
    double total = 0, above = 0, below = 0;
    for (const float x : data.values) {
      const double weight = std::exp(static_cast<double>(x));
      total += weight;
      above += x > estimate.boundary ? weight : 0;
      below += x <= estimate.boundary && x > estimate.boundary - 0.1f ? weight : 0;
    }
    ASSERT_NEAR(above / total, 0.9, 0.027) << seed;
    ASSERT_NEAR(estimate.density / (below / total / 0.1), 1, 0.4) << seed;
  }
}

/// Of rows in which a few logits have most of the mass: what the sample has below the boundary is within a third of its share.
TEST_P(SamplingKernelsTest, TheEstimateKnowsWhatIsBelowWhereTheWholeIsKnown) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const TypedRow data(50000, DType::kFloat32, 3, seed);
    const double reference = *std::max_element(data.values.begin(), data.values.end());
    const auto mass_up_to = [&](float bound) {
      double sum = 0;
      for (const float x : data.values) sum += x <= bound ? std::exp(static_cast<double>(x) - reference) : 0;
      return sum;
    };
    const double total = mass_up_to(kInfinity);
    EXPECT_EQ(Kernels().estimate_top_p({data.row, 1.0, 0.9}).density, 0);
    const TopPEstimate estimate = Kernels().estimate_top_p({data.row, 1.0, 0.9, total, reference});
    ASSERT_NEAR(mass_up_to(estimate.boundary) / total, 0.1, 0.033) << seed;
    const double window = mass_up_to(estimate.boundary) - mass_up_to(estimate.boundary - 0.3f);
    ASSERT_NEAR(estimate.density / (window / total / 0.3), 1, 0.5) << seed;
    // More than the sample has, or a few elements.
    EXPECT_EQ(Kernels().estimate_top_p({data.row, 1.0, 0.9, 1e9 * total, reference}).density, 0);
    EXPECT_EQ(Kernels().estimate_top_p({data.row, 0.01, 0.9999, total, reference}).density, 0);
  }
}

TEST_P(SamplingKernelsTest, ASampleThatSaysNothingGivesNoEstimate) {
  TypedRow data(50000, DType::kFloat32, 12, 1);  // so peaked that a few elements decide
  EXPECT_EQ(Kernels().estimate_top_p({data.row, 1.0, 0.9}).density, 0);
  EXPECT_LT(Kernels().estimate_top_p({data.row, 1.0, 0.9}).top, kInfinity);
  std::fill(data.memory.begin(), data.memory.end(), 0x7fc00000u);
  EXPECT_EQ(Kernels().estimate_top_p({data.row, 1.0, 0.9}).density, 0);
  EXPECT_EQ(Kernels().estimate_top_p({data.row, 1.0, 0.9}).top, kInfinity);
}

/// What top_p relies on when it takes the fast sums for sure (filters.cc).
TEST_P(SamplingKernelsTest, SumsAreAsExactAsTheyAreTakenFor) {
  for (const float deviation : {0.3f, 1.0f, 4.0f, 12.0f}) {
    for (const double temperature : {0.1, 0.7, 1.0}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        const TypedRow data(20000, DType::kFloat32, deviation, seed);
        const std::int64_t blocks = data.row.blocks();
        std::vector<float> max(static_cast<std::size_t>(blocks)), sum(max);
        std::vector<double> mass(max.size());
        Kernels().scan_blocks({data.row, 0, blocks, 1 / temperature, max.data(), sum.data()});
        const float top = *std::max_element(max.begin(), max.end());
        Kernels().block_mass({max.data(), sum.data(), blocks, top, 1 / temperature, mass.data()});
        const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
        const double squares = std::inner_product(mass.begin(), mass.end(), mass.begin(), 0.0);
        const ExactSums exact = Kernels().exact_sums({data.row, top - 1, top, temperature});
        double reference = 0, above = 0;
        for (const float x : data.values) {
          const double w = std::exp((static_cast<double>(x) - top) / temperature);
          reference += w;
          above += x > top - 1 ? w : 0;
        }
        ASSERT_NEAR(exact.all, reference, 1e-13 * reference);
        ASSERT_NEAR(exact.above, above, 1e-13 * above);
        ASSERT_NEAR(total, reference, 3e-7 * std::sqrt(squares) + 2.5e-9 * reference);
      }
    }
  }
}

/// Known answers of Random123: a counter and key of zeros, of ones, and digits of pi. With all weights but one zero the race
/// says which words it used only through who wins, so the words are checked through the exponential numbers of two runners.
TEST_P(SamplingKernelsTest, RaceUsesPhilox) {
  // philox4x32-10 of counter 0 and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8. Columns 0, 16, 32, 48 use these words.
  const std::uint32_t words[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  const auto time = [](std::uint32_t word) { return -std::log((static_cast<double>(word) + 0.5) * 0x1p-32); };
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) {
      if (a == b) continue;
      const std::int32_t columns[2] = {16 * a, 16 * b};
      for (const double factor : {0.9999, 1.0001}) {
        // Weights under which runner 0 is just ahead of, or just behind, runner 1.
        const double weights[2] = {time(words[a]), factor * time(words[b])};
        EXPECT_EQ(Kernels().race({weights, columns, 2, {}}), factor > 1 ? 1 : 0) << a << b;
      }
    }
  }
}

TEST_P(SamplingKernelsTest, RaceNeedsAWeight) {
  std::vector<double> weights(300, 0.0);
  std::vector<std::int32_t> columns(300);
  std::iota(columns.begin(), columns.end(), 0);
  EXPECT_EQ(Kernels().race({weights.data(), columns.data(), 300, {}}), -1);
  weights[271] = 1e-300;
  EXPECT_EQ(Kernels().race({weights.data(), columns.data(), 300, {.seed = 5}}), 271);
}

/// With its own number as weight each of two columns arrives at 1, so a slightly larger or smaller weight decides.
TEST_P(SamplingKernelsTest, ExponentialsAreThoseOfTheRace) {
  std::vector<double> numbers(320);
  const PhiloxStream stream{.seed = 7, .offset = 3, .row = 2};
  Kernels().exponentials({300, stream, numbers.data()});
  for (std::int32_t i = 0; i < 299; ++i) {
    const std::int32_t columns[2] = {i, i + 1};
    for (const double factor : {0.999999, 1.000001}) {
      const double weights[2] = {numbers[static_cast<std::size_t>(i)], factor * numbers[static_cast<std::size_t>(i) + 1]};
      ASSERT_EQ(Kernels().race({weights, columns, 2, stream}), factor > 1 ? 1 : 0) << i;
    }
  }
}

std::vector<const KernelTier*> RunnableTiers() {
  std::vector<const KernelTier*> tiers;
  for (const KernelTier* tier : KernelTiers()) {
    if (tier->runs_here()) tiers.push_back(tier);
  }
  return tiers;
}

INSTANTIATE_TEST_SUITE_P(Tiers, SamplingKernelsTest, testing::ValuesIn(RunnableTiers()),
                         [](const auto& info) { return std::string(info.param->name) + "_" + std::to_string(info.index); });

}  // namespace
}  // namespace moesaic
