// Both forms of GEMM on every tier of kernels: exact on integers at every size up to four panels, close to double on random
// values, and the same bits for any way of cutting the work into calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One contraction: rows of `left` with rows of `right` in the direct form (left = weights), rows of `left` with columns of
/// `right` in the unpack form (right = weights).
struct Factors {
  Dense left;
  Dense right;
};

// ---- Exact on integers ----

constexpr std::int64_t kMaxSize = 64;
constexpr std::int64_t kShards = 4;

/// (tier, shard): a shard takes every kShards-th size of the contraction, so that ctest can run them side by side.
class GemmExact : public testing::TestWithParam<std::tuple<std::size_t, std::int64_t>> {
 protected:
  void SetUp() override {
    tier_ = TestedTiers()[std::get<0>(GetParam())];
    if (!tier_->runs_here()) GTEST_SKIP() << tier_->name << " does not run on this host";
  }

  /// True where c equals `expected` for rows below m and columns below n, and is 0 up to the end of the panels.
  static bool Equals(const float* c, std::int64_t ldc, const Dense& expected, std::int64_t m, std::int64_t n) {
    bool equal = true;
    for (std::int64_t i = 0; i < RoundUp(m, 16); ++i) {
      for (std::int64_t j = 0; j < RoundUp(n, 16); ++j) {
        equal &= c[i * ldc + j] == (i < m && j < n ? expected(i, j) : 0.0f);
      }
    }
    return equal;
  }

  const KernelTier* tier_ = nullptr;
};

TEST_P(GemmExact, DirectForm) {
  std::mt19937_64 random(1);
  PoisonedBuffer memory(kMaxSize * kMaxSize * 4);
  float* c = memory.As<float>();
  for (std::int64_t k = 1 + std::get<1>(GetParam()); k <= kMaxSize; k += kShards) {
    const Dense a = RandomIntegers(kMaxSize, k, random);
    const Dense b = RandomIntegers(kMaxSize, k, random);
    Dense expected(kMaxSize, kMaxSize);
    for (std::int64_t i = 0; i < kMaxSize; ++i) {
      for (std::int64_t j = 0; j < kMaxSize; ++j) {
        for (std::int64_t l = 0; l < k; ++l) expected(i, j) += a(i, l) * b(j, l);
      }
    }
    Tiles activations(Order::kPairs, kMaxSize, k, false);
    for (std::int64_t n = 1; n <= kMaxSize; ++n) {
      for (std::int64_t l = 0; l < k; ++l) activations.Set(n - 1, l, b(n - 1, l));
      Tiles weights(Order::kStored, kMaxSize, k, true);
      for (std::int64_t m = 1; m <= kMaxSize; ++m) {
        for (std::int64_t l = 0; l < k; ++l) weights.Set(m - 1, l, a(m - 1, l));
        const GemmSegment segment{weights.matrix(), activations.matrix()};
        std::fill_n(c, kMaxSize * kMaxSize, kNan);
        DirectGemmArgs args;
        args.segments = {&segment, 1};
        args.panels = CeilDiv(m, 16);
        args.activation_panels = CeilDiv(n, 16);
        args.c = c;
        args.ldc = kMaxSize;
        tier_->direct_gemm(args);
        ASSERT_TRUE(Equals(c, kMaxSize, expected, m, n)) << "M " << m << " N " << n << " K " << k;
      }
    }
  }
}

