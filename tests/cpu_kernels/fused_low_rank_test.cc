// Low-rank changes of dense layers: products and gradients of integers, whose sums are exact, on every tier that can be forced;
// the same bits for any division.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_kernels/fused/linear.h"
#include "cpu_kernels/fused/low_rank.h"
#include "cpu_kernels/isa.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

constexpr float kScale = 0.5f;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// W [n, k] with A [rank, k] and B [n, rank], and rows for both directions.
struct Problem {
  std::int64_t rows, n, k, rank;
  Dense weight, a, b, x, d;

  Problem(std::int64_t rows_, std::int64_t n_, std::int64_t k_, std::int64_t rank_,
          Dense (*values)(std::int64_t, std::int64_t, std::mt19937_64&))
      : rows(rows_), n(n_), k(k_), rank(rank_) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rows + n + k + rank));
    weight = values(n, k, random);
    a = values(rank, k, random);
    b = values(n, rank, random);
    x = values(rows, k, random);
    d = values(rows, n, random);
  }
};

/// [rank][rows]
double LowOf(const Problem& p, bool transposed, std::int64_t j, std::int64_t t) {
  double sum = 0;
  for (std::int64_t i = 0; i < (transposed ? p.n : p.k); ++i) {
    sum += transposed ? static_cast<double>(p.d(t, i)) * p.b(i, j) : static_cast<double>(p.x(t, i)) * p.a(j, i);
  }
  return kScale * sum;
}

/// What one direction gives.
struct Result {
  Rows out;
  std::vector<float> low;
};

/// @param low_only  the result stays NaN
Result Multiply(const Problem& p, bool transposed, DType factors, const Dense& x, threadpool::Pool& pool,
                bool low_only = false) {
  const std::int64_t columns = transposed ? p.k : p.n;
  const Rows weight(DType::kBFloat16, p.weight, p.k), x_rows(DType::kBFloat16, x, x.cols + 3);
  const Rows a(factors, p.a, p.k + 1), b(factors, p.b, p.rank + 2);
  const fused::PackedMatrix packed(weight.view(), pool);
  Result result{Rows(DType::kBFloat16, p.rows, columns, columns + 5),
                std::vector<float>(static_cast<std::size_t>(p.rank * p.rows), kNaN)};
  fused::LinearArgs args;
  args.x = x_rows.view();
  args.weight = &packed;
  args.transposed = transposed;
  args.low_rank = {a.view(), b.view(), kScale, result.low.data()};
  if (!low_only) args.out = result.out.view();
  fused::Linear(args, pool);
  result.out.ExpectGapsUntouched();
  return result;
}

void CheckProduct(const Problem& p, bool transposed, DType factors, threadpool::Pool& pool) {
  // Scratch memory keeps what the last call left there: none of it may count.
  const Dense& x = transposed ? p.d : p.x;
  Dense poison = x;
  for (float& value : poison.values) value = kNaN;
  ASSERT_TRUE(std::isnan(Multiply(p, transposed, factors, poison, pool).low.back()));
  const Result result = Multiply(p, transposed, factors, x, pool);
  ASSERT_EQ(Multiply(p, transposed, factors, x, pool, true).low, result.low);
  for (std::int64_t t = 0; t < p.rows; ++t) {
    std::vector<double> low;
    for (std::int64_t j = 0; j < p.rank; ++j) {
      low.push_back(LowOf(p, transposed, j, t));
      ASSERT_EQ(result.low[static_cast<std::size_t>(j * p.rows + t)], low.back()) << "rank " << j << " row " << t;
    }
    for (std::int64_t c = 0; c < (transposed ? p.k : p.n); ++c) {
      double sum = 0;
      for (std::int64_t i = 0; i < x.cols; ++i) {
        sum += static_cast<double>(x(t, i)) * (transposed ? p.weight(i, c) : p.weight(c, i));
      }
      for (std::int64_t j = 0; j < p.rank; ++j) {
        sum += low[static_cast<std::size_t>(j)] * (transposed ? p.a(j, c) : p.b(c, j));
      }
      ASSERT_EQ(result.out(t, c), ToFloat(ToBFloat16(static_cast<float>(sum)))) << "row " << t << " column " << c;
    }
  }
}

/// d_a and then d_b.
std::vector<float> Gradients(const Problem& p, const std::vector<float>& p_t, const std::vector<float>& low,
                             threadpool::Pool& pool) {
  const Rows x(DType::kBFloat16, p.x, p.k + 3), d(DType::kBFloat16, p.d, p.n + 1);
  std::vector<float> gradients(static_cast<std::size_t>(p.rank * (p.k + p.n)), kNaN);
  fused::LowRankGradArgs args;
  args.p = p_t.data();
  args.low = low.data();
  args.x = x.view();
  args.d = d.view();
  args.rank = p.rank;
  args.d_a = gradients.data();
  args.d_b = gradients.data() + p.rank * p.k;
  fused::LowRankGrad(args, pool);
  return gradients;
}

