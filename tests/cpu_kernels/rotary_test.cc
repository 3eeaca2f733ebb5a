// Rotary embeddings: the kernel of every tier against products and sums rounded one by one, and rows on a pool.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "cpu_kernels/fused/rotary.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

class RotateTest : public TierTest {};

/// What memory of that type keeps of a value.
float Kept(DType dtype, float value) { return dtype == DType::kFloat32 ? value : ToFloat(ToBFloat16(value)); }

/// Element j of a head that begins at `column` of row r, turned by the angles of row `angle`.
float Expected(DType dtype, const Rows& x, std::int64_t r, std::int64_t column, const Rows& cos, const Rows& sin,
               std::int64_t angle, std::int64_t size, std::int64_t j, bool back) {
  const std::int64_t half = size / 2, other = j < half ? j + half : j - half;
  // Volatile, so that no product is added unrounded.
  const volatile float product = x(r, column + j) * cos(angle, j);
  const volatile float turned = x(r, column + other) * sin(angle, back ? other : j);
  const float first = Kept(dtype, product), second = Kept(dtype, turned);
  return Kept(dtype, (j < half) == back ? first + second : first - second);
}

TEST_P(RotateTest, ProductsAndTheirSumAreRounded) {
  std::mt19937_64 random(5);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t size : {32, 64, 96, 128}) {
      for (const bool back : {false, true}) {
        for (const bool in_place : {false, true}) {
          const Dense values = RandomValues(1, 3 * size, random);
          const Rows x(dtype, values, 3 * size + 1), original(dtype, values, 3 * size), fresh(dtype, 1, 3 * size, 3 * size + 1);
          const Rows cos(dtype, RandomValues(1, size, random), size), sin(dtype, RandomValues(1, size, random), size);
          const Rows& out = in_place ? x : fresh;
          RotateArgs args;
          args.dtype = dtype;
          args.count = 3;
          args.size = size;
          args.x = x.data();
          args.out = out.data();
          args.cos = cos.data();
          args.sin = sin.data();
          args.back = back;
          tier_->fused.rotate(args);
          out.ExpectGapsUntouched();
          for (std::int64_t c = 0; c < 3 * size; ++c) {
            ASSERT_EQ(out(0, c), Expected(dtype, original, 0, c / size * size, cos, sin, 0, size, c % size, back))
                << "size " << size << " back " << back << " element " << c;
          }
        }
      }
    }
  }
}

TEST_P(RotateTest, NanPassesAndStaysWithItsPair) {
  Dense values(1, 64);
  for (std::int64_t c = 0; c < 64; ++c) values(0, c) = 1.0f;
  values(0, 5) = std::nanf("");
  const Rows x(DType::kBFloat16, values, 64), out(DType::kBFloat16, 1, 64, 64);
  values(0, 5) = 1.0f;
  const Rows ones(DType::kBFloat16, values, 64);
  RotateArgs args;
  args.count = 1;
  args.size = 64;
  args.x = x.data();
  args.out = out.data();
  args.cos = args.sin = ones.data();
  tier_->fused.rotate(args);
  for (std::int64_t c = 0; c < 64; ++c) EXPECT_EQ(std::isnan(out(0, c)), c % 32 == 5) << c;
}

MOESAIC_TEST_ON_EVERY_TIER(RotateTest);

TEST(RotaryTest, EachTokenHasItsAnglesOnAnyNumberOfThreads) {
  std::mt19937_64 random(6);
  constexpr std::int64_t kTokens = 2 * 301, kAngles = 301, kSize = 32, kColumns = 5 * kSize;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Rows x(dtype, RandomValues(kTokens, kColumns, random), kColumns + 7);
    const Rows cos(dtype, RandomValues(kAngles, kSize, random), kSize + 3),
        sin(dtype, RandomValues(kAngles, kSize, random), kSize);
    for (const int threads : {1, 2, 5}) {
      threadpool::Pool pool(threads);
      const Rows out(dtype, kTokens, kColumns, kColumns + 5);
      fused::Rotary({x.view(), cos.view(), sin.view(), out.view(), threads == 2}, pool);
      out.ExpectGapsUntouched();
      for (std::int64_t t = 0; t < kTokens; ++t) {
        for (std::int64_t c = 0; c < kColumns; ++c) {
          ASSERT_EQ(out(t, c), Expected(dtype, x, t, c / kSize * kSize, cos, sin, t % kAngles, kSize, c % kSize, threads == 2))
              << t << ", " << c;
        }
      }
    }
  }
}

TEST(RotaryTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(1);
  const DType bf16 = DType::kBFloat16;
  const Rows x(bf16, 6, 64, 64), out(bf16, 6, 64, 64), cos(bf16, 3, 32, 32), sin(bf16, 3, 32, 32), narrow(bf16, 3, 16, 16),
      many(bf16, 4, 32, 32), wide(DType::kFloat32, 3, 32, 32), wrong(bf16, 6, 32, 32);
  const auto message = [&](const Rows& c, const Rows& s, const Rows& o) -> std::string {
    try {
      fused::Rotary({x.view(), c.view(), s.view(), o.view()}, pool);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(cos, sin, out), "");
  EXPECT_EQ(message(narrow, sin, out), "cos has 16 columns; expected a multiple of 32 that divides x's 64");
  EXPECT_EQ(message(many, sin, out), "cos has 4 rows; expected a divisor of x's 6");
  EXPECT_EQ(message(wide, sin, out), "cos is float32; expected bfloat16, as x");
  EXPECT_EQ(message(cos, many, out), "sin has shape [4, 32]; expected [3, 32]");
  EXPECT_EQ(message(cos, sin, wrong), "out has shape [6, 32]; expected [6, 64]");
}

}  // namespace
}  // namespace moesaic
