// The forms of GEMM for few rows of activations: exact on integers for every number of rows, close to double on random values,
// the same bits for any cut into panels, and nothing outside of the rows that count is read or written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Rows of weights (direct) or its columns (unpack), and the depth of each segment: on and off the grid, one panel and an odd
/// number of them, and more than a superblock both ways.
struct Shape {
  std::int64_t n;
  std::vector<std::int64_t> depths;
};
const std::vector<Shape> kShapes = {{1, {1}},           {16, {32}},      {47, {100}},      {96, {600, 16}},
                                    {33, {17, 33, 64}}, {40, {2100, 5}}, {300, {150, 40}}, {35, {200, 250, 70}}};

class FewRowsTest : public TierTest {
 protected:
  /// Every number up to a panel, then some: each way to cut them into vectors and passes, and the most.
  std::vector<std::int64_t> DirectRows() const {
    std::vector<std::int64_t> all;
    for (const std::int64_t rows : {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17,  18, 20,
                                    24, 25, 27, 31, 32, 33, 34, 40, 43, 47, 48, 50, 56, 57, 64, 65, 101, 384}) {
      if (rows <= tier_->most_stored_rows) all.push_back(rows);
    }
    EXPECT_EQ(all.back(), tier_->most_stored_rows);
    return all;
  }

  void SetUp() override {
    TierTest::SetUp();
    if (!IsSkipped() && tier_->most_few_rows == 0) GTEST_SKIP() << tier_->name << " has no form for few rows";
  }

  /// Activations of which `rows` count and the others are NaN.
  static Dense WithNanBelow(const Dense& values, std::int64_t rows) {
    Dense all = values;
    std::fill(all.values.begin() + rows * all.cols, all.values.end(), kNan);
    return all;
  }

  std::mt19937_64 random_{1};
};

/// What both forms are given: activations [16][k], weights [n][k] or, in the unpack form, [k][n].
struct Problem {
  std::vector<Dense> activations;
  std::vector<Dense> weights;
  std::vector<Tiles> tiles;
  std::vector<GemmSegment> segments;

  void Lay(Order order, std::int64_t rows, const auto& with_nan) {
    tiles.reserve(2 * weights.size());
    for (std::size_t s = 0; s < weights.size(); ++s) {
      tiles.emplace_back(Order::kStored, weights[s], true);
      tiles.emplace_back(order, with_nan(activations[s], rows), false);
      segments.push_back({tiles[2 * s].matrix(), tiles[2 * s + 1].matrix()});
    }
  }
};

TEST_P(FewRowsTest, DirectForm) {
  for (const Shape& shape : kShapes) {
    for (const std::int64_t rows : DirectRows()) {
      for (const bool integers : {true, false}) {
        SCOPED_TRACE(testing::Message() << "rows " << rows << " N " << shape.n << " segments " << shape.depths.size());
        const auto make = integers ? RandomIntegers : RandomValues;
        const std::int64_t columns = RoundUp(rows, 16);
        Problem problem;
        for (const std::int64_t k : shape.depths) {
          problem.activations.push_back(make(columns, k, random_));
          problem.weights.push_back(make(shape.n, k, random_));
        }
        problem.Lay(Order::kStored, rows, WithNanBelow);
        DirectGemmArgs args;
        args.segments = problem.segments;
        args.panels = CeilDiv(shape.n, 16);
        args.activation_panels = columns / 16;
        args.ldc = columns + 16;
        args.row_count = rows;
        const std::int64_t size = args.panels * 16 * args.ldc;
        const PoisonedBuffer whole(size * 4), cut(size * 4);
        args.c = whole.As<float>();
        args.prefetch = {problem.segments[0].weights, 0, 1, 0, 1};  // only ever a hint
        tier_->direct_gemm(args);
        for (std::int64_t i = 0; i < args.panels * 16; ++i) {
          for (std::int64_t t = 0; t < columns; ++t) {
            double sum = 0.0, a_squares = 0.0, b_squares = 0.0, depth = 0.0;
            for (std::size_t s = 0; i < shape.n && t < rows && s < shape.depths.size(); ++s) {
              depth += static_cast<double>(shape.depths[s]);
              for (std::int64_t k = 0; k < shape.depths[s]; ++k) {
                const double a = problem.weights[s](i, k), b = problem.activations[s](t, k);
                sum += a * b;
                a_squares += a * a;
                b_squares += b * b;
              }
            }
            // As for the cells: eps * sqrt(K) * |a| |b|; integers are exact.
            const double tolerance = integers ? 0.0 : 0x1p-23 * std::sqrt(depth) * std::sqrt(a_squares * b_squares);
            ASSERT_NEAR(args.c[i * args.ldc + t], sum, tolerance) << "at " << i << ", " << t;
          }
          for (std::int64_t t = columns; t < args.ldc; ++t) ASSERT_TRUE(std::isnan(args.c[i * args.ldc + t]));
        }
        DirectGemmArgs part = args;
        for (part.first_panel = 0; part.first_panel < args.panels; ++part.first_panel) {
          part.panels = 1;
          part.c = cut.As<float>() + part.first_panel * 16 * args.ldc;
          part.prefetch = {problem.segments[0].weights, 0, 1, 0, 1};  // only ever a hint
          tier_->direct_gemm(part);
        }
        ASSERT_EQ(std::memcmp(whole.As<float>(), cut.As<float>(), static_cast<std::size_t>(size) * 4), 0);
      }
    }
  }
}