TEST_P(GemmExact, UnpackForm) {
  std::mt19937_64 random(2);
  PoisonedBuffer memory(kMaxSize * kMaxSize * 4);
  float* c = memory.As<float>();
  for (std::int64_t k = 1 + std::get<1>(GetParam()); k <= kMaxSize; k += kShards) {
    const Dense a = RandomIntegers(kMaxSize, k, random);
    const Dense b = RandomIntegers(k, kMaxSize, random);
    Dense expected(kMaxSize, kMaxSize);
    for (std::int64_t i = 0; i < kMaxSize; ++i) {
      for (std::int64_t l = 0; l < k; ++l) {
        for (std::int64_t j = 0; j < kMaxSize; ++j) expected(i, j) += a(i, l) * b(l, j);
      }
    }
    Tiles weights(Order::kStored, k, kMaxSize, true);
    for (std::int64_t n = 1; n <= kMaxSize; ++n) {
      for (std::int64_t l = 0; l < k; ++l) weights.Set(l, n - 1, b(l, n - 1));
      Tiles activations(Order::kOperand, kMaxSize, k, false);
      for (std::int64_t m = 1; m <= kMaxSize; ++m) {
        for (std::int64_t l = 0; l < k; ++l) activations.Set(m - 1, l, a(m - 1, l));
        const GemmSegment segment{weights.matrix(), activations.matrix()};
        const PoisonedBuffer scratch(UnpackScratchElements({&segment, 1}) * 2);
        std::fill_n(c, kMaxSize * kMaxSize, kNan);
        UnpackGemmArgs args;
        args.segments = {&segment, 1};
        args.panels = CeilDiv(m, 16);
        args.columns = CeilDiv(n, 32);
        args.c = c;
        args.ldc = kMaxSize;
        args.scratch = scratch.As<BFloat16>();
        tier_->unpack_gemm(args);
        ASSERT_TRUE(Equals(c, kMaxSize, expected, m, n)) << "M " << m << " N " << n << " K " << k;
      }
    }
  }
}

