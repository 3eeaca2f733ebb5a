// SwiGLU and its backward, and the merge of a token's rows, on every tier against scalar formulas in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::int64_t kBlock = 32;

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

constexpr Gate kGates[] = {Gate::kSilu, Gate::kGeluTanh};

class ElementwiseTest : public TierTest {
 protected:
  void Forward(Gate activation);
  void Backward(Gate activation);
};

/// `value` comes from some fp32 operations, each within 2^-24 of its result, a sigmoid within 2^-18 (from -20 on), and is then
/// rounded to bf16: it is what rounding gives somewhere within 2^-17 of the expected number.
/// @param margin  more than that, where terms cancel
void ExpectBf16(float value, double expected, const char* name, std::int64_t i, std::int64_t t, double margin = 0.0) {
  margin += 0x1p-17 * std::fabs(expected);
  ASSERT_GE(value, ToFloat(ToBFloat16(static_cast<float>(expected - margin)))) << name << " at row " << i << " token " << t;
  ASSERT_LE(value, ToFloat(ToBFloat16(static_cast<float>(expected + margin)))) << name << " at row " << i << " token " << t;
}

/// A block of the transposed results of the direct form, [32][ld].
struct Transposed {
  std::int64_t ld;
  PoisonedBuffer memory;

  explicit Transposed(const Dense& values) : ld(RoundUp(values.cols, 16) + 16), memory(kBlock * ld * 4) {
    for (std::int64_t i = 0; i < values.rows; ++i) {
      for (std::int64_t t = 0; t < values.cols; ++t) data()[i * ld + t] = values(i, t);
    }
  }
  float* data() const { return memory.As<float>(); }
};

struct BlockCase {
  std::int64_t tokens;
  std::int64_t rows;
};
const std::vector<BlockCase> kCases = {{1, 32}, {15, 32}, {16, 32}, {17, 32}, {32, 32}, {45, 32}, {64, 1}, {33, 17}, {40, 16}};

/// Room for whole tile columns of the transposed results, so that operand tiles have a panel that nobody fills at times.
Tiles OutputTiles(std::int64_t rows, std::int64_t columns) {
  Tiles tiles(Order::kOperand, RoundUp(rows, 32), columns, false);
  std::memset(tiles.matrix().data, 0xff, static_cast<std::size_t>(tiles.matrix().size()) * sizeof(BFloat16));
  return tiles;
}

/// sigma(y) and y' of a gate.
struct Factor {
  double sigma;
  double slope;
};

Factor FactorOf(Gate activation, double g) {
  if (activation == Gate::kSilu) return {Sigmoid(g), 1.0};
  const double twice_root = std::sqrt(8.0 / std::numbers::pi);
  return {Sigmoid(twice_root * (g + 0.044715 * g * g * g)), twice_root * (1.0 + 3 * 0.044715 * g * g)};
}

TEST_P(ElementwiseTest, SwigluForward) {
  for (const Gate activation : kGates) Forward(activation);
}