// Two products with the same activations in one call: the bits of two calls.
TEST_P(FewRowsTest, DirectFormOfTwins) {
  for (const std::int64_t rows : DirectRows()) {
    const std::int64_t columns = RoundUp(rows, 16), ldc = columns + 16;
    Problem problem, twin;
    for (const std::int64_t k : {300, 16}) {
      problem.activations.push_back(RandomValues(columns, k, random_));
      problem.weights.push_back(RandomValues(70, k, random_));
      twin.weights.push_back(RandomValues(70, k, random_));
    }
    twin.activations = problem.activations;
    problem.Lay(Order::kStored, rows, WithNanBelow);
    twin.Lay(Order::kStored, rows, WithNanBelow);
    const std::int64_t size = CeilDiv(70, 16) * 16 * ldc;
    const PoisonedBuffer alone(size * 4), twin_alone(size * 4), both(size * 4), twin_both(size * 4);
    DirectGemmArgs args;
    args.segments = problem.segments;
    args.panels = CeilDiv(70, 16);
    args.activation_panels = columns / 16;
    args.ldc = ldc;
    args.row_count = rows;
    args.c = both.As<float>();
    args.twin = {twin.segments, twin_both.As<float>()};
    tier_->direct_gemm(args);
    args.twin = {};
    args.c = alone.As<float>();
    tier_->direct_gemm(args);
    args.segments = twin.segments;
    args.c = twin_alone.As<float>();
    tier_->direct_gemm(args);
    const auto bytes = static_cast<std::size_t>(size) * 4;
    EXPECT_EQ(std::memcmp(alone.As<float>(), both.As<float>(), bytes), 0) << "rows " << rows;
    EXPECT_EQ(std::memcmp(twin_alone.As<float>(), twin_both.As<float>(), bytes), 0) << "rows " << rows;
  }
}

TEST_P(FewRowsTest, DirectFormAddsToC) {
  for (const std::int64_t rows : {std::int64_t{3}, std::int64_t{20}, tier_->most_stored_rows - 1}) {
    const std::int64_t columns = RoundUp(rows, 16);
    Problem problem;
    problem.activations.push_back(RandomIntegers(columns, 300, random_));
    problem.weights.push_back(RandomIntegers(112, 300, random_));
    problem.Lay(Order::kStored, rows, WithNanBelow);
    DirectGemmArgs args;
    args.segments = problem.segments;
    args.panels = 7;
    args.activation_panels = columns / 16;
    args.ldc = columns;
    args.row_count = rows;
    const PoisonedBuffer memory(112 * columns * 4);
    args.c = memory.As<float>();
    tier_->direct_gemm(args);
    std::vector<float> twice(args.c, args.c + 112 * columns);
    for (float& value : twice) value *= 2;
    args.accumulate = true;
    tier_->direct_gemm(args);
    EXPECT_EQ(std::vector<float>(args.c, args.c + 112 * columns), twice);
  }
}

