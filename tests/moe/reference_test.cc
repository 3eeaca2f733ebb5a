// The reference itself: against layers small enough to write out, against a computation that shares nothing with it, and its
// gradients against numerical derivatives.
#include "moe/reference.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cpu_kernels/tensor_access.h"
#include "tests/moe/problem.h"

namespace moesaic::moe {
namespace {

double Silu(double x) { return x / (1.0 + std::exp(-x)); }

/// out by the definition, element by element, with the adapters merged into the weights: W + scale * B A.
double MergedOut(const Problem& problem, std::int64_t t, std::int64_t h) {
  const ProblemSpec& s = problem.spec;
  // scale * sum over r of b[e, row, r] a[e, r, column] of one pair.
  const auto delta = [](const LoraPair& pair, std::int64_t e, std::int64_t row, std::int64_t column) {
    double sum = 0.0;
    for (std::int64_t r = 0; pair.defined() && r < pair.a.shape[1]; ++r) {
      sum += static_cast<double>(LoadFloat(pair.b, e, row, r)) * LoadFloat(pair.a, e, r, column);
    }
    return pair.scale * sum;
  };
  double out = 0.0;
  for (std::int64_t j = 0; j < s.top_k; ++j) {
    const std::int64_t e = LoadInt(problem.ids.view(), t, j);
    if (e < 0 || e >= s.experts) continue;
    for (std::int64_t i = 0; i < s.intermediate; ++i) {
      double gate = 0.0;
      double up = 0.0;
      for (std::int64_t c = 0; c < s.hidden; ++c) {
        double w_gate = LoadFloat(problem.gate_up.view(), e, i, c);
        double w_up = LoadFloat(problem.gate_up.view(), e, s.intermediate + i, c);
        for (const LoraAdapter& adapter : problem.lora) {
          w_gate += delta(adapter.gate_up, e, i, c) + delta(adapter.gate, e, i, c);
          w_up += delta(adapter.gate_up, e, s.intermediate + i, c) + delta(adapter.up, e, i, c);
        }
        gate += w_gate * LoadFloat(problem.hidden.view(), t, c);
        up += w_up * LoadFloat(problem.hidden.view(), t, c);
      }
      double w_down = LoadFloat(problem.down.view(), e, h, i);
      for (const LoraAdapter& adapter : problem.lora) w_down += delta(adapter.down, e, h, i);
      out += LoadFloat(problem.top_k_weights.view(), t, j) * w_down * Silu(gate) * up;
    }
  }
  return out;
}

double Loss(const Problem& problem) {
  const Matrix out = ReferenceForward(problem.weights(), problem.inputs());
  double loss = 0.0;
  for (std::int64_t t = 0; t < out.rows; ++t) {
    for (std::int64_t h = 0; h < out.cols; ++h) loss += out(t, h) * LoadFloat(problem.d_out.view(), t, h);
  }
  return loss;
}

/// Derivative of Loss with respect to one element of its inputs, from two central differences with steps 2^-9 and 2^-8 whose
/// errors of second order cancel. What is left is step^4 / 30 = 5e-13 of the fifth derivative, and the rounding of Loss in
/// double over the step, about 1e-13 of Loss.
double NumericalDerivative(const Problem& problem, float& element) {
  const float value = element;
  const auto slope = [&](float step) {
    element = value + step;
    const double high = element;
    const double above = Loss(problem);
    element = value - step;
    const double low = element;
    const double below = Loss(problem);
    element = value;
    return (above - below) / (high - low);
  };
  return (4.0 * slope(0x1p-9f) - slope(0x1p-8f)) / 3.0;
}

/// Compares `gradient` with the numerical derivatives for every element of `view`, which points into `problem`.
void ExpectNumericalDerivative(const Problem& problem, const TensorView& view, std::int64_t e, const Matrix& gradient,
                               const char* name) {
  for (std::int64_t i = 0; i < gradient.rows; ++i) {
    for (std::int64_t j = 0; j < gradient.cols; ++j) {
      const std::int64_t at = view.rank == 3 ? ElementOffset(view, e, i, j) : ElementOffset(view, i, j);
      const double expected = NumericalDerivative(problem, static_cast<float*>(view.data)[at]);
      EXPECT_NEAR(gradient(i, j), expected, 1e-7) << name << " e " << e << " (" << i << ", " << j << ")";
    }
  }
}

void ExpectNumericalDerivatives(const Problem& problem) {
  const ReferenceGradients gradients = ReferenceBackward(problem.weights(), problem.inputs(), problem.d_out.view());
  ExpectNumericalDerivative(problem, problem.hidden.view(), 0, gradients.hidden, "hidden");
  ExpectNumericalDerivative(problem, problem.top_k_weights.view(), 0, gradients.weights, "top_k_weights");
  for (std::size_t n = 0; n < problem.lora.size(); ++n) {
    for (std::size_t p = 0; p < kPairs.size(); ++p) {
      const LoraPair& pair = problem.lora[n].*kPairs[p];
      const ReferencePairGrad& grad = gradients.lora[n].*kReferencePairs[p];
      EXPECT_EQ(grad.a.size(), pair.defined() ? static_cast<std::size_t>(problem.spec.experts) : 0u);
      for (std::size_t e = 0; e < grad.a.size(); ++e) {
        ExpectNumericalDerivative(problem, pair.a, static_cast<std::int64_t>(e), grad.a[e], kPairNames[p]);
        ExpectNumericalDerivative(problem, pair.b, static_cast<std::int64_t>(e), grad.b[e], kPairNames[p]);
      }
    }
  }
}

ProblemSpec SmallSpec() {
  ProblemSpec spec;
  spec.tokens = 6;
  spec.experts = 3;
  spec.top_k = 2;
  spec.hidden = 5;
  spec.intermediate = 4;
  spec.seed = 7;
  return spec;
}

// One token, one expert, H = I = r = 1: everything is a number. Two experts get the token, with weights 2 and 0.5.
TEST(Reference, ScalarsByHand) {
  float gate_up[] = {1.0f, 2.0f, -1.0f, 0.5f};  // expert 0: gate 1, up 2; expert 1: gate -1, up 0.5
  float down[] = {3.0f, -2.0f};
  float hidden[] = {0.5f};
  std::int32_t ids[] = {1, 0};
  float weights[] = {0.5f, 2.0f};
  float d_out[] = {1.0f};
  float a[] = {2.0f, 1.0f};
  float b[] = {0.25f, 0.5f};
  const auto view3 = [](float* data, std::int64_t e, std::int64_t m, std::int64_t n) {
    return TensorView{data, DType::kFloat32, 3, {e, m, n}, {m * n, n, 1}};
  };
  const auto view2 = [](void* data, DType dtype, std::int64_t n) { return TensorView{data, dtype, 2, {1, n, 0}, {n, 1, 0}}; };
  LoraAdapter adapter;
  adapter.gate = {view3(a, 2, 1, 1), view3(b, 2, 1, 1), 2.0f};
  const ReferenceWeights base{view3(gate_up, 2, 2, 1), view3(down, 2, 1, 1)};
  const ReferenceInputs inputs{
      view2(hidden, DType::kFloat32, 1), view2(ids, DType::kInt32, 2), view2(weights, DType::kFloat32, 2), {&adapter, 1}};

  // Expert 0: gate weight 1 + 2 * 2 * 0.25 = 2, G = 1, U = 1, Y = 3 silu(1).
  // Expert 1: gate weight -1 + 2 * 1 * 0.5 = 0, G = 0, U = 0.25, Y = 0; silu'(0) = 1/2.
  const double y0 = 3.0 * Silu(1.0);
  const double sigma = 1.0 / (1.0 + std::exp(-1.0));
  const double slope = sigma * (1.0 + 1.0 * (1.0 - sigma));
  EXPECT_NEAR(ReferenceForward(base, inputs)(0, 0), 2.0 * y0, 1e-12);

  const ReferenceGradients gradients = ReferenceBackward(base, inputs, view2(d_out, DType::kFloat32, 1));
  EXPECT_NEAR(gradients.weights(0, 0), 0.0, 1e-12);
  EXPECT_NEAR(gradients.weights(0, 1), y0, 1e-12);
  // d/dx: expert 0: 2 * 3 * (slope * 2 * 1 + silu(1) * 2); expert 1: 0.5 * -2 * (0.5 * 0 * 0.25 + 0) = 0.
  EXPECT_NEAR(gradients.hidden(0, 0), 6.0 * (slope * 2.0 + Silu(1.0) * 2.0), 1e-12);
  // dG: expert 0: 2 * 3 * U * slope = 6 slope; expert 1: 0.5 * -2 * 0.25 * 0.5 = -0.125.
  // dB = s dG U_g, U_g = x a; dA = s dG b x.
  EXPECT_NEAR(gradients.lora[0].gate.b[0](0, 0), 2.0 * 6.0 * slope * 1.0, 1e-12);
  EXPECT_NEAR(gradients.lora[0].gate.a[0](0, 0), 2.0 * 6.0 * slope * 0.25 * 0.5, 1e-12);
  EXPECT_NEAR(gradients.lora[0].gate.b[1](0, 0), 2.0 * -0.125 * 0.5, 1e-12);
  EXPECT_NEAR(gradients.lora[0].gate.a[1](0, 0), 2.0 * -0.125 * 0.5 * 0.5, 1e-12);
}

TEST(Reference, ForwardEqualsMergedWeights) {
  ProblemSpec spec = SmallSpec();
  spec.skipped = 0.2;
  spec.duplicates = true;
  spec.adapters = {{.gate_up = 2, .gate = 1, .up = 3, .down = 2, .scale = 2.0f},
                   {.gate_up = 3, .down = 1, .scale = 0.5f, .dtype = DType::kBFloat16, .peft_strides = true}};
  const Problem problem(spec);
  const Matrix out = ReferenceForward(problem.weights(), problem.inputs());
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t h = 0; h < spec.hidden; ++h) EXPECT_NEAR(out(t, h), MergedOut(problem, t, h), 1e-12) << t << ", " << h;
  }
}