void ElementwiseTest::Forward(Gate activation) {
  std::mt19937_64 random(1);
  for (const BlockCase& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.rows << " rows");
    const Dense gate = RandomValues(c.rows, c.tokens, random);
    const Dense up = RandomValues(c.rows, c.tokens, random);
    const Transposed gate_t(gate);
    const Transposed up_t(up);
    for (const bool save : {false, true}) {
      const Tiles z = OutputTiles(c.tokens, 3 * kBlock);
      const PoisonedBuffer saved_gate(c.rows * c.tokens * 2);
      const PoisonedBuffer saved_up(c.rows * c.tokens * 2);
      SwigluForwardArgs args;
      args.activation = activation;
      args.gate = gate_t.data();
      args.up = up_t.data();
      args.ld = gate_t.ld;
      args.tokens = c.tokens;
      args.rows = c.rows;
      args.saved_gate = save ? saved_gate.As<BFloat16>() : nullptr;
      args.saved_up = save ? saved_up.As<BFloat16>() : nullptr;
      args.z = z.matrix();
      args.block = 1;
      tier_->swiglu_forward(args);
      for (std::int64_t t = 0; t < z.matrix().panels * 16; ++t) {
        for (std::int64_t i = 0; i < kBlock; ++i) {
          const bool valid = t < c.tokens && i < c.rows;
          const double g = valid ? gate(i, t) : 0.0;
          if (t < RoundUp(c.tokens, 16)) {
            ExpectBf16(z.Get(t, kBlock + i), valid ? g * FactorOf(activation, g).sigma * up(i, t) : 0.0, "Z", i, t);
          } else {
            EXPECT_TRUE(std::isnan(z.Get(t, kBlock + i))) << "a panel without tokens was touched";
          }
          EXPECT_TRUE(std::isnan(z.Get(t, i)) && std::isnan(z.Get(t, 2 * kBlock + i))) << "another block was touched";
          if (!valid || !save) continue;
          EXPECT_EQ(ToFloat(saved_gate.As<BFloat16>()[SavedPosition(i, t, c.rows, c.tokens)]), gate(i, t));
          EXPECT_EQ(ToFloat(saved_up.As<BFloat16>()[SavedPosition(i, t, c.rows, c.tokens)]), up(i, t));
        }
      }
    }
  }
}

/// Inputs and outputs of one call of the backward.
struct BackwardBlock {
  Dense d_z, gate, up;
  std::vector<float> weight;
  Transposed d_z_t;
  PoisonedBuffer saved_gate, saved_up, d_weight;
  Tiles d_gate, d_up, z, d_gate_t, d_up_t, z_t;
  SwigluBackwardArgs args;

  BackwardBlock(const BlockCase& c, std::mt19937_64& random)
      : d_z(RandomValues(c.rows, c.tokens, random)),
        gate(RandomValues(c.rows, c.tokens, random)),
        up(RandomValues(c.rows, c.tokens, random)),
        d_z_t(d_z),
        saved_gate(c.rows * c.tokens * 2),
        saved_up(c.rows * c.tokens * 2),
        d_weight(RoundUp(c.tokens, 16) * 4),
        d_gate(OutputTiles(c.tokens, 2 * kBlock)),
        d_up(OutputTiles(c.tokens, 2 * kBlock)),
        z(OutputTiles(c.tokens, 2 * kBlock)),
        d_gate_t(OutputTiles(kBlock, c.tokens)),
        d_up_t(OutputTiles(kBlock, c.tokens)),
        z_t(OutputTiles(kBlock, c.tokens)) {
    for (std::int64_t t = 0; t < c.tokens; ++t) weight.push_back(RandomValues(1, 1, random)(0, 0));
    for (std::int64_t t = 0; t < RoundUp(c.tokens, 16); ++t) d_weight.As<float>()[t] = static_cast<float>(t);
    Save();
    args.d_z = d_z_t.data();
    args.ld = d_z_t.ld;
    args.tokens = c.tokens;
    args.rows = c.rows;
    args.saved_gate = saved_gate.As<BFloat16>();
    args.saved_up = saved_up.As<BFloat16>();
    args.routing_weight = weight.data();
    args.d_weight = d_weight.As<float>();
    args.block = 1;
    args.d_gate = d_gate.matrix();
    args.d_up = d_up.matrix();
    args.z = z.matrix();
    args.d_gate_t = d_gate_t.matrix();
    args.d_up_t = d_up_t.matrix();
    args.z_t = z_t.matrix();
  }

  void Save() {
    for (std::int64_t i = 0; i < gate.rows; ++i) {
      for (std::int64_t t = 0; t < gate.cols; ++t) {
        saved_gate.As<BFloat16>()[SavedPosition(i, t, gate.rows, gate.cols)] = ToBFloat16(gate(i, t));
        saved_up.As<BFloat16>()[SavedPosition(i, t, gate.rows, gate.cols)] = ToBFloat16(up(i, t));
      }
    }
  }
};