TEST_P(GemmExact, GradientForm) {
  std::mt19937_64 random(9);
  PoisonedBuffer memory(kMaxSize * kMaxSize * 4);
  float* c = memory.As<float>();
  for (std::int64_t k = 1 + std::get<1>(GetParam()); k <= kMaxSize; k += kShards) {
    const Dense a = RandomIntegers(kMaxSize, k, random);
    const Dense b = RandomIntegers(k, kMaxSize, random);
    Dense expected(kMaxSize, kMaxSize);
    for (std::int64_t i = 0; i < kMaxSize; ++i) {
      for (std::int64_t l = 0; l < k; ++l) {
        for (std::int64_t j = 0; j < kMaxSize; ++j) expected(i, j) += a(i, l) * b(l, j);
      }
    }
    for (std::int64_t n = 1; n <= kMaxSize; ++n) {
      Tiles right(Order::kRowPairs, k, n, false);
      for (std::int64_t l = 0; l < k; ++l) {
        for (std::int64_t j = 0; j < n; ++j) right.Set(l, j, b(l, j));
      }
      Tiles left(Order::kOperand, kMaxSize, k, false);
      for (std::int64_t m = 1; m <= kMaxSize; ++m) {
        for (std::int64_t l = 0; l < k; ++l) left.Set(m - 1, l, a(m - 1, l));
        const GradientSegment segment{left.matrix(), right.matrix()};
        std::fill_n(c, kMaxSize * kMaxSize, kNan);
        GradientGemmArgs args;
        args.segments = {&segment, 1};
        args.panels = CeilDiv(m, 16);
        args.c = c;
        args.ldc = kMaxSize;
        tier_->gradient_gemm(args);
        ASSERT_TRUE(Equals(c, kMaxSize, expected, m, n)) << "M " << m << " N " << n << " K " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, GemmExact,
                         testing::Combine(testing::Range<std::size_t>(0, TestedTiers().size()),
                                          testing::Range<std::int64_t>(0, kShards)),
                         [](const auto& info) {
                           return TierLabel(std::get<0>(info.param)) + "_shard" + std::to_string(std::get<1>(info.param));
                         });

// ---- Random values ----

/// fp32 sums of exact products: each of the K additions errs by at most eps of the partial sum, which grows like the square
/// root of the products added; so the error stays below eps * sqrt(K) * |a| |b|, with |a|, |b| the norms of the two rows.
void ExpectNear(const float* c, std::int64_t ldc, const Dense& start, const std::vector<Factors>& factors, bool direct) {
  const std::int64_t rows = factors[0].left.rows;
  const std::int64_t columns = direct ? factors[0].right.rows : factors[0].right.cols;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      double sum = start(i, j);
      double a_squares = 0.0;
      double b_squares = 0.0;
      std::int64_t depth = 1;
      for (const Factors& f : factors) {
        depth += f.left.cols;
        for (std::int64_t k = 0; k < f.left.cols; ++k) {
          const double a = f.left(i, k);
          const double b = direct ? f.right(j, k) : f.right(k, j);
          sum += a * b;
          a_squares += a * a;
          b_squares += b * b;
        }
      }
      const double tolerance =
          0x1p-23 * std::sqrt(static_cast<double>(depth)) * (std::sqrt(a_squares * b_squares) + std::fabs(start(i, j)));
      ASSERT_NEAR(c[i * ldc + j], sum, tolerance) << "at " << i << ", " << j;
    }
  }
}

/// Shapes on and off the grid, K across superblocks and beyond what one pass of the kernels takes (128 runs of 8 tiles).
struct Shape {
  std::int64_t m;
  std::int64_t n;
  std::vector<std::int64_t> depths;  // one a segment
};
const std::vector<Shape> kShapes = {{1, 1, {1}},
                                    {16, 16, {32}},
                                    {33, 47, {100}},
                                    {160, 96, {256}},
                                    {130, 70, {600, 16}},
                                    {48, 300, {17, 33, 64}},
                                    {31, 65, {2048, 5}},
                                    {16, 17, {33000}},
                                    {20, 620, {150, 83, 16}},
                                    {9, 330, {200, 40, 264}},
                                    {70, 90, {300, 128}},
                                    {30, 290, {300, 129}},
                                    {61, 70, {150, 150, 17, 17}},
                                    {33, 40, {40, 16, 16, 16}}};

class GemmRandom : public TierTest {};

/// Arguments, memory and result of a direct GEMM over some factors.
struct DirectProblem {
  std::vector<Tiles> weights;
  std::vector<Tiles> activations;
  std::vector<GemmSegment> segments;
  DirectGemmArgs args;
  PoisonedBuffer memory;

  DirectProblem(const std::vector<Factors>& factors, std::int64_t extra_columns)
      : memory(RoundUp(factors[0].left.rows, 16) * (RoundUp(factors[0].right.rows, 16) + extra_columns) * 4) {
    for (const Factors& f : factors) {
      weights.emplace_back(Order::kStored, f.left, true);
      activations.emplace_back(Order::kPairs, f.right, false);
      segments.push_back({weights.back().matrix(), activations.back().matrix()});
    }
    args.segments = segments;
    args.panels = CeilDiv(factors[0].left.rows, 16);
    args.activation_panels = CeilDiv(factors[0].right.rows, 16);
    args.c = memory.As<float>();
    args.ldc = args.activation_panels * 16 + extra_columns;
  }
  std::size_t bytes() const { return static_cast<std::size_t>(args.panels * 16 * args.ldc * 4); }
};

struct UnpackProblem {
  std::vector<Tiles> weights;
  std::vector<Tiles> activations;
  std::vector<GemmSegment> segments;
  UnpackGemmArgs args;
  PoisonedBuffer memory;
  PoisonedBuffer scratch;

  UnpackProblem(const std::vector<Factors>& factors, std::int64_t extra_columns)
      : memory(RoundUp(factors[0].left.rows, 16) * (RoundUp(factors[0].right.cols, 32) + extra_columns) * 4), scratch(0) {
    for (const Factors& f : factors) {
      weights.emplace_back(Order::kStored, f.right, true);
      activations.emplace_back(Order::kOperand, f.left, false);
      segments.push_back({weights.back().matrix(), activations.back().matrix()});
    }
    scratch = PoisonedBuffer(UnpackScratchElements(segments) * 2);
    args.segments = segments;
    args.panels = CeilDiv(factors[0].left.rows, 16);
    args.columns = CeilDiv(factors[0].right.cols, 32);
    args.c = memory.As<float>();
    args.ldc = args.columns * 32 + extra_columns;
    args.scratch = scratch.As<BFloat16>();
  }
  std::size_t bytes() const { return static_cast<std::size_t>(args.panels * 16 * args.ldc * 4); }
};

std::vector<Factors> DirectFactors(const Shape& shape, std::mt19937_64& random) {
  std::vector<Factors> factors;
  for (const std::int64_t k : shape.depths)
    factors.push_back({RandomValues(shape.m, k, random), RandomValues(shape.n, k, random)});
  return factors;
}

std::vector<Factors> UnpackFactors(const Shape& shape, std::mt19937_64& random) {
  std::vector<Factors> factors;
  for (const std::int64_t k : shape.depths)
    factors.push_back({RandomValues(shape.m, k, random), RandomValues(k, shape.n, random)});
  return factors;
}

/// Puts random numbers where the result will be added to them, and returns them.
Dense RandomStart(float* c, std::int64_t rows, std::int64_t ldc, std::mt19937_64& random) {
  const Dense start = RandomValues(rows, ldc, random);
  std::copy(start.values.begin(), start.values.end(), c);
  return start;
}

TEST_P(GemmRandom, DirectForm) {
  std::mt19937_64 random(3);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << "M " << shape.m << " N " << shape.n << " segments " << shape.depths.size());
    const std::vector<Factors> factors = DirectFactors(shape, random);
    for (const bool accumulate : {false, true}) {
      DirectProblem problem(factors, 16);
      Dense start(problem.args.panels * 16, problem.args.ldc);
      if (accumulate) start = RandomStart(problem.args.c, start.rows, start.cols, random);
      problem.args.accumulate = accumulate;
      problem.args.prefetch = {problem.segments[0].weights, 0, 1, 0, 1};  // only ever a hint
      tier_->direct_gemm(problem.args);
      ExpectNear(problem.args.c, problem.args.ldc, start, factors, true);
    }
  }
}

