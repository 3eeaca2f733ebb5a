#include "tests/moe/expect.h"

#include <gtest/gtest.h>

namespace moesaic::moe {
namespace {

/// Relative L2 error against the reference on inputs representable in bf16. Simulating the arithmetic (bf16
/// operands, fp32 accumulation, G, U and the r-wide intermediates rounded once) gave at most 5e-3 over 60 random cases.
constexpr double kTolerance = 5e-3;

}  // namespace

ExpertsLayer MakeLayer(const Problem& problem, threadpool::Pool& pool) {
  return ExpertsLayer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
}

void ExpectClose(const TensorView& tensor, const Matrix& reference, const char* name) {
  EXPECT_LE(RelativeError(tensor, reference), kTolerance) << name;
}

void ExpectClose(const Gradients& gradients, const ReferenceGradients& reference) {
  ExpectClose(gradients.hidden.view(), reference.hidden, "d_hidden");
  ExpectClose(gradients.top_k_weights.view(), reference.weights, "d_top_k_weights");
  ASSERT_EQ(gradients.lora.size(), reference.lora.size());
  for (std::size_t n = 0; n < reference.lora.size(); ++n) {
    for (std::size_t p = 0; p < kPairs.size(); ++p) {
      const PairTensors& pair = gradients.lora[n][p];
      if (!pair.a.view().defined()) continue;
      const ReferencePairGrad& expected = reference.lora[n].*kReferencePairs[p];
      EXPECT_LE(RelativeError(pair.a.view(), expected.a), kTolerance) << "dA of " << n << "." << kPairNames[p];
      EXPECT_LE(RelativeError(pair.b.view(), expected.b), kTolerance) << "dB of " << n << "." << kPairNames[p];
    }
  }
}

void ExpectMatchesReference(const ProblemSpec& spec, threadpool::Pool& pool) {
  SCOPED_TRACE(Describe(spec));
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  ExpectClose(out.view(), ReferenceForward(problem.weights(), problem.inputs()), "out");
  EXPECT_TRUE(RunForward(layer, problem, pool) == out) << "saving changed the output";
  ExpectClose(RunBackward(layer, problem, pool, saved),
              ReferenceBackward(problem.weights(), problem.inputs(), problem.d_out.view()));
}

}  // namespace moesaic::moe