TEST_P(ElementwiseTest, SwigluBackward) {
  for (const Gate activation : kGates) Backward(activation);
}

void ElementwiseTest::Backward(Gate activation) {
  std::mt19937_64 random(2);
  for (const BlockCase& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.rows << " rows");
    BackwardBlock b(c, random);
    b.args.activation = activation;
    tier_->swiglu_backward(b.args);
    for (std::int64_t t = 0; t < RoundUp(c.tokens, 32); ++t) {
      double d_weight = static_cast<double>(t);
      double magnitude = d_weight;
      for (std::int64_t i = 0; i < kBlock; ++i) {
        double z = 0.0, d_gate = 0.0, d_up = 0.0;
        if (t < c.tokens && i < c.rows) {
          const double g = b.gate(i, t);
          const double u = b.up(i, t);
          const double d_z = static_cast<double>(b.weight[static_cast<std::size_t>(t)]) * b.d_z(i, t);
          const auto [sigma, slope] = FactorOf(activation, g);
          z = g * sigma * u;
          d_up = d_z * g * sigma;
          d_gate = d_z * u * sigma * (1.0 + g * (1.0 - sigma) * slope);
          d_weight += b.d_z(i, t) * z;
          magnitude += std::fabs(b.d_z(i, t) * z);
        }
        // Near g = -1.278 the slope of silu, sigma + g sigma (1 - sigma), is zero while its terms are 0.22; GELU's near -0.75.
        const double terms =
            t < c.tokens && i < c.rows ? std::fabs(b.weight[static_cast<std::size_t>(t)] * b.d_z(i, t) * b.up(i, t)) : 0.0;
        ExpectBf16(b.d_gate_t.Get(i, t), d_gate, "dG", i, t, 0x1p-17 * terms);
        ExpectBf16(b.d_up_t.Get(i, t), d_up, "dU", i, t);
        ExpectBf16(b.z_t.Get(i, t), z, "Z", i, t);
        const Tiles* const operands[] = {&b.d_gate, &b.d_up, &b.z};
        const Tiles* const transposes[] = {&b.d_gate_t, &b.d_up_t, &b.z_t};
        for (int k = 0; k < 3; ++k) {
          if (t < RoundUp(c.tokens, 16)) {
            EXPECT_EQ(operands[k]->Get(t, kBlock + i), transposes[k]->Get(i, t)) << k << ": " << i << ", " << t;
          } else {
            EXPECT_TRUE(std::isnan(operands[k]->Get(t, kBlock + i))) << k << ": a panel without tokens was touched";
          }
          EXPECT_TRUE(std::isnan(operands[k]->Get(t, i))) << k << ": another block was touched";
        }
      }
      // At most 33 additions and as many products, each within 2^-24 of the magnitudes, and the sigmoid within 2^-18.
      if (t < RoundUp(c.tokens, 16)) {
        EXPECT_NEAR(b.d_weight.As<float>()[t], d_weight, (70 * 0x1p-24 + 0x1p-18) * magnitude) << t;
      }
    }
  }
}

TEST_P(ElementwiseTest, SwigluBackwardLeavesOutWhatNobodyWants) {
  std::mt19937_64 random(3);
  const BlockCase c{37, 32};
  BackwardBlock all(c, random);
  tier_->swiglu_backward(all.args);
  random.seed(3);
  BackwardBlock some(c, random);
  some.args.z = some.args.d_gate_t = some.args.d_up_t = some.args.z_t = {};
  tier_->swiglu_backward(some.args);
  random.seed(3);
  BackwardBlock transposes(c, random);
  transposes.args.d_up_t = {};
  tier_->swiglu_backward(transposes.args);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    EXPECT_EQ(some.d_weight.As<float>()[t], all.d_weight.As<float>()[t]);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      EXPECT_EQ(some.d_gate.Get(t, kBlock + i), all.d_gate.Get(t, kBlock + i));
      EXPECT_EQ(some.d_up.Get(t, kBlock + i), all.d_up.Get(t, kBlock + i));
      EXPECT_TRUE(std::isnan(some.z.Get(t, kBlock + i)) && std::isnan(some.z_t.Get(i, t)));
      EXPECT_EQ(transposes.d_gate_t.Get(i, t), all.d_gate_t.Get(i, t));
      EXPECT_EQ(transposes.z_t.Get(i, t), all.z_t.Get(i, t));
      EXPECT_TRUE(std::isnan(transposes.d_up_t.Get(i, t)));
    }
  }
}

