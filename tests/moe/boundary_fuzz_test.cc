// Arguments spoilt at random: the layer refuses them with std::invalid_argument or computes, touches no memory but its own
// (seen by the sanitizers), and the next call is right. MOESAIC_TEST_CALLS says how many (default 1,000).
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/moe/problem.h"

namespace moesaic::moe {
namespace {

using threadpool::Pool;

/// Spoils views. Never so that they would name more memory than there is and still fit the other arguments: the layer cannot
/// know how much memory is behind a pointer.
class Spoiler {
 public:
  explicit Spoiler(std::uint64_t seed) : random_(seed) {}

  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }

  void Spoil(TensorView& view) {
    const auto dim = static_cast<std::size_t>(Below(3));
    switch (Below(6)) {
      case 0:
        view.shape[dim] = Pick({-1, 0, -(std::int64_t{1} << 40), std::numeric_limits<std::int64_t>::min()});
        break;
      case 1:
        view.shape[dim] = view.shape[dim] > 1 ? Below(view.shape[dim]) : 0;
        break;
      case 2:
        view.shape[dim] += 1000 + ++unique_;  // agrees with nothing else
        break;
      case 3:
        view.rank = static_cast<int>(Pick({-1, 0, 1, 2, 3, 4, 100}));
        break;
      case 4:
        view.data = nullptr;
        break;
      default:
        view.stride[dim] = 0;  // an expanded tensor: legal to read
        break;
    }
  }

 private:
  std::int64_t Pick(std::initializer_list<std::int64_t> values) { return *(values.begin() + Below(std::ssize(values))); }

  std::mt19937_64 random_;
  std::int64_t unique_ = 0;
};

int NumCalls() {
  const char* text = std::getenv("MOESAIC_TEST_CALLS");
  return text != nullptr ? static_cast<int>(std::strtol(text, nullptr, 10)) : 1000;
}

TEST(BoundaryFuzz, SpoiltArguments) {
  ProblemSpec spec;
  spec.tokens = 12;
  spec.experts = 4;
  spec.top_k = 2;
  spec.hidden = 40;
  spec.intermediate = 33;
  spec.adapters = {{.gate_up = 3, .down = 2, .peft_strides = true}, {.gate = 2, .up = 1}};
  Pool pool(2);
  const Problem problem(spec);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
  const Saved saved(layer, problem);
  const Tensor expected = RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  const Tensor out = expected.Like(), d_hidden = problem.hidden.Like(), d_weights = problem.top_k_weights.Like();
  const Tensor d_a = problem.adapters[0][0].a.Like();
  Spoiler spoiler(1);
  int refused = 0, computed = 0;
  for (int call = 0; call < NumCalls(); ++call) {
    std::vector<LoraAdapter> lora = problem.lora;
    std::vector<LoraAdapterGrad> d_lora(lora.size());
    d_lora[0].gate_up.a = d_a.view();
    ForwardArgs forward{problem.hidden.view(), problem.ids.view(), problem.top_k_weights.view(), lora, out.view(), nullptr};
    const Saved own(layer, problem);
    RunForward(layer, problem, pool, &own);
    BackwardArgs backward{problem.hidden.view(),
                          problem.top_k_weights.view(),
                          lora,
                          &own.state,
                          problem.d_out.view(),
                          d_hidden.view(),
                          d_weights.view(),
                          d_lora};
    std::array<TensorView*, 16> views = {&forward.hidden,     &forward.ids,       &forward.weights,   &forward.out,
                                         &backward.hidden,    &backward.weights,  &backward.d_out,    &backward.d_hidden,
                                         &backward.d_weights, &lora[0].gate_up.a, &lora[0].gate_up.b, &lora[0].down.a,
                                         &lora[0].down.b,     &lora[1].gate.a,    &lora[1].up.b,      &d_lora[0].gate_up.a};
    for (std::int64_t n = spoiler.Below(3); n >= 0; --n) {
      spoiler.Spoil(*views[static_cast<std::size_t>(spoiler.Below(std::ssize(views)))]);
    }
    if (spoiler.Below(3) == 0) {  // a hook for saved tensors may give back anything
      own.state.routing[spoiler.Below(std::ssize(own.routing))] = static_cast<std::int32_t>(spoiler.Below(64) - 16);
    }
    const auto run = [&](auto&& function) {
      try {
        function();
        ++computed;
      } catch (const std::invalid_argument& error) {
        EXPECT_STRNE(error.what(), "");
        ++refused;
      }
    };
    run([&] { layer.Forward(forward, pool); });
    run([&] { layer.Backward(backward, pool); });
    if (call % 100 == 0) {
      ASSERT_TRUE(RunForward(layer, problem, pool) == expected) << "after call " << call;
      ASSERT_TRUE(Equal(RunBackward(layer, problem, pool, saved), gradients)) << "after call " << call;
    }
  }
  EXPECT_GT(refused, NumCalls() / 2);
  EXPECT_GT(computed, NumCalls() / 10);
}

}  // namespace
}  // namespace moesaic::moe
