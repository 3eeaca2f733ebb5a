// What is kept and drawn, against a reference that sorts in double precision.
#include "sampling/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu_kernels/isa.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"

namespace moesaic::sampling {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

threadpool::Pool& TestPool() {
  static threadpool::Pool pool(2);
  return pool;
}

/// The distribution that is left, all in double precision and with whole sorts: the definition in sampler.h.
std::vector<double> Reference(const std::vector<float>& logits, const Options& o) {
  const std::size_t size = logits.size();
  std::vector<double> z(logits.begin(), logits.end());
  const double top = *std::max_element(z.begin(), z.end());
  if (std::isinf(top)) {
    for (double& x : z) x = x == top ? 0 : -static_cast<double>(kInfinity);
  }
  const double base = std::isinf(top) ? 0 : top;
  const double t = o.temperature == 0 ? 1 : o.temperature;
  std::vector<double> w(size);
  for (std::size_t i = 0; i < size; ++i) w[i] = std::isinf(z[i]) ? 0 : std::exp((z[i] - base) / t);
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return z[a] > z[b]; });
  std::vector<bool> kept(size);
  for (std::size_t i = 0; i < size; ++i) kept[i] = !std::isinf(z[i]);
  const auto keep_until = [&](const std::vector<std::size_t>& by, double share) {
    double total = 0, before = 0;
    for (const std::size_t i : by) total += kept[i] ? w[i] : 0;
    for (const std::size_t i : by) {
      if (!kept[i]) continue;
      kept[i] = before < share * total;
      before += w[i];
    }
  };
  if (o.temperature == 0) {
    std::fill(kept.begin(), kept.end(), false);
    kept[order[0]] = true;
  } else {
    if (o.top_k > 0) {
      for (std::size_t n = static_cast<std::size_t>(o.top_k); n < size; ++n) kept[order[n]] = false;
    }
    if (o.top_p < 1) keep_until(order, o.top_p);
    for (std::size_t i = 0; i < size; ++i) kept[i] = kept[i] && w[i] >= o.min_p;
    if (o.typical_p < 1) {
      double total = 0, entropy = 0;
      for (std::size_t i = 0; i < size; ++i) total += kept[i] ? w[i] : 0;
      std::vector<double> distance(size);
      for (std::size_t i = 0; i < size; ++i) {
        distance[i] = std::log(total) - (z[i] - base) / t;
        if (kept[i]) entropy += w[i] / total * distance[i];
      }
      for (double& d : distance) d = std::abs(d - entropy);
      std::vector<std::size_t> nearest(size);
      std::iota(nearest.begin(), nearest.end(), std::size_t{0});
      std::stable_sort(nearest.begin(), nearest.end(), [&](std::size_t a, std::size_t b) { return distance[a] < distance[b]; });
      keep_until(nearest, o.typical_p);
    }
  }
  double total = 0;
  for (std::size_t i = 0; i < size; ++i) total += kept[i] ? w[i] : 0;
  for (std::size_t i = 0; i < size; ++i) w[i] = kept[i] ? std::max(w[i] / total, 1e-300) : 0;
  return w;
}

std::vector<std::uint8_t> Kept(const std::vector<float>& logits, std::int64_t rows, const Options& options) {
  const auto columns = static_cast<std::int64_t>(logits.size()) / rows;
  std::vector<std::uint8_t> kept(logits.size());
  SampleArgs args;
  args.logits = {const_cast<float*>(logits.data()), DType::kFloat32, 2, {rows, columns, 0}, {columns, 1, 0}};
  args.options = options;
  args.kept = kept.data();
  Sample(args, TestPool());
  return kept;
}

void ExpectReference(const std::vector<float>& logits, std::int64_t rows, const Options& options, const std::string& what) {
  const std::size_t columns = logits.size() / static_cast<std::size_t>(rows);
  const std::vector<std::uint8_t> kept = Kept(logits, rows, options);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(r * columns);
    const std::vector<double> expected = Reference({begin, begin + static_cast<std::ptrdiff_t>(columns)}, options);
    std::int64_t more = 0, fewer = 0;
    for (std::size_t i = 0; i < columns; ++i) {
      more += kept[r * columns + i] != 0 && expected[i] == 0 ? 1 : 0;
      fewer += kept[r * columns + i] == 0 && expected[i] > 0 ? 1 : 0;
    }
    ASSERT_EQ(more, 0) << what << ", row " << r;
    ASSERT_EQ(fewer, 0) << what << ", row " << r;
  }
}

std::vector<float> Normal(std::int64_t count, float deviation, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& v : x) v = normal(random);
  return x;
}

