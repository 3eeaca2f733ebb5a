// Statistics and gradients of logits on every tier against formulas in double, and log-probabilities on a pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu_kernels/fused/log_probs.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Sixteen rows of products as both kinds of GEMM give them, with a bias and a scale.
class Block {
 public:
  Block(const Dense& products, bool by_rows, const Dense* bias, float scale, std::vector<std::int32_t> targets)
      : products_(products),
        bias_(bias),
        scale_(scale),
        targets_(std::move(targets)),
        by_rows_(by_rows),
        ld_(by_rows ? RoundUp(products.cols, 16) : 16),
        memory_(16 * RoundUp(products.cols, 16) * static_cast<std::int64_t>(sizeof(float))) {
    for (std::int64_t r = 0; r < 16; ++r) {
      for (std::int64_t c = 0; c < products.cols; ++c) {
        memory_.As<float>()[by_rows ? r * ld_ + c : c * ld_ + r] = products(r, c);
      }
    }
  }

  double Logit(std::int64_t row, std::int64_t column) const {
    const float product = products_(row, column);
    return (bias_ == nullptr ? product : product + (*bias_)(0, column)) * scale_;
  }

  /// Columns [first, first + count); first a multiple of 16.
  LogitBlock Columns(std::int64_t first, std::int64_t count) {
    here_.clear();
    for (const std::int32_t target : targets_) here_.push_back(target - static_cast<std::int32_t>(first));
    LogitBlock block;
    block.products = memory_.As<float>() + (by_rows_ ? first : first * ld_);
    block.by_rows = by_rows_;
    block.ld = ld_;
    block.columns = count;
    block.bias = bias_ == nullptr ? nullptr : bias_->values.data() + first;
    block.scale = scale_;
    block.targets = here_.data();
    return block;
  }

 private:
  const Dense& products_;
  const Dense* bias_;
  float scale_;
  std::vector<std::int32_t> targets_, here_;
  bool by_rows_;
  std::int64_t ld_;
  PoisonedBuffer memory_;
};

std::vector<std::int32_t> SixteenTargets(std::int64_t columns) {
  std::vector<std::int32_t> targets;
  for (std::int64_t r = 0; r < 16; ++r) targets.push_back(static_cast<std::int32_t>((5 * r) % columns));
  targets[3] = -1;
  return targets;
}

class LogitKernelsTest : public TierTest {};

TEST_P(LogitKernelsTest, FoldLogits) {
  std::mt19937_64 random(3);
  for (const std::int64_t columns : {1, 16, 31, 100}) {
    for (const bool by_rows : {false, true}) {
      for (const bool biased : {false, true}) {
        Dense products = RandomValues(16, columns, random), bias = RandomValues(1, columns, random);
        for (float& value : products.values) value *= 20.0f;
        if (columns > 16) products(4, 7) = products(4, 20) = 40.0f;  // of two largest the first counts
        const std::vector<std::int32_t> targets = SixteenTargets(columns);
        Block block(products, by_rows, biased ? &bias : nullptr, 0.5f, targets);
        LogitStatistics known;
        // All at once, or in two parts.
        const std::int64_t first = columns > 16 ? 16 : columns;
        for (std::int64_t from = 0; from < columns; from += first) {
          tier_->fused.fold_logits({block.Columns(from, std::min(first, columns - from)), &known});
        }
        for (std::int64_t r = 0; r < 16; ++r) {
          double most = -kInfinity, sum = 0, weighted = 0, squares = 0, total = 0, before = -kInfinity;
          for (std::int64_t c = 0; c < columns; ++c) most = std::max(most, block.Logit(r, c));
          for (std::int64_t c = 0; c < columns; ++c) {
            const double z = block.Logit(r, c), power = std::exp(z - most);
            sum += power;
            weighted += power * (z - most);
            squares += power * power;
            total += z;
            if (c < targets[static_cast<std::size_t>(r)]) before = std::max(before, z);
          }
          const std::string where = std::to_string(columns) + " columns, row " + std::to_string(r);
          ASSERT_FLOAT_EQ(known.most[r], static_cast<float>(most)) << where;
          ASSERT_NEAR(known.sum[r], sum, 1e-6 * sum) << where;
          ASSERT_NEAR(known.weighted[r], weighted, 1e-5 * (1.0 + std::fabs(weighted))) << where;
          ASSERT_NEAR(known.squares[r], squares, 1e-6 * squares) << where;
          ASSERT_NEAR(known.total[r], total, 1e-3) << where;
          ASSERT_FLOAT_EQ(known.before[r], static_cast<float>(before)) << where;
          if (targets[static_cast<std::size_t>(r)] < 0) continue;
          ASSERT_FLOAT_EQ(known.target[r], static_cast<float>(block.Logit(r, targets[static_cast<std::size_t>(r)]))) << where;
        }
      }
    }
  }
}