// Gates at both ends of fp32: x for large x, 0 for large negative x; never a product of a huge x with a sigma that is only
// small. Their slopes: 1 and 0.
TEST_P(ElementwiseTest, GatesOfExtremes) {
  const std::vector<float> values = {0.0f,    -0.0f,  1e-30f, -1e-30f, 20.0f,  -20.0f, 80.0f,  -80.0f, 100.0f,
                                     -100.0f, 1e10f,  -1e10f, 1e30f,   -1e30f, 3e38f,  -3e38f, -87.0f, -87.5f,
                                     -88.0f,  -90.0f, 1.0f,   -1.0f,   4.0f,   -4.0f,  6.0f,   -6.0f,  9.0f,
                                     -9.0f,   9.5f,   -9.5f,  12.0f,   -12.0f, 13.0f,  -13.0f, 14.0f,  -14.0f};
  Dense gate(1, static_cast<std::int64_t>(values.size()));
  gate.values = values;
  Dense up(1, gate.cols);
  std::fill(up.values.begin(), up.values.end(), 1.0f);
  const Transposed gate_t(gate);
  const Transposed up_t(up);
  const Tiles z = OutputTiles(gate.cols, kBlock);
  SwigluForwardArgs args;
  args.gate = gate_t.data();
  args.up = up_t.data();
  args.ld = gate_t.ld;
  args.tokens = gate.cols;
  args.rows = 1;
  args.z = z.matrix();
  std::mt19937_64 random(6);
  BackwardBlock b({gate.cols, 1}, random);
  std::fill(b.d_z.values.begin(), b.d_z.values.end(), 1.0f);
  const Transposed d_z_t(b.d_z);
  b.args.d_z = d_z_t.data();
  b.args.ld = d_z_t.ld;
  std::fill(b.weight.begin(), b.weight.end(), 1.0f);
  b.gate = gate;
  b.up = up;
  b.Save();
  for (const Gate activation : kGates) {
    args.activation = b.args.activation = activation;
    tier_->swiglu_forward(args);
    tier_->swiglu_backward(b.args);
    for (std::int64_t t = 0; t < gate.cols; ++t) {
      const double g = gate(0, t);
      const double expected = g < -700.0 ? 0.0 : g * FactorOf(activation, g).sigma;  // e^-g overflows double below
      EXPECT_NEAR(z.Get(t, 0), expected, 0x1p-8 * std::fabs(expected) + 1e-30) << "gate " << g;
      const auto [sigma, slope] = FactorOf(activation, std::clamp(g, -100.0, 100.0));
      const double exact = sigma * (1.0 + std::clamp(g, -100.0, 100.0) * (1.0 - sigma) * slope);
      EXPECT_NEAR(b.d_gate.Get(t, kBlock), exact, 0x1p-8 * std::fabs(exact) + 1e-6) << "slope at " << g;
    }
  }
}