TEST_P(GemmRandom, UnpackForm) {
  std::mt19937_64 random(4);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << "M " << shape.m << " N " << shape.n << " segments " << shape.depths.size());
    const std::vector<Factors> factors = UnpackFactors(shape, random);
    for (const bool accumulate : {false, true}) {
      UnpackProblem problem(factors, 32);
      Dense start(problem.args.panels * 16, problem.args.ldc);
      if (accumulate) start = RandomStart(problem.args.c, start.rows, start.cols, random);
      problem.args.accumulate = accumulate;
      tier_->unpack_gemm(problem.args);
      ExpectNear(problem.args.c, problem.args.ldc, start, factors, false);
    }
  }
}

// Also cut into calls of some panels each, which give the same bits as one call.
TEST_P(GemmRandom, GradientForm) {
  std::mt19937_64 random(10);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << "M " << shape.m << " N " << shape.n << " segments " << shape.depths.size());
    const std::vector<Factors> factors = UnpackFactors(shape, random);
    std::vector<Tiles> left, right;
    std::vector<GradientSegment> segments;
    for (const Factors& f : factors) {
      left.emplace_back(Order::kOperand, f.left, false);
      right.emplace_back(Order::kRowPairs, f.right, false);
      segments.push_back({left.back().matrix(), right.back().matrix()});
    }
    GradientGemmArgs args;
    args.segments = segments;
    args.panels = CeilDiv(shape.m, 16);
    args.ldc = RoundUp(shape.n, 16) + 16;
    const std::int64_t size = args.panels * 16 * args.ldc;
    for (const bool accumulate : {false, true}) {
      Dense start(args.panels * 16, args.ldc);
      const PoisonedBuffer whole(size * 4), cut(size * 4);
      if (accumulate) {
        start = RandomStart(whole.As<float>(), start.rows, start.cols, random);
        std::copy(start.values.begin(), start.values.end(), cut.As<float>());
      }
      args.accumulate = accumulate;
      args.c = whole.As<float>();
      tier_->gradient_gemm(args);
      ExpectNear(args.c, args.ldc, start, factors, false);
      GradientGemmArgs part = args;
      for (part.first_panel = 0; part.first_panel < args.panels; part.first_panel += part.panels) {
        part.panels = std::min<std::int64_t>(3, args.panels - part.first_panel);
        part.c = cut.As<float>() + part.first_panel * 16 * args.ldc;
        tier_->gradient_gemm(part);
      }
      ASSERT_EQ(std::memcmp(whole.As<float>(), cut.As<float>(), static_cast<std::size_t>(size) * 4), 0);
    }
  }
}