void CheckGradients(const Problem& p, threadpool::Pool& pool) {
  std::mt19937_64 random(3);
  Dense p_t = RandomIntegers(p.rank, p.rows, random), low = RandomIntegers(p.rank, p.rows, random);
  // Some numbers need both of their bf16 parts; not so many that sums would be rounded.
  for (std::int64_t j = 0; j < p.rank; ++j) {
    for (std::int64_t t = j % 7; t < p.rows; t += 7) {
      p_t(j, t) = 1025.0f + static_cast<float>(t);
      low(j, t) = -2049.0f - static_cast<float>(j);
    }
  }
  Gradients(p, std::vector<float>(p_t.values.size(), kNaN), std::vector<float>(low.values.size(), kNaN), pool);
  const std::vector<float> gradients = Gradients(p, p_t.values, low.values, pool);
  for (std::int64_t j = 0; j < p.rank; ++j) {
    for (std::int64_t c = 0; c < p.k + p.n; ++c) {
      const bool of_a = c < p.k;
      double sum = 0;
      for (std::int64_t t = 0; t < p.rows; ++t) {
        sum += of_a ? static_cast<double>(p_t(j, t)) * p.x(t, c) : static_cast<double>(low(j, t)) * p.d(t, c - p.k);
      }
      const std::int64_t at = of_a ? j * p.k + c : p.rank * p.k + (c - p.k) * p.rank + j;
      ASSERT_EQ(gradients[static_cast<std::size_t>(at)], sum) << (of_a ? "d_a" : "d_b") << " rank " << j << " column " << c;
    }
  }
}

class FusedLowRankTest : public ForcedTierTest {};

TEST_P(FusedLowRankTest, ExactProducts) {
  threadpool::Pool pool(3);
  for (const bool transposed : {false, true}) {
    for (const std::int64_t rows : {1, 17, 70, 300}) {
      for (const std::int64_t rank : {1, 16, 17, 40}) {
        // Factors of more than one task each; the last one's contraction is several slices on a matrix unit.
        for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {290, 47}, {33, 1100}}) {
          SCOPED_TRACE(testing::Message() << "[" << n << ", " << k << "], rank " << rank << ", " << rows << " rows"
                                          << (transposed ? ", transposed" : ""));
          CheckProduct(Problem(rows, n, k, rank, RandomIntegers), transposed, rank == 16 ? DType::kBFloat16 : DType::kFloat32,
                       pool);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(FusedLowRankTest, ExactGradients) {
  threadpool::Pool pool(3);
  for (const std::int64_t rows : {1, 255, 700}) {
    for (const std::int64_t rank : {1, 16, 40}) {
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 33}, {530, 1100}}) {
        SCOPED_TRACE(testing::Message() << "[" << n << ", " << k << "], rank " << rank << ", " << rows << " rows");
        CheckGradients(Problem(rows, n, k, rank, RandomIntegers), pool);
        if (HasFatalFailure()) return;
      }
    }
  }
  // More rows than blocks of their own take at a time.
  CheckGradients(Problem(2500, 5, 40, 3, RandomIntegers), pool);
}

MOESAIC_TEST_ON_EVERY_TIER(FusedLowRankTest);

TEST(FusedLowRankLayerTest, SameBitsForAnyThreads) {
  for (const auto& [rows, rank] : {std::pair<std::int64_t, std::int64_t>{3, 16}, {45, 20}, {1100, 16}, {1100, 40}}) {
    const Problem p(rows, 520, 800, rank, RandomValues);
    std::vector<std::vector<float>> gradients;
    std::vector<std::vector<Result>> results;
    for (const int threads : {1, 2, 7, 40}) {
      threadpool::Pool pool(threads);
      results.emplace_back();
      for (const bool transposed : {false, true}) {
        results.back().push_back(Multiply(p, transposed, DType::kFloat32, transposed ? p.d : p.x, pool));
        const Result &first = results.front()[transposed ? 1 : 0], &now = results.back().back();
        const auto bytes = static_cast<std::size_t>(rows * now.out.stride() * SizeOf(DType::kBFloat16));
        ASSERT_EQ(std::memcmp(now.out.data(), first.out.data(), bytes), 0) << rows << " rows, " << threads << " threads";
        ASSERT_EQ(now.low, first.low) << rows << " rows, " << threads << " threads";
      }
      gradients.push_back(Gradients(p, results.back()[1].low, results.back()[0].low, pool));
      ASSERT_EQ(gradients.back(), gradients.front()) << rows << " rows, " << threads << " threads";
    }
  }
}