// Transposed weights (register_direct.h) and cells: one order of summation, the same bits.
TEST_P(FewRowsTest, DirectFormOfMoreRowsAddsUpAsCells) {
  if (tier_->most_stored_rows == tier_->most_few_rows) GTEST_SKIP() << tier_->name << " does not transpose weights";
  for (const Shape& shape : kShapes) {
    for (const std::int64_t rows : {tier_->most_few_rows + 1, std::int64_t{95}, tier_->most_stored_rows}) {
      const std::int64_t columns = RoundUp(rows, 16);
      Problem stored, pairs;
      for (const std::int64_t k : shape.depths) {
        Dense x = RandomValues(columns, k, random_);
        std::fill(x.values.begin() + rows * k, x.values.end(), 0.0f);
        stored.activations.push_back(x);
        stored.weights.push_back(RandomValues(shape.n, k, random_));
      }
      pairs.activations = stored.activations;
      pairs.weights = stored.weights;
      const auto as_they_are = [](const Dense& values, std::int64_t) { return values; };
      stored.Lay(Order::kStored, rows, as_they_are);
      pairs.Lay(Order::kPairs, rows, as_they_are);
      DirectGemmArgs args;
      args.panels = CeilDiv(shape.n, 16);
      args.activation_panels = columns / 16;
      args.ldc = columns;
      // Only ever a hint, of the last panel too.
      args.prefetch = {stored.segments[0].weights, args.panels - 1, 1, 0, 1, {stored.tiles[1].matrix().data, nullptr}, 0};
      const std::int64_t size = args.panels * 16 * args.ldc * 4;
      const PoisonedBuffer expected(size), c(size);
      for (const bool accumulate : {false, true}) {
        args.accumulate = accumulate;
        args.segments = pairs.segments;
        args.row_count = 0;
        args.c = expected.As<float>();
        tier_->direct_gemm(args);
        args.segments = stored.segments;
        args.row_count = rows;
        args.c = c.As<float>();
        tier_->direct_gemm(args);
        ASSERT_EQ(std::memcmp(expected.As<float>(), c.As<float>(), static_cast<std::size_t>(size)), 0)
            << "rows " << rows << " N " << shape.n << " accumulate " << accumulate;
      }
    }
  }
}

// One order of summation: the same bits for so many rows of more, whatever else lies there, and none of the others is written.
TEST_P(FewRowsTest, UnpackForm) {
  for (const Shape& shape : kShapes) {
    for (const std::int64_t rows :
         {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 24, 25, 31, 38, 48, 97, 193}) {
      SCOPED_TRACE(testing::Message() << "rows " << rows << " N " << shape.n << " segments " << shape.depths.size());
      const std::int64_t all = RoundUp(rows, 16);
      Problem problem, padded;
      for (const std::int64_t k : shape.depths) {
        problem.activations.push_back(RandomValues(all, k, random_));
        problem.weights.push_back(RandomValues(k, shape.n, random_));
      }
      padded.activations = problem.activations;
      padded.weights = problem.weights;
      problem.Lay(Order::kOperand, rows, WithNanBelow);
      padded.Lay(Order::kOperand, all, WithNanBelow);
      UnpackGemmArgs args;
      args.segments = padded.segments;
      args.panels = all / 16;
      args.columns = CeilDiv(shape.n, 32);
      args.ldc = args.columns * 32 + 16;
      const PoisonedBuffer expected(all * args.ldc * 4), few(all * args.ldc * 4), lines(all * args.columns * 64);
      const PoisonedBuffer sums(all * 256 * 4), scratch(UnpackScratchElements(args.segments) * 2);
      args.scratch = scratch.As<BFloat16>();
      for (const bool accumulate : {false, true}) {
        args.accumulate = accumulate;
        args.segments = padded.segments;
        args.row_count = 0;
        args.c = expected.As<float>();
        tier_->unpack_gemm(args);
        args.segments = problem.segments;
        args.row_count = rows;
        args.c = few.As<float>();
        tier_->unpack_gemm(args);
        for (std::int64_t t = 0; t < all; ++t) {
          for (std::int64_t j = 0; j < args.ldc; ++j) {
            const float value = args.c[t * args.ldc + j];
            if (t < rows && j < args.columns * 32) {
              ASSERT_EQ(value, expected.As<float>()[t * args.ldc + j]) << t << ", " << j;
            } else {
              ASSERT_TRUE(std::isnan(value)) << t << ", " << j;
            }
          }
        }
      }
      args.accumulate = false;
      args.c = expected.As<float>();
      tier_->unpack_gemm(args);
      std::vector<BFloat16*> out(static_cast<std::size_t>(all));
      for (std::int64_t t = 0; t < rows; t += 2)
        out[static_cast<std::size_t>(t)] = lines.As<BFloat16>() + t * args.columns * 32;
      const std::int64_t ldc = args.ldc;
      for (const bool with_sums : {false, true}) {
        args.c = with_sums ? sums.As<float>() : nullptr;
        args.ldc = 256;
        args.rows = out.data();
        tier_->unpack_gemm(args);
        for (std::int64_t t = 0; t < all; ++t) {
          for (std::int64_t j = 0; j < args.columns * 32; ++j) {
            const BFloat16 wanted =
                out[static_cast<std::size_t>(t)] != nullptr ? ToBFloat16(expected.As<float>()[t * ldc + j]) : BFloat16{0xffff};
            ASSERT_EQ(lines.As<BFloat16>()[t * args.columns * 32 + j].bits, wanted.bits) << t << ", " << j;
          }
        }
      }
    }
  }
}