TEST_P(LogitKernelsTest, FoldsWhatIsNotFinite) {
  Dense products(16, 40);
  for (std::int64_t c = 0; c < 40; ++c) products(0, c) = products(1, c) = -kInfinity;
  products(1, 33) = 2.0f;  // behind columns of -infinity alone
  products(2, 5) = kNan;   // reaches the sums, not other rows
  products(3, 17) = -kInfinity;
  products(4, 0) = 3e38f;
  for (const bool by_rows : {false, true}) {
    Block block(products, by_rows, nullptr, 1.0f, std::vector<std::int32_t>(16, 33));
    LogitStatistics known;
    for (std::int64_t from = 0; from < 40; from += 16) {
      tier_->fused.fold_logits({block.Columns(from, std::min<std::int64_t>(16, 40 - from)), &known});
    }
    EXPECT_EQ(known.most[0], -kInfinity);
    EXPECT_EQ(known.sum[0], 0.0f);
    EXPECT_EQ(known.weighted[0], 0.0f);
    EXPECT_EQ(known.sum[1], 1.0f);
    EXPECT_EQ(known.weighted[1], 0.0f);
    EXPECT_EQ(known.target[1], 2.0f);
    EXPECT_TRUE(std::isnan(known.sum[2]));
    EXPECT_EQ(known.sum[3], 39.0f);
    EXPECT_EQ(known.weighted[3], 0.0f);
    EXPECT_EQ(known.sum[4], 1.0f);
    EXPECT_EQ(known.sum[5], 40.0f);
  }
}