TEST(Sampler, KeepsWhatTheReferenceKeeps) {
  for (const std::int64_t columns : {1, 2, 255, 256, 257, 1000, 9000, 40000}) {
    const std::int64_t rows = columns > 5000 ? 4 : 20;
    for (const float deviation : {0.5f, 3.0f}) {
      const std::vector<float> logits = Normal(rows * columns, deviation, static_cast<unsigned>(columns));
      for (const std::int64_t k : {0, 50, 700}) {
        for (const double p : {1.0, 0.1, 0.9}) {
          ExpectReference(logits, rows, {.temperature = 0.7, .top_k = k, .top_p = p},
                          "V " + std::to_string(columns) + " k " + std::to_string(k) + " p " + std::to_string(p));
        }
      }
      for (const double q : {0.02, 0.5, 0.95}) {
        const std::string what = "V " + std::to_string(columns) + " q " + std::to_string(q);
        ExpectReference(logits, rows, {.min_p = q}, "min_p " + what);
        ExpectReference(logits, rows, {.top_p = 0.8, .min_p = q}, "top_p, min_p " + what);
        ExpectReference(logits, rows, {.typical_p = q}, "typical_p " + what);
        ExpectReference(logits, rows, {.top_k = 100, .top_p = 0.9, .min_p = 0.001, .typical_p = q}, "all " + what);
      }
    }
  }
}

/// Where max + T log(min_p) is near 0, more floats have its probability than can be tried one by one.
TEST(Sampler, KeepsWhatTheReferenceKeepsByMinPNearZero) {
  for (const std::vector<float>& row :
       {std::vector<float>{-1, -3, 0}, {0, -30, -0.0f}, {1e-20f, -1, -1e-20f, 1e-42f}, {1, -3, -2}}) {
    for (const double min_p : {1.0, 1 - 1e-15, 0.36787944117144233}) {
      ExpectReference(row, 1, {.temperature = 0.7, .min_p = min_p}, "min_p " + std::to_string(min_p));
      ExpectReference(row, 1, {.min_p = min_p}, "min_p " + std::to_string(min_p));
    }
  }
}

/// Between flat rows, of which a sample knows the boundary, and peaked ones.
TEST(Sampler, KeepsWhatTheReferenceKeepsOfRowsWithAThousandProbableTokens) {
  constexpr std::int64_t kRows = 3, kColumns = 50000;
  for (const float deviation : {2.2f, 2.7f, 3.3f, 4.0f, 6.0f}) {
    const std::vector<float> logits = Normal(kRows * kColumns, deviation, 21);
    for (const double p : {0.3, 0.9, 0.99, 0.9999}) {
      ExpectReference(logits, kRows, {.top_p = p}, "deviation " + std::to_string(deviation) + ", p " + std::to_string(p));
    }
  }
}

/// Rows of which many hold equal logits, zeros of both signs, and infinities.
std::vector<float> Awkward(std::int64_t rows, std::int64_t columns, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> x = Normal(rows * columns, 2, seed);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = x.data() + r * columns;
    const unsigned kind = random() % 6;
    for (std::int64_t i = 0; i < columns; ++i) {
      if (kind == 1) row[i] = std::round(row[i]);                // ties everywhere
      if (kind == 2) row[i] = random() % 2 != 0 ? 0.0f : -0.0f;  // all equal
      if (kind == 3 && random() % 3 == 0) row[i] = -kInfinity;
      if (kind == 4) row[i] = random() % 50 == 0 || i == 3 ? row[i] : -kInfinity;
      if (kind == 5 && (random() % 100 == 0 || i == 7)) row[i] = kInfinity;
    }
  }
  return x;
}

TEST(Sampler, KeepsWhatTheReferenceKeepsOfTenThousandRows) {
  constexpr std::int64_t kRows = 1000, kColumns = 307;
  for (unsigned i = 0; i < 10; ++i) {
    const std::vector<float> logits = Awkward(kRows, kColumns, i);
    const Options options{.temperature = 0.5 + 0.2 * i, .top_k = i % 3 == 0 ? 0 : 40 + i, .top_p = i % 3 == 1 ? 1.0 : 0.93};
    ExpectReference(logits, kRows, options, "batch " + std::to_string(i));
  }
}

TEST(Sampler, KeepsWhatTheReferenceKeepsOfLongAwkwardRows) {
  for (unsigned seed = 0; seed < 3; ++seed) {
    const std::vector<float> logits = Awkward(6, 20000, seed);
    for (const Options& options : {Options{.top_p = 0.9}, Options{.top_k = 60}, Options{.top_k = 3000, .top_p = 0.5},
                                   Options{.temperature = 20, .top_p = 0.97}, Options{.temperature = 0}}) {
      ExpectReference(logits, 6, options, "seed " + std::to_string(seed));
    }
  }
}