// One order of summation here too. Beyond the rows is NaN, but for the other half of the last one's pair.
TEST_P(FewRowsTest, GradientForm) {
  for (const Shape& shape : kShapes) {
    for (std::int64_t rows = 1; rows <= 16; ++rows) {
      SCOPED_TRACE(testing::Message() << "rows " << rows << " M " << shape.depths[0] << " N " << shape.n);
      std::vector<Tiles> tiles;
      std::vector<GradientSegment> few, padded;
      tiles.reserve(4 * shape.depths.size());
      for (std::size_t s = 0; s < shape.depths.size(); ++s) {
        Dense left = RandomValues(shape.depths[0], 32, random_), right = RandomValues(32, shape.n, random_);
        for (const float beyond : {0.0f, kNan}) {
          const std::int64_t first = beyond == 0.0f ? rows : RoundUp(rows, 2);
          for (std::int64_t t = first; t < 32; ++t) {
            for (std::int64_t i = 0; i < left.rows; ++i) left(i, t) = beyond;
            for (std::int64_t j = 0; j < right.cols; ++j) right(t, j) = beyond;
          }
          tiles.emplace_back(Order::kOperand, left, false);
          tiles.emplace_back(Order::kRowPairs, right, false);
          (beyond == 0.0f ? padded : few).push_back({tiles[tiles.size() - 2].matrix(), tiles.back().matrix()});
        }
      }
      GradientGemmArgs args;
      args.panels = CeilDiv(shape.depths[0], 16);
      args.ldc = RoundUp(shape.n, 16) + 16;
      const std::int64_t size = args.panels * 16 * args.ldc * 4;
      const PoisonedBuffer expected(size), c(size);
      for (const bool accumulate : {false, true}) {
        args.accumulate = accumulate;
        args.segments = padded;
        args.few_rows = 0;
        args.c = expected.As<float>();
        tier_->gradient_gemm(args);
        args.segments = few;
        args.few_rows = rows;
        args.c = c.As<float>();
        tier_->gradient_gemm(args);
        ASSERT_EQ(std::memcmp(expected.As<float>(), c.As<float>(), static_cast<std::size_t>(size)), 0);
      }
    }
  }
}

TEST_P(FewRowsTest, NanAndInfPropagate) {
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    const std::int64_t many = tier_->most_stored_rows - 1, columns = RoundUp(many, 16);
    Problem of_many;
    of_many.activations.push_back(RandomValues(columns, 70, random_));
    of_many.weights.push_back(RandomValues(16, 70, random_));
    of_many.activations[0](1, 33) = bad;
    of_many.Lay(Order::kStored, many, WithNanBelow);
    const PoisonedBuffer sums(16 * columns * 4);
    DirectGemmArgs all;
    all.segments = of_many.segments;
    all.panels = 1;
    all.activation_panels = columns / 16;
    all.c = sums.As<float>();
    all.ldc = columns;
    all.row_count = many;
    tier_->direct_gemm(all);
    for (std::int64_t i = 0; i < 16; ++i) {
      for (std::int64_t t = 0; t < columns; ++t) EXPECT_EQ(std::isfinite(all.c[i * columns + t]), t != 1) << i << ", " << t;
    }
    Problem direct;
    direct.activations.push_back(RandomValues(16, 70, random_));
    direct.weights.push_back(RandomValues(16, 70, random_));
    direct.activations[0](1, 33) = bad;
    Problem unpack;
    unpack.activations = direct.activations;
    unpack.weights.push_back(RandomValues(70, 32, random_));
    direct.Lay(Order::kStored, 4, WithNanBelow);
    unpack.Lay(Order::kOperand, 4, WithNanBelow);
    const PoisonedBuffer transposed(16 * 16 * 4), c(16 * 32 * 4);
    DirectGemmArgs args;
    args.segments = direct.segments;
    args.panels = args.activation_panels = 1;
    args.c = transposed.As<float>();
    args.ldc = 16;
    args.row_count = 4;
    tier_->direct_gemm(args);
    UnpackGemmArgs to_rows;
    to_rows.segments = unpack.segments;
    to_rows.panels = to_rows.columns = 1;
    to_rows.c = c.As<float>();
    to_rows.ldc = 32;
    to_rows.row_count = 4;
    tier_->unpack_gemm(to_rows);
    for (std::int64_t t = 0; t < 4; ++t) {
      for (std::int64_t i = 0; i < 16; ++i) EXPECT_EQ(std::isfinite(args.c[i * 16 + t]), t != 1) << i << ", " << t;
      for (std::int64_t j = 0; j < 32; ++j) EXPECT_EQ(std::isfinite(to_rows.c[t * 32 + j]), t != 1) << t << ", " << j;
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(FewRowsTest);

}  // namespace
}  // namespace moesaic