TEST_P(GemmRandom, UnpackFormToRows) {
  std::mt19937_64 random(5);
  for (const Shape& shape : kShapes) {
    const std::vector<Factors> factors = UnpackFactors(shape, random);
    UnpackProblem expected(factors, 0);
    tier_->unpack_gemm(expected.args);

    UnpackProblem problem(factors, 0);
    const std::int64_t width = problem.args.columns * 32;
    const PoisonedBuffer memory(shape.m * width * 2);
    std::vector<BFloat16*> rows(static_cast<std::size_t>(problem.args.panels * 16), nullptr);  // rows beyond M are dropped
    for (std::int64_t i = 0; i < shape.m; ++i) {
      if (i % 5 != 3) rows[static_cast<std::size_t>(i)] = memory.As<BFloat16>() + (shape.m - 1 - i) * width;
    }
    problem.args.rows = rows.data();
    problem.args.ldc = SumsPitch(256);
    const PoisonedBuffer sums(problem.args.panels * 16 * problem.args.ldc * 4);
    for (const std::int64_t depth : {0, 8, 24}) {
      problem.args.depth = depth;
      problem.args.c = depth > 0 ? sums.As<float>() : nullptr;
      for (std::int64_t n = 0; n < expected.args.columns; n += problem.args.columns) {  // in calls of some columns
        problem.args.first_column = n;
        problem.args.columns =
            std::min<std::int64_t>(depth == 0 ? 64 : 1 + static_cast<std::int64_t>(random() % 11), expected.args.columns - n);
        tier_->unpack_gemm(problem.args);
      }
      for (std::int64_t i = 0; i < shape.m; ++i) {
        for (std::int64_t j = 0; j < width; ++j) {
          BFloat16& value = memory.As<BFloat16>()[(shape.m - 1 - i) * width + j];
          const BFloat16 wanted = i % 5 == 3 ? BFloat16{0xffff} : ToBFloat16(expected.args.c[i * expected.args.ldc + j]);
          ASSERT_EQ(value.bits, wanted.bits) << i << ", " << j << ", depth " << depth;
          value.bits = 0xffff;
        }
      }
    }
  }
}

// Two products with the same activations in one call: the bits of two calls.
TEST_P(GemmRandom, DirectFormOfTwins) {
  std::mt19937_64 random(10);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << "M " << shape.m << " N " << shape.n << " segments " << shape.depths.size());
    const std::vector<Factors> factors = DirectFactors(shape, random);
    std::vector<Factors> of_twin = DirectFactors(shape, random);
    for (std::size_t s = 0; s < factors.size(); ++s) of_twin[s].right = factors[s].right;
    DirectProblem alone(factors, 16), twin_alone(of_twin, 16), both(factors, 16), twin(of_twin, 16);
    const Dense start = RandomStart(twin_alone.args.c, twin_alone.args.panels * 16, twin_alone.args.ldc, random);
    std::copy(start.values.begin(), start.values.end(), twin.args.c);
    twin_alone.args.accumulate = twin.args.accumulate = true;
    tier_->direct_gemm(alone.args);
    tier_->direct_gemm(twin_alone.args);
    both.args.twin = twin.args;
    both.args.prefetch = {both.segments[0].weights, 0, 1, 0, 1};  // only ever a hint
    tier_->direct_gemm(both.args);
    EXPECT_EQ(std::memcmp(alone.args.c, both.args.c, alone.bytes()), 0);
    EXPECT_EQ(std::memcmp(twin_alone.args.c, twin.args.c, alone.bytes()), 0);
  }
}