TEST_P(LogitKernelsTest, LogitGrad) {
  std::mt19937_64 random(4);
  for (const std::int64_t columns : {1, 17, 32, 70}) {
    for (const bool by_rows : {false, true}) {
      for (const bool entropies : {false, true}) {
        Dense products = RandomValues(16, columns, random), bias = RandomValues(1, columns, random);
        for (float& value : products.values) value *= 8.0f;
        const std::vector<std::int32_t> targets = SixteenTargets(columns);
        Block block(products, by_rows, &bias, 0.5f, targets);
        const Dense log_sum = RandomValues(1, 16, random), d_log_prob = RandomValues(1, 16, random);
        const Dense entropy = RandomValues(1, 16, random), d_entropy = RandomValues(1, 16, random);
        LogitGradArgs args;
        args.block = block.Columns(0, columns);
        args.log_sum = log_sum.values.data();
        args.d_log_prob = d_log_prob.values.data();
        if (entropies) {
          args.entropy = entropy.values.data();
          args.d_entropy = d_entropy.values.data();
        }
        TileMatrix tiles = TileMatrix::Activations(nullptr, 32, 32 + columns);
        const PoisonedBuffer memory(tiles.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
        tiles.data = memory.As<BFloat16>();
        args.operand = tiles;
        args.panel = args.tile_column = 1;
        tier_->fused.logit_grad(args);
        const std::int64_t ld = RoundUp(columns, 32);
        const PoisonedBuffer rows(16 * ld * static_cast<std::int64_t>(sizeof(float)));
        args.rows = rows.As<float>();
        args.rows_ld = ld;
        tier_->fused.logit_grad(args);
        for (std::int64_t r = 0; r < 16; ++r) {
          for (std::int64_t c = 0; c < ld; ++c) {
            double expected = 0.0, size = 0.0;
            if (c < columns) {
              const double log_p = block.Logit(r, c) - log_sum(0, r), p = std::exp(log_p);
              const double is_target = targets[static_cast<std::size_t>(r)] == c ? 1.0 : 0.0;
              expected = d_log_prob(0, r) * (is_target - p);
              size = std::fabs(d_log_prob(0, r)) * (is_target + p);
              if (entropies) {
                expected -= d_entropy(0, r) * p * (log_p + entropy(0, r));
                size += std::fabs(d_entropy(0, r)) * p * (std::fabs(log_p) + std::fabs(entropy(0, r)));
              }
            }
            const BFloat16* const tile = tiles.Tile(1, 1 + c / kTileColumns);
            const std::string where = std::to_string(columns) + " columns, " + std::to_string(r) + ", " + std::to_string(c);
            ASSERT_NEAR(rows.As<float>()[r * ld + c], 0.5 * expected, 1e-6 * size) << where;
            ASSERT_NEAR(ToFloat(tile[r * kTileColumns + c % kTileColumns]), 0.5 * expected, 1e-30 + (1e-4 + 0x1p-8) * size)
                << where;
          }
        }
      }
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(LogitKernelsTest);

/// One call on a pool, all results and the gradient.
struct Outcome {
  std::vector<float> values, gradient;
};

Outcome Evaluate(const Rows& x, const Rows& weight, std::int64_t rows, std::int64_t depth, std::int64_t vocabulary, DType dtype,
                 int threads) {
  threadpool::Pool pool(threads);
  const fused::PackedMatrix packed(weight.view(), pool);
  std::vector<std::int64_t> targets;
  for (std::int64_t r = 0; r < rows; ++r) targets.push_back(r % 7 == 3 ? -100 : 31 * r % vocabulary);
  Outcome outcome;
  outcome.values.resize(static_cast<std::size_t>(5 * rows));
  fused::LogProbsResults results;
  float* next = outcome.values.data();
  for (float** array :
       {&results.log_probs, &results.log_sums, &results.entropies, &results.log_squares, &results.mean_logits}) {
    *array = next;
    next += rows;
  }
  fused::LogProbsGradArgs args;
  args.forward = {x.view(), &packed, nullptr, 1.0f, targets.data()};
  fused::LogProbs(args.forward, results, pool);
  const Rows d_x(dtype, rows, depth, depth + 1);
  std::vector<float> d_log_probs(static_cast<std::size_t>(rows), 1.0f);
  d_log_probs[0] = 0.0f;
  args.log_sums = results.log_sums;
  args.d_log_probs = d_log_probs.data();
  args.d_x = d_x.view();
  fused::LogProbsGrad(args, pool);
  d_x.ExpectGapsUntouched();
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < depth; ++c) outcome.gradient.push_back(d_x(r, c));
  }
  return outcome;
}

TEST(LogProbsTest, SameBitsOnAnyNumberOfThreads) {
  std::mt19937_64 random(5);
  // Several blocks of rows and parts of the vocabulary, neither of them whole; few rows; several blocks and slabs.
  for (const auto& [rows, depth, vocabulary] : {std::array<std::int64_t, 3>{330, 40, 5000}, {3, 70, 2100}, {310, 33, 17000}}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const Rows x(dtype, RandomValues(rows, depth, random), depth + 3);
      const Rows weight(dtype, RandomValues(vocabulary, depth, random), depth);
      const Outcome one = Evaluate(x, weight, rows, depth, vocabulary, dtype, 1);
      for (std::int64_t r = 0; r < rows; ++r) {
        if (r % 7 == 3) {
          ASSERT_EQ(one.values[static_cast<std::size_t>(r)], 0.0f);
        }
        if (r % 7 == 3 || r == 0) {
          ASSERT_EQ(one.gradient[static_cast<std::size_t>(r * depth)], 0.0f);
        }
      }
      ASSERT_LT(one.values[1], -1.0f);
      ASSERT_NE(one.gradient[static_cast<std::size_t>(depth)], 0.0f);
      for (const int threads : {2, 3, 7}) {
        const Outcome other = Evaluate(x, weight, rows, depth, vocabulary, dtype, threads);
        ASSERT_EQ(one.values, other.values) << rows << " rows, " << threads << " threads";
        ASSERT_EQ(one.gradient, other.gradient) << rows << " rows, " << threads << " threads";
      }
    }
  }
}

TEST(LogProbsTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(2);
  const Rows x(DType::kFloat32, 2, 8, 8), other(DType::kBFloat16, 2, 8, 8), weight(DType::kFloat32, 5, 8, 8);
  const fused::PackedMatrix packed(weight.view(), pool);
  std::vector<std::int64_t> targets = {0, 5};
  const auto message = [&](const fused::LogProbsArgs& args) -> std::string {
    try {
      fused::LogProbs(args, {}, pool);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({x.view(), &packed, nullptr, 1.0f, targets.data()}),
            "targets[1] is 5; expected less than 5, the size of the vocabulary");
  targets[1] = 4;
  EXPECT_EQ(message({x.view(), &packed, nullptr, 1.0f, targets.data()}), "");
  EXPECT_EQ(message({other.view(), &packed, nullptr, 1.0f, targets.data()}),
            "x is bfloat16; expected float32, as w was packed");
  targets[1] = 8;
  EXPECT_EQ(message({x.view(), nullptr, nullptr, 1.0f, targets.data()}),
            "targets[1] is 8; expected less than 8, the size of the vocabulary");
  targets[1] = 4;
  fused::LogProbsGradArgs args;
  args.forward = {x.view(), &packed, nullptr, 1.0f, targets.data()};
  const Rows d_x(DType::kFloat32, 2, 8, 8);
  const std::vector<float> ones(2, 1.0f);
  args.d_log_probs = ones.data();
  args.d_x = d_x.view();
  EXPECT_THROW(fused::LogProbsGrad(args, pool), std::invalid_argument);  // no log_sums
  args.log_sums = ones.data();
  EXPECT_NO_THROW(fused::LogProbsGrad(args, pool));
  args.d_entropies = ones.data();
  EXPECT_THROW(fused::LogProbsGrad(args, pool), std::invalid_argument);  // no entropies
  args.entropies = ones.data();
  EXPECT_NO_THROW(fused::LogProbsGrad(args, pool));
  args.d_x = other.view();
  EXPECT_THROW(fused::LogProbsGrad(args, pool), std::invalid_argument);
}

}  // namespace
}  // namespace moesaic