/// LoRA in front of an activation, a residual and a norm, with columns that are divided among threads.
TEST(FusedLowRankLayerTest, EntersBeforeTheActivation) {
  threadpool::Pool pool(7);
  for (const std::int64_t rows : {5, 300}) {
    const Problem p(rows, 290, 120, 16, RandomIntegers);
    std::mt19937_64 random(8);
    const Dense r = RandomValues(rows, p.n, random);
    const Rows weight(DType::kBFloat16, p.weight, p.k), x(DType::kBFloat16, p.x, p.k), residual(DType::kBFloat16, r, p.n);
    const Rows a(DType::kFloat32, p.a, p.k), b(DType::kFloat32, p.b, p.rank), out(DType::kBFloat16, rows, p.n, p.n);
    const Rows pre(DType::kBFloat16, rows, p.n, p.n), expected(DType::kBFloat16, rows, p.n, p.n);
    const fused::PackedMatrix packed(weight.view(), pool);
    fused::LinearArgs args;
    args.x = x.view();
    args.weight = &packed;
    args.activation = Activation::kGelu;
    args.residual = residual.view();
    args.norm = Norm::kLayerNorm;
    args.epsilon = 1e-5f;
    args.low_rank = {a.view(), b.view(), kScale, nullptr};
    args.out = out.view();
    args.pre = pre.view();
    fused::Linear(args, pool);
    // The same of a product that was there: what it gave as an addend of a product with nothing.
    const Result product = Multiply(p, false, DType::kFloat32, p.x, pool);
    const Rows nothing(DType::kBFloat16, Dense(rows, p.k), p.k);
    args.x = nothing.view();
    args.low_rank = {};
    args.addend = product.out.view();
    args.out = expected.view();
    args.pre = {};
    fused::Linear(args, pool);
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t c = 0; c < p.n; ++c) {
        ASSERT_EQ(pre(t, c), product.out(t, c)) << "row " << t << " column " << c;
        ASSERT_NEAR(out(t, c), expected(t, c), 0.02f + 0.01f * std::fabs(expected(t, c))) << "row " << t << " column " << c;
      }
    }
  }
}

TEST(FusedLowRankLayerTest, NothingOfNoRows) {
  threadpool::Pool pool(2);
  const Problem p(0, 5, 7, 2, RandomValues);
  EXPECT_EQ(Gradients(p, {}, {}, pool), std::vector<float>(24, 0.0f));
}

/// The message of the refusal.
template <typename Call>
std::string Refusal(Call call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(FusedLowRankLayerTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(1);
  const Rows weight(DType::kBFloat16, Dense(8, 16), 16), x(DType::kBFloat16, Dense(4, 16), 16);
  const Rows out(DType::kBFloat16, 4, 8, 8), a(DType::kFloat32, Dense(2, 16), 16), b(DType::kFloat32, Dense(8, 2), 2);
  const fused::PackedMatrix packed(weight.view(), pool);
  fused::LinearArgs args;
  args.weight = &packed;
  args.x = x.view();
  args.out = out.view();
  const auto refusal = [&](const TensorView& of_a, const TensorView& of_b) {
    args.low_rank = {of_a, of_b, 1.0f, nullptr};
    return Refusal([&] { fused::Linear(args, pool); });
  };
  EXPECT_EQ(refusal(a.view(), b.view()), "");
  EXPECT_EQ(refusal(a.view(), {}), "lora_b has 0 dimensions; expected two");
  EXPECT_EQ(refusal({}, b.view()), "lora_a has 0 dimensions; expected two");
  const Rows none(DType::kFloat32, 0, 16, 16);
  EXPECT_EQ(refusal(none.view(), b.view()), "lora_a has shape [0, 16]; expected [r, K], r at least 1");
  TensorView half = a.view();
  half.dtype = DType::kFloat16;
  EXPECT_EQ(refusal(half, b.view()), "lora_a is float16; expected bfloat16 or float32");
  EXPECT_EQ(refusal(b.view(), a.view()), "lora_a has shape [8, 2]; expected [8, 16]");
  EXPECT_EQ(refusal(a.view(), a.view()), "lora_b has shape [2, 16]; expected [8, 2]");
  TensorView gaps = b.view();
  gaps.stride = {1, 8, 0};
  EXPECT_EQ(refusal(a.view(), gaps), "lora_b has gaps between its columns; expected contiguous rows");

  const Rows wide(DType::kFloat32, Dense(8, 16), 16), wide_x(DType::kFloat32, Dense(4, 16), 16),
      wide_out(DType::kFloat32, 4, 8, 8);
  const fused::PackedMatrix packed_wide(wide.view(), pool);
  args.weight = &packed_wide;
  args.x = wide_x.view();
  args.out = wide_out.view();
  EXPECT_EQ(refusal(a.view(), b.view()), "x is float32; expected bfloat16, with lora_a");

  args.weight = nullptr;
  args.norm = Norm::kRmsNorm;
  EXPECT_EQ(refusal(a.view(), b.view()), "lora_a is given without a weight; expected both");

  fused::LowRankGradArgs grad;
  grad.x = x.view();
  grad.d = weight.view();
  grad.rank = 2;
  EXPECT_EQ(Refusal([&] { fused::LowRankGrad(grad, pool); }), "d has shape [8, 16]; expected [4, 16]");
  grad.d = wide_out.view();
  EXPECT_EQ(Refusal([&] { fused::LowRankGrad(grad, pool); }), "d is float32; expected bfloat16, as x");
  grad.d = out.view();
  grad.rank = 0;
  EXPECT_EQ(Refusal([&] { fused::LowRankGrad(grad, pool); }), "p has 0 rows; expected at least 1");
}

}  // namespace
}  // namespace moesaic