// A column or a row of NaN stays in the results that it belongs to; Inf becomes Inf or NaN.
TEST_P(GemmRandom, NanAndInfPropagate) {
  std::mt19937_64 random(6);
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    std::vector<Factors> factors = DirectFactors({40, 36, {70}}, random);
    factors[0].left(21, 33) = bad;
    DirectProblem direct(factors, 0);
    tier_->direct_gemm(direct.args);
    factors[0].right = RandomValues(70, 36, random);
    UnpackProblem unpack(factors, 0);
    tier_->unpack_gemm(unpack.args);
    for (std::int64_t i = 0; i < 40; ++i) {
      for (std::int64_t j = 0; j < 36; ++j) {
        EXPECT_EQ(std::isfinite(direct.args.c[i * direct.args.ldc + j]), i != 21) << i << ", " << j;
        EXPECT_EQ(std::isfinite(unpack.args.c[i * unpack.args.ldc + j]), i != 21) << i << ", " << j;
      }
    }
  }
}

// ---- Blocking ----

// Any cut into calls, in rows and in columns, and any cut of the contraction into calls that accumulate, gives the same bits.
TEST_P(GemmRandom, DirectFormSameBitsForAnyBlocking) {
  std::mt19937_64 random(7);
  for (const Shape& shape : kShapes) {
    const std::vector<Factors> factors = DirectFactors(shape, random);
    DirectProblem whole(factors, 0);
    tier_->direct_gemm(whole.args);
    for (int trial = 0; trial < 3; ++trial) {
      DirectProblem cut(factors, 0);
      for (std::int64_t p = 0; p < whole.args.panels;) {
        DirectGemmArgs args = cut.args;
        args.first_panel = p;
        args.panels = std::min<std::int64_t>(1 + static_cast<std::int64_t>(random() % 4), whole.args.panels - p);
        args.c = cut.args.c + p * 16 * args.ldc;
        if (trial == 2) {
          for (std::size_t s = 0; s < cut.segments.size(); ++s) {
            args.segments = {&cut.segments[s], 1};
            args.accumulate = s > 0;
            tier_->direct_gemm(args);
          }
        } else {
          tier_->direct_gemm(args);
        }
        p += args.panels;
      }
      ASSERT_EQ(std::memcmp(whole.args.c, cut.args.c, whole.bytes()), 0)
          << "M " << shape.m << " N " << shape.n << " trial " << trial;
    }
  }
}

TEST_P(GemmRandom, UnpackFormSameBitsForAnyBlocking) {
  std::mt19937_64 random(8);
  for (const Shape& shape : kShapes) {
    const std::vector<Factors> factors = UnpackFactors(shape, random);
    UnpackProblem whole(factors, 0);
    tier_->unpack_gemm(whole.args);
    for (int trial = 0; trial < 3; ++trial) {
      UnpackProblem cut(factors, 0);
      for (std::int64_t p = 0; p < whole.args.panels;) {
        UnpackGemmArgs args = cut.args;
        args.first_panel = p;
        args.panels = std::min<std::int64_t>(1 + static_cast<std::int64_t>(random() % 4), whole.args.panels - p);
        for (std::int64_t n = 0; n < whole.args.columns;) {
          args.first_column = n;
          args.columns = std::min<std::int64_t>(1 + static_cast<std::int64_t>(random() % 4), whole.args.columns - n);
          args.c = cut.args.c + p * 16 * args.ldc + n * 32;
          args.depth = 8 * static_cast<std::int64_t>(random() % 3);
          if (trial == 2) {
            for (std::size_t s = 0; s < cut.segments.size(); ++s) {
              args.segments = {&cut.segments[s], 1};
              args.accumulate = s > 0;
              tier_->unpack_gemm(args);
            }
          } else {
            tier_->unpack_gemm(args);
          }
          n += args.columns;
        }
        p += args.panels;
      }
      ASSERT_EQ(std::memcmp(whole.args.c, cut.args.c, whole.bytes()), 0)
          << "M " << shape.m << " N " << shape.n << " trial " << trial;
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(GemmRandom);

}  // namespace
}  // namespace moesaic