/// A row made to mislead samples: what is probable lies where no sample looks, sorted, or in one place.
TEST(Sampler, NoOrderOfTheLogitsMisleads) {
  constexpr std::int64_t kColumns = 30000;
  const std::vector<float> normal = Normal(kColumns, 1, 3);
  std::vector<float> ascending = normal, one_place = normal, comb(normal.size(), 0.0f);
  std::sort(ascending.begin(), ascending.end());
  std::fill(one_place.begin() + 5000, one_place.begin() + 5100, 9.0f);
  for (std::size_t i = 0; i < comb.size(); i += 117) comb[i + (i / 117) % 60] = 6.0f + 1e-4f * static_cast<float>(i % 1000);
  std::vector<float> descending(ascending.rbegin(), ascending.rend());
  for (const std::vector<float>& logits : {ascending, descending, one_place, comb}) {
    for (const double p : {0.001, 0.3, 0.6, 0.9, 0.99, 0.99999}) {
      ExpectReference(logits, 1, {.top_p = p}, "p " + std::to_string(p));
      ExpectReference(logits, 1, {.top_k = 9000, .top_p = p}, "k, p " + std::to_string(p));
    }
  }
}

/// Rows whose probabilities fall as a power of the rank, as those of language models do: coarse sums decide most of them. Far
/// from zero, where exponents are large numbers; rounded to quarters, where most logits are tied; with an outlier that no
/// sample meets.
TEST(Sampler, KeepsWhatTheReferenceKeepsOfPeakedRows) {
  constexpr std::int64_t kRows = 4, kColumns = 12000;
  std::mt19937 random(5);
  for (const float power : {0.9f, 1.5f, 4.0f}) {
    std::vector<float> x = Normal(kRows * kColumns, 0.3f, 9);
    for (std::int64_t r = 0; r < kRows; ++r) {
      float* row = x.data() + r * kColumns;
      for (std::int64_t i = 0; i < kColumns; ++i) row[i] -= power * std::log(1.0f + static_cast<float>(i));
      std::shuffle(row, row + kColumns, random);
    }
    for (const float offset : {0.0f, 300.0f, -20000.0f}) {
      std::vector<float> moved = x;
      for (float& v : moved) v += offset;
      std::vector<float> tied = moved, outlier = moved;
      for (float& v : tied) v = std::round(4 * v) / 4;
      outlier[5001] += 500;
      for (const std::vector<float>& logits : {moved, tied, outlier}) {
        for (const Options& options :
             {Options{.top_p = 0.9}, Options{.temperature = 0.3, .top_p = 0.99}, Options{.temperature = 2.5, .top_p = 0.5}}) {
          ExpectReference(logits, kRows, options, "power " + std::to_string(power) + ", offset " + std::to_string(offset));
        }
      }
    }
  }
}

struct Draws {
  std::vector<std::int64_t> ids;
  std::vector<float> confidence;
};

/// `rows` draws from one row, or from as many as there are.
Draws Draw(const std::vector<float>& logits, std::int64_t rows, const Options& options, std::uint64_t seed,
           threadpool::Pool& pool, bool one_row, Confidence kind = Confidence::kProbability,
           const std::int64_t* row_ids = nullptr) {
  const std::int64_t columns = static_cast<std::int64_t>(logits.size()) / (one_row ? 1 : rows);
  Draws draws{std::vector<std::int64_t>(static_cast<std::size_t>(rows)), std::vector<float>(static_cast<std::size_t>(rows))};
  SampleArgs args;
  args.logits = {const_cast<float*>(logits.data()), DType::kFloat32, 2, {rows, columns, 0}, {one_row ? 0 : columns, 1, 0}};
  args.options = options;
  args.seed = seed;
  args.ids = draws.ids.data();
  args.confidence = draws.confidence.data();
  args.confidence_kind = kind;
  if (row_ids != nullptr) args.row_ids = {const_cast<std::int64_t*>(row_ids), DType::kInt64, 1, {rows, 0, 0}, {1, 0, 0}};
  Sample(args, pool);
  return draws;
}