TEST_P(ElementwiseTest, SwigluNanAndInfPropagate) {
  std::mt19937_64 random(4);
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const bool in_gate : {true, false}) {
      Dense gate = RandomValues(32, 20, random);
      Dense up = RandomValues(32, 20, random);
      (in_gate ? gate : up)(5, 9) = bad;
      const Transposed gate_t(gate);
      const Transposed up_t(up);
      const Tiles z = OutputTiles(20, kBlock);
      SwigluForwardArgs args;
      args.gate = gate_t.data();
      args.up = up_t.data();
      args.ld = gate_t.ld;
      args.tokens = 20;
      args.z = z.matrix();
      tier_->swiglu_forward(args);
      // silu(-inf) is 0 in the limit and NaN by x * sigma(x): either will do.
      const bool limit_is_finite = in_gate && bad == -kInf;
      for (std::int64_t t = 0; t < 20; ++t) {
        for (std::int64_t i = 0; i < kBlock; ++i) {
          if (t == 9 && i == 5) {
            EXPECT_TRUE(!std::isfinite(z.Get(t, i)) || (limit_is_finite && z.Get(t, i) == 0.0f))
                << bad << " gave " << z.Get(t, i);
          } else {
            EXPECT_TRUE(std::isfinite(z.Get(t, i))) << i << ", " << t;
          }
        }
      }

      BackwardBlock b({20, 32}, random);
      (in_gate ? b.gate : b.up)(5, 9) = bad;
      b.Save();
      tier_->swiglu_backward(b.args);
      if (std::isnan(bad)) {
        EXPECT_TRUE(std::isnan(b.d_weight.As<float>()[9]));
        EXPECT_TRUE(std::isnan(b.d_gate.Get(9, kBlock + 5)));
      }
      for (std::int64_t t = 0; t < 20; ++t) {
        if (t == 9) continue;
        EXPECT_TRUE(std::isfinite(b.d_weight.As<float>()[t]));
        for (std::int64_t i = 0; i < kBlock; ++i) EXPECT_TRUE(std::isfinite(b.d_gate.Get(t, kBlock + i)));
      }
    }
  }
}

TEST_P(ElementwiseTest, MergeRows) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (const std::int64_t columns : {1, 15, 16, 33, 200}) {
    for (const std::int64_t count : {0, 1, 2, 8}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (const std::int64_t stride : {1, 3}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, " << count << " rows, stride " << stride);
          const Dense values = RandomValues(count, columns, random);
          const PoisonedBuffer memory(count * columns * 2);
          std::vector<const BFloat16*> rows;
          std::vector<float> weights;
          for (std::int64_t j = 0; j < count; ++j) {
            for (std::int64_t c = 0; c < columns; ++c) memory.As<BFloat16>()[j * columns + c] = ToBFloat16(values(j, c));
            rows.push_back(memory.As<BFloat16>() + j * columns);
            weights.push_back(normal(random));
          }
          const PoisonedBuffer out((columns * stride + 16) * 4);
          MergeRowsArgs args;
          args.rows = rows.data();
          args.weights = weights.data();
          args.count = count;
          args.columns = columns;
          args.out = out.As<void>();
          args.dtype = dtype;
          args.out_stride = stride;
          tier_->merge_rows(args);
          for (std::int64_t p = 0; p < columns * stride + 16; ++p) {
            const float value = dtype == DType::kFloat32 ? out.As<float>()[p] : ToFloat(out.As<BFloat16>()[p]);
            if (p % stride != 0 || p >= columns * stride) {
              ASSERT_TRUE(std::isnan(value)) << "wrote outside at " << p;
              continue;
            }
            double sum = 0.0;
            double magnitude = 0.0;
            for (std::int64_t j = 0; j < count; ++j) {
              sum += static_cast<double>(weights[static_cast<std::size_t>(j)]) * values(j, p / stride);
              magnitude += std::fabs(static_cast<double>(weights[static_cast<std::size_t>(j)]) * values(j, p / stride));
            }
            // A product and an addition for each row, each within 2^-24 of the magnitudes; then one rounding.
            const double margin = static_cast<double>(2 * count) * 0x1p-24 * magnitude * 1.01;
            if (dtype == DType::kFloat32) {
              ASSERT_NEAR(value, sum, margin) << p;
            } else {
              ExpectBf16(value, sum, "out", p, 0, margin);
            }
          }
        }
      }
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(ElementwiseTest);

}  // namespace
}  // namespace moesaic