TEST(Reference, GradientsWithoutLora) { ExpectNumericalDerivatives(Problem(SmallSpec())); }

TEST(Reference, GradientsSharedPair) {
  ProblemSpec spec = SmallSpec();
  spec.adapters = {{.gate_up = 2, .down = 3}};
  ExpectNumericalDerivatives(Problem(spec));
}

TEST(Reference, GradientsSeparatePairs) {
  ProblemSpec spec = SmallSpec();
  spec.adapters = {{.gate = 2, .up = 1, .down = 3}};
  ExpectNumericalDerivatives(Problem(spec));
}

TEST(Reference, GradientsOneSide) {
  ProblemSpec spec = SmallSpec();
  spec.adapters = {{.up = 2, .scale = -1.0f}};
  ExpectNumericalDerivatives(Problem(spec));
}

TEST(Reference, GradientsSeveralAdaptersOfEveryForm) {
  ProblemSpec spec = SmallSpec();
  spec.adapters = {{.gate_up = 1, .gate = 2, .up = 1, .down = 2, .scale = 1.0f, .peft_strides = true},
                   {.gate_up = 3, .down = 1, .scale = 4.0f}};
  ExpectNumericalDerivatives(Problem(spec));
}

TEST(Reference, GradientsSkippedAndDuplicateIds) {
  ProblemSpec spec = SmallSpec();
  spec.tokens = 8;
  spec.top_k = 4;
  spec.skipped = 0.3;
  spec.duplicates = true;
  spec.adapters = {{.gate_up = 2, .down = 2}};
  ExpectNumericalDerivatives(Problem(spec));
}

TEST(Reference, SkippedSlotsHaveNoGradientAndTheirWeightIsIgnored) {
  ProblemSpec spec = SmallSpec();
  spec.tokens = 20;
  spec.skipped = 0.4;
  const Problem problem(spec);
  int skipped = 0;
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      const std::int64_t e = LoadInt(problem.ids.view(), t, j);
      if (e >= 0 && e < spec.experts) continue;
      StoreFloat(problem.top_k_weights.view(), t, j, 0, std::nanf(""));
      ++skipped;
    }
  }
  ASSERT_GT(skipped, 0);
  const Matrix out = ReferenceForward(problem.weights(), problem.inputs());
  for (const double value : out.values) EXPECT_FALSE(std::isnan(value));
  const ReferenceGradients gradients = ReferenceBackward(problem.weights(), problem.inputs(), problem.d_out.view());
  for (const double value : gradients.hidden.values) EXPECT_FALSE(std::isnan(value));
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      const std::int64_t e = LoadInt(problem.ids.view(), t, j);
      if (e < 0 || e >= spec.experts) {
        EXPECT_EQ(gradients.weights(t, j), 0.0);
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::moe