/// A million draws, and how far their frequencies are from the exact distribution: chi-square with n degrees of freedom has
/// mean n and variance 2 n, so mean + 5 deviations is passed by chance less than once in a million runs; the seed is fixed
/// besides.
TEST(Sampler, AMillionDrawsFollowTheDistribution) {
  constexpr std::int64_t kDraws = 1000000;
  for (const std::int64_t columns : {12, 300}) {
    const std::vector<float> logits = Normal(columns, 1.5f, 11);
    for (const Options& options : {Options{.temperature = 0.8}, Options{.top_k = 9, .top_p = 0.95}, Options{.min_p = 0.05}}) {
      if (columns > 100 && options.temperature == 1) continue;  // a long row once
      const std::vector<double> expected = Reference(logits, options);
      const Draws draws = Draw(logits, kDraws, options, 17, TestPool(), true);
      std::vector<std::int64_t> counts(expected.size());
      for (std::size_t i = 0; i < draws.ids.size(); ++i) {
        const auto id = static_cast<std::size_t>(draws.ids[i]);
        ++counts[id];
        ASSERT_NEAR(draws.confidence[i], expected[id], 1e-6 * expected[id]);
      }
      double chi_square = 0, freedom = -1;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (expected[i] == 0) {
          ASSERT_EQ(counts[i], 0) << i;
          continue;
        }
        const double mean = expected[i] * kDraws;
        chi_square += (static_cast<double>(counts[i]) - mean) * (static_cast<double>(counts[i]) - mean) / mean;
        ++freedom;
      }
      EXPECT_LT(chi_square, freedom + 5 * std::sqrt(2 * freedom)) << "V " << columns;
      EXPECT_GT(chi_square, freedom - 5 * std::sqrt(2 * freedom)) << "V " << columns;
    }
  }
}

TEST(Sampler, LongRowsAreDrawnFromEvenly) {
  // Every block the same logits: the block of the token is uniform, and so is its place.
  constexpr std::int64_t kColumns = 10 * kSamplingBlock, kDraws = 50000;
  const std::vector<float> logits(static_cast<std::size_t>(kColumns), 1.0f);
  const Draws draws = Draw(logits, kDraws, {}, 3, TestPool(), true);
  std::vector<double> blocks(10), places(16);
  for (const std::int64_t id : draws.ids) {
    ++blocks[static_cast<std::size_t>(id / kSamplingBlock)];
    ++places[static_cast<std::size_t>(id % 16)];
  }
  for (const double n : blocks) EXPECT_NEAR(n, kDraws / 10.0, 5 * std::sqrt(kDraws / 10.0));
  for (const double n : places) EXPECT_NEAR(n, kDraws / 16.0, 5 * std::sqrt(kDraws / 16.0));
}

/// Only with their probabilities are the sums of all blocks known when the block is drawn.
TEST(Sampler, TokensDoNotDependOnWhatElseIsAsked) {
  constexpr std::int64_t kColumns = 20000, kDraws = 2000;
  for (const float deviation : {0.5f, 2.0f, 8.0f}) {
    const std::vector<float> logits = Normal(kColumns, deviation, 6);
    for (const Options& options : {Options{}, Options{.temperature = 0.1}}) {
      const Draws known = Draw(logits, kDraws, options, 21, TestPool(), true);
      EXPECT_EQ(Draw(logits, kDraws, options, 21, TestPool(), true, Confidence::kMargin).ids, known.ids) << deviation;
    }
  }
  // Infinities share all there is, in every block alike.
  std::vector<float> logits = Normal(kColumns, 1, 7);
  const std::vector<std::int64_t> infinite = {3, 700, 701, 5000, 19999};
  for (const std::int64_t i : infinite) logits[static_cast<std::size_t>(i)] = kInfinity;
  const Draws known = Draw(logits, kDraws, {}, 22, TestPool(), true);
  EXPECT_EQ(Draw(logits, kDraws, {}, 22, TestPool(), true, Confidence::kMargin).ids, known.ids);
  for (const std::int64_t i : infinite) EXPECT_NEAR(std::count(known.ids.begin(), known.ids.end(), i), 400, 100) << i;
}

/// The bracket of top_p is looked at only in the blocks that may win: by chi-square, as above, of the blocks' frequencies.
TEST(Sampler, BlocksOfANucleusAreDrawnByTheirMasses) {
  constexpr std::int64_t kColumns = 20000, kDraws = 20000, kBlocks = (kColumns + kSamplingBlock - 1) / kSamplingBlock;
  const std::vector<float> logits = Normal(kColumns, 1, 12);
  const std::vector<double> expected = Reference(logits, {.top_p = 0.9});
  const Draws draws = Draw(logits, kDraws, {.top_p = 0.9}, 5, TestPool(), true);
  std::vector<double> means(kBlocks), counts(kBlocks);
  for (std::size_t i = 0; i < expected.size(); ++i) means[i / kSamplingBlock] += expected[i] * kDraws;
  for (const std::int64_t id : draws.ids) {
    ASSERT_GT(expected[static_cast<std::size_t>(id)], 0) << id;
    ++counts[static_cast<std::size_t>(id / kSamplingBlock)];
  }
  double chi_square = 0;
  for (std::size_t b = 0; b < means.size(); ++b) chi_square += (counts[b] - means[b]) * (counts[b] - means[b]) / means[b];
  const double freedom = kBlocks - 1;
  EXPECT_LT(chi_square, freedom + 5 * std::sqrt(2 * freedom));
  EXPECT_GT(chi_square, freedom - 5 * std::sqrt(2 * freedom));
}

TEST(Sampler, TokensDoNotDependOnThreadsOrNeighbours) {
  for (const float deviation : {1.0f, 5.0f}) {
    constexpr std::int64_t kRows = 5, kColumns = 70000;
    const std::vector<float> logits = Normal(kRows * kColumns, deviation, 2);
    for (const Options& options : {Options{}, Options{.top_k = 50}, Options{.top_p = 0.9}, Options{.top_k = 50, .top_p = 0.9},
                                   Options{.min_p = 0.01}, Options{.typical_p = 0.5}, Options{.top_p = 0.95, .min_p = 0.001}}) {
      threadpool::Pool alone(1);
      const Draws expected = Draw(logits, kRows, options, 9, alone, false);
      for (const int threads : {2, 3, 7, 32}) {
        threadpool::Pool pool(threads);
        const Draws draws = Draw(logits, kRows, options, 9, pool, false);
        EXPECT_EQ(draws.ids, expected.ids) << threads;
        EXPECT_EQ(draws.confidence, expected.confidence) << threads;
      }
      for (std::int64_t r = 0; r < kRows; ++r) {  // each row by itself, under its name
        const auto begin = logits.begin() + r * kColumns;
        const Draws draws = Draw({begin, begin + kColumns}, 1, options, 9, alone, false, Confidence::kProbability, &r);
        EXPECT_EQ(draws.ids[0], expected.ids[static_cast<std::size_t>(r)]);
      }
    }
  }
}

TEST(Sampler, ConfidenceIsOfTheDistributionDrawnFrom) {
  for (const std::int64_t columns : {50, 20000}) {
    const std::vector<float> logits = Normal(columns, 2, 8);
    for (const Options& options : {Options{.temperature = 0}, Options{.temperature = 1.3}, Options{.top_k = 7},
                                   Options{.top_p = 0.8}, Options{.min_p = 0.2}}) {
      const std::vector<double> kept = Reference(logits, options);
      const std::vector<double> p = options.temperature == 0 ? Reference(logits, {}) : kept;
      std::vector<double> sorted = p;
      std::sort(sorted.rbegin(), sorted.rend());
      double entropy = 0;
      for (const double v : p) entropy -= v > 1e-290 ? v * std::log(v) : 0;
      const Draws probability = Draw(logits, 1, options, 4, TestPool(), true);
      const auto id = static_cast<std::size_t>(probability.ids[0]);
      EXPECT_GT(kept[id], 0);
      EXPECT_NEAR(probability.confidence[0], p[id], 2e-6 * p[id]);
      EXPECT_NEAR(Draw(logits, 1, options, 4, TestPool(), true, Confidence::kMargin).confidence[0], sorted[0] - sorted[1],
                  1e-6);
      EXPECT_NEAR(Draw(logits, 1, options, 4, TestPool(), true, Confidence::kEntropy).confidence[0], entropy, 1e-5);
    }
  }
}

TEST(Sampler, RowsWithoutADistributionAreErrors) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -kInfinity}) {
    std::vector<float> logits(600, -kInfinity);
    logits[5] = logits[310] = 1;
    if (std::isnan(bad)) logits[400] = bad;
    std::fill(logits.begin() + 300, logits.begin() + (std::isnan(bad) ? 300 : 600), bad);
    for (const Options& options : {Options{}, Options{.top_k = 3}, Options{.top_p = 0.5}, Options{.temperature = 0}}) {
      try {
        Draw(logits, 2, options, 0, TestPool(), false);
        ADD_FAILURE() << "no error";
      } catch (const std::invalid_argument& error) {
        EXPECT_NE(std::string(error.what()).find("logits has"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("row 1"), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_EQ(Draw({0.0f, 9.0f}, 1, {.temperature = 0}, 0, TestPool(), false).ids[0], 1);  // still usable
}

}  // namespace
}  // namespace moesaic::sampling
