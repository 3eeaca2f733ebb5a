// The layer against the reference, and against itself: other threads, other calls.
#include "moe/layer.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"
#include "tests/moe/expect.h"
#include "tests/threadpool/sources.h"

namespace moesaic::moe {
namespace {

using threadpool::Pool;
using threadpool::SourceName;
using threadpool::ThreadSource;

ProblemSpec MediumSpec() {
  ProblemSpec spec;
  spec.tokens = 70;
  spec.experts = 6;
  spec.top_k = 3;
  spec.hidden = 72;
  spec.intermediate = 52;
  spec.adapters = {{.gate_up = 8, .down = 5, .peft_strides = true}};
  spec.seed = 11;
  return spec;
}

TEST(Layer, EveryFormOfAdapter) {
  Pool pool(2);
  const std::vector<std::vector<AdapterSpec>> forms = {
      {},
      {{.gate_up = 4}},
      {{.gate = 4}},
      {{.up = 4}},
      {{.down = 4}},
      {{.gate = 3, .up = 7, .down = 1}},
      {{.gate_up = 5, .gate = 2, .up = 33, .down = 17, .peft_strides = true}},
      {{.gate_up = 64, .down = 64, .dtype = DType::kBFloat16, .peft_strides = true},
       {.gate = 1, .up = 1, .down = 1, .scale = 0.5f}},
      {{.down = 2}, {.gate_up = 2}, {.up = 3, .peft_strides = true}},
      {{.gate_up = 256, .down = 256}},
  };
  for (const std::vector<AdapterSpec>& form : forms) {
    ProblemSpec spec = MediumSpec();
    spec.adapters = form;
    ExpectMatchesReference(spec, pool);
  }
}

TEST(Layer, GatesByTanh) {
  Pool pool(2);
  for (const std::int64_t tokens : {1, 40, 70}) {
    ProblemSpec spec = MediumSpec();
    spec.tokens = tokens;
    spec.activation = Gate::kGeluTanh;
    ExpectMatchesReference(spec, pool);
    spec.adapters.clear();
    ExpectMatchesReference(spec, pool);
  }
}

TEST(Layer, SizesAroundTheTiles) {
  Pool pool(2);
  for (const std::int64_t hidden : {1, 15, 16, 31, 32, 33, 257}) {
    for (const std::int64_t intermediate : {1, 17, 32, 63, 65}) {
      ProblemSpec spec = MediumSpec();
      spec.tokens = 40;
      spec.hidden = hidden;
      spec.intermediate = intermediate;
      ExpectMatchesReference(spec, pool);
    }
  }
}

TEST(Layer, TokenCountsAroundTheTiles) {
  Pool pool(2);
  for (const std::int64_t tokens : {2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 129}) {
    ProblemSpec spec = MediumSpec();
    spec.tokens = tokens;
    spec.experts = 2;
    spec.top_k = 2;  // both experts get every token
    ExpectMatchesReference(spec, pool);
  }
}

TEST(Layer, AllRowsOnOneExpert) {
  Pool pool(3);
  ProblemSpec spec = MediumSpec();
  spec.tokens = 700;
  spec.top_k = 2;
  spec.routing = Routing::kOneExpert;  // and so an id twice in a row
  ExpectMatchesReference(spec, pool);
}

TEST(Layer, MoreExpertsThanRows) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.tokens = 9;
  spec.experts = 61;
  ExpectMatchesReference(spec, pool);
}

TEST(Layer, OneToken) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.tokens = 1;
  ExpectMatchesReference(spec, pool);
}

TEST(Layer, NoTokens) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.tokens = 0;
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  for (const std::size_t p : {0, 3}) {  // gradients of nothing are zero, and written
    for (const Tensor* tensor : {&gradients.lora[0][p].a, &gradients.lora[0][p].b}) {
      const TensorView& view = tensor->view();
      const std::vector<Matrix> zeros(static_cast<std::size_t>(view.shape[0]), Matrix(view.shape[1], view.shape[2]));
      EXPECT_EQ(RelativeError(view, zeros), 0.0);
    }
  }
}

TEST(Layer, EverySlotSkipped) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.skipped = 1.0;
  ExpectMatchesReference(spec, pool);  // everything is exactly zero then
}

TEST(Layer, SkippedSlotsIgnoreNanWeights) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.skipped = 0.4;
  const Problem problem(spec);
  std::vector<std::pair<std::int64_t, std::int64_t>> skipped;
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      const std::int64_t e = LoadInt(problem.ids.view(), t, j);
      if (e >= 0 && e < spec.experts) continue;
      skipped.emplace_back(t, j);
      StoreFloat(problem.top_k_weights.view(), t, j, 0, std::numeric_limits<float>::quiet_NaN());
    }
  }
  ASSERT_FALSE(skipped.empty());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  ExpectClose(out.view(), ReferenceForward(problem.weights(), problem.inputs()), "out");
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  ExpectClose(gradients, ReferenceBackward(problem.weights(), problem.inputs(), problem.d_out.view()));
  for (const auto& [t, j] : skipped) EXPECT_EQ(LoadFloat(gradients.top_k_weights.view(), t, j), 0.0f);
}

TEST(Layer, NanStaysInItsToken) {
  Pool pool(2);
  const Problem problem(MediumSpec());
  StoreFloat(problem.hidden.view(), 7, 3, 0, std::numeric_limits<float>::quiet_NaN());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Tensor out = RunForward(layer, problem, pool);
  for (std::int64_t t = 0; t < problem.spec.tokens; ++t) {
    for (std::int64_t h = 0; h < problem.spec.hidden; ++h) EXPECT_EQ(std::isnan(LoadFloat(out.view(), t, h)), t == 7);
  }
}

class LayerOnBothSources : public threadpool::BothSources {};

TEST_P(LayerOnBothSources, SameBitsForAnyThreads) {
  for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOneExpert}) {
    ProblemSpec spec = MediumSpec();
    spec.tokens = 300;
    spec.routing = routing;
    spec.adapters.push_back({.gate = 3, .up = 2, .down = 9, .dtype = DType::kBFloat16});
    const Problem problem(spec);
    Pool one(1);
    const ExpertsLayer layer = MakeLayer(problem, one);
    const Saved saved(layer, problem);
    const Tensor out = RunForward(layer, problem, one, &saved);
    const Gradients gradients = RunBackward(layer, problem, one, saved);
    for (const int threads : {1, 2, 3, 8}) {
      SCOPED_TRACE(testing::Message() << "threads " << threads);
      Pool pool(threads, GetParam());
      const ExpertsLayer other = MakeLayer(problem, pool);  // packing in parallel gives the same weights
      const Saved other_saved(other, problem);
      EXPECT_TRUE(RunForward(other, problem, pool, &other_saved) == out);
      EXPECT_TRUE(Equal(RunBackward(other, problem, pool, other_saved), gradients));
      EXPECT_TRUE(Equal(RunBackward(other, problem, pool, saved), gradients)) << "with the state that one thread saved";
    }
  }
}

MOESAIC_BOTH_SOURCES(LayerOnBothSources);

TEST(Layer, SameBitsForAnyBlocking) {
  ProblemSpec spec = MediumSpec();
  spec.tokens = 300;
  spec.hidden = 300;
  spec.intermediate = 450;  // products with a rank are in slices from 12 tiles on
  spec.routing = Routing::kSkewed;
  const Problem problem(spec);
  Pool pool(3);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  std::mt19937_64 random(1);
  const auto draw = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
  };
  for (int trial = 0; trial < 12; ++trial) {
    const Blocking blocking{.intermediate_units_per_task = draw(4),
                            .hidden_columns_per_task = draw(12),
                            .tokens_per_merge = draw(100),
                            .tail_jobs = draw(4) - 1,
                            .tail_parts = draw(5),
                            .cuts_long_jobs = draw(2) == 1,
                            .gradient_columns = draw(12),
                            .blocks_per_step = draw(9),
                            .unpack_depth = 8 * (draw(3) - 1)};
    SCOPED_TRACE(testing::Message() << blocking.intermediate_units_per_task << " " << blocking.hidden_columns_per_task << " "
                                    << blocking.tokens_per_merge);
    const ScopedBlocking forced(blocking);
    const Saved own(layer, problem);
    EXPECT_TRUE(RunForward(layer, problem, pool, &own) == out);
    EXPECT_TRUE(Equal(RunBackward(layer, problem, pool, own), gradients));
  }
}

TEST(Layer, SavedStateMayBeUsedTwiceAndInAnyOrder) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  const Problem first(spec);
  const ExpertsLayer layer = MakeLayer(first, pool);
  Problem second(spec);  // the same layer, another batch
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t h = 0; h < spec.hidden; ++h) {
      StoreFloat(second.hidden.view(), t, h, 0, -0.5f * LoadFloat(first.hidden.view(), t, h));
    }
  }
  const Saved first_saved(layer, first);
  const Saved second_saved(layer, second);
  RunForward(layer, first, pool, &first_saved);
  const Gradients alone = RunBackward(layer, first, pool, first_saved);
  RunForward(layer, second, pool, &second_saved);
  const Gradients of_second = RunBackward(layer, second, pool, second_saved);
  EXPECT_TRUE(Equal(RunBackward(layer, first, pool, first_saved), alone));
  EXPECT_FALSE(Equal(of_second, alone));
  ExpectClose(of_second, ReferenceBackward(second.weights(), second.inputs(), second.d_out.view()));
}

TEST(Layer, GradientsThatNobodyWantsChangeNothing) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.adapters = {{.gate_up = 4, .down = 3}, {.gate = 2, .up = 2}};
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  RunForward(layer, problem, pool, &saved);
  const Gradients all = RunBackward(layer, problem, pool, saved);
  const BackwardArgs base{
      problem.hidden.view(), problem.top_k_weights.view(), problem.lora, &saved.state, problem.d_out.view(), {}, {}, {}};

  BackwardArgs args = base;
  const Tensor d_hidden = problem.hidden.Like();
  args.d_hidden = d_hidden.view();
  layer.Backward(args, pool);
  EXPECT_TRUE(d_hidden == all.hidden);

  args = base;
  const Tensor d_weights = problem.top_k_weights.Like();
  args.d_weights = d_weights.view();
  layer.Backward(args, pool);
  EXPECT_TRUE(d_weights == all.top_k_weights);

  args = base;
  const Tensor d_a = all.lora[0][3].a.Like();
  const Tensor d_b = all.lora[1][2].b.Like();
  std::vector<LoraAdapterGrad> d_lora(2);
  d_lora[0].down.a = d_a.view();
  d_lora[1].up.b = d_b.view();
  args.d_lora = d_lora;
  layer.Backward(args, pool);
  EXPECT_TRUE(d_a == all.lora[0][3].a);
  EXPECT_TRUE(d_b == all.lora[1][2].b);

  layer.Backward(base, pool);  // nothing at all is wanted: allowed
}

TEST(Layer, AdaptersAreReadAnewInEveryCall) {
  Pool pool(2);
  const Problem problem(MediumSpec());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Tensor before = RunForward(layer, problem, pool);
  const TensorView& b = problem.adapters[0][3].b.view();
  for (std::int64_t e = 0; e < b.shape[0]; ++e) {
    for (std::int64_t i = 0; i < b.shape[1]; ++i) {
      for (std::int64_t r = 0; r < b.shape[2]; ++r) StoreFloat(b, e, i, r, -LoadFloat(b, e, i, r));
    }
  }
  const Tensor after = RunForward(layer, problem, pool);
  EXPECT_FALSE(after == before);
  ExpectClose(after.view(), ReferenceForward(problem.weights(), problem.inputs()), "out");
}

TEST(Layer, StridedHiddenAndOutput) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);

  // The same tensors, column-major.
  const auto transposed = [&](const Tensor& source) {
    const TensorView& view = source.view();
    Tensor result(view.dtype, {view.shape[0], view.shape[1]}, {1, view.shape[0]});
    for (std::int64_t i = 0; i < view.shape[0]; ++i) {
      for (std::int64_t j = 0; j < view.shape[1]; ++j) StoreFloat(result.view(), i, j, 0, LoadFloat(view, i, j));
    }
    return result;
  };
  const Tensor hidden = transposed(problem.hidden);
  const Tensor weights = transposed(problem.top_k_weights);
  const Tensor d_out = transposed(problem.d_out);
  const TensorView& rows = problem.ids.view();
  ASSERT_EQ(rows.dtype, DType::kInt64);
  const Tensor ids(rows.dtype, {rows.shape[0], rows.shape[1]}, {1, rows.shape[0]});
  ForEachInt(rows, [&](std::int64_t i, std::int64_t j, std::int64_t id) {
    static_cast<std::int64_t*>(ids.view().data)[j * rows.shape[0] + i] = id;
  });
  const Tensor strided_out = hidden.Like();
  layer.Forward({hidden.view(), ids.view(), weights.view(), problem.lora, strided_out.view(), nullptr}, pool);
  EXPECT_TRUE(strided_out == transposed(out));
  const Tensor d_hidden = hidden.Like();
  const Tensor d_weights = weights.Like();
  layer.Backward(
      {hidden.view(), weights.view(), problem.lora, &saved.state, d_out.view(), d_hidden.view(), d_weights.view(), {}}, pool);
  EXPECT_TRUE(d_hidden == transposed(gradients.hidden));
  EXPECT_TRUE(d_weights == transposed(gradients.top_k_weights));
}

TEST(Layer, PacksEveryTypeAndUnpacksIt) {
  Pool pool(2);
  ProblemSpec spec = MediumSpec();
  spec.hidden = 45;
  spec.intermediate = 35;
  const Problem problem(spec);
  const ExpertsLayer expected = MakeLayer(problem, pool);
  const Tensor out = RunForward(expected, problem, pool);
  const auto converted = [](const Tensor& source, DType dtype, bool reversed) {
    const TensorView& view = source.view();
    const auto [d0, d1, d2] = view.shape;
    Tensor result = reversed ? Tensor(dtype, {d0, d1, d2}, {1, d0, d0 * d1}) : Tensor(dtype, {d0, d1, d2});
    for (std::int64_t i = 0; i < d0; ++i) {
      for (std::int64_t j = 0; j < d1; ++j) {
        for (std::int64_t k = 0; k < d2; ++k) StoreFloat(result.view(), i, j, k, LoadFloat(view, i, j, k));
      }
    }
    return result;
  };
  for (const bool reversed : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const Tensor gate_up = converted(problem.gate_up, dtype, reversed);
      const Tensor down = converted(problem.down, dtype, reversed);
      const ExpertsLayer layer(problem.config(), gate_up.view(), down.view(), pool);
      EXPECT_TRUE(RunForward(layer, problem, pool) == out);
      const Tensor gate_up_back = gate_up.Like();
      const Tensor down_back = down.Like();
      layer.Unpack(gate_up_back.view(), down_back.view(), pool);
      EXPECT_TRUE(gate_up_back == gate_up);
      EXPECT_TRUE(down_back == down);
    }
  }
  // fp16 has three more bits of fraction and a smaller range: rounded to bf16 when packed.
  const Tensor gate_up = converted(problem.gate_up, DType::kFloat16, false);
  const Tensor down = converted(problem.down, DType::kFloat16, false);
  const ExpertsLayer layer(problem.config(), gate_up.view(), down.view(), pool);
  const Tensor gate_up_back(DType::kBFloat16, {spec.experts, 2 * spec.intermediate, spec.hidden});
  const Tensor down_back(DType::kBFloat16, {spec.experts, spec.hidden, spec.intermediate});
  layer.Unpack(gate_up_back.view(), down_back.view(), pool);
  EXPECT_TRUE(gate_up_back == converted(gate_up, DType::kBFloat16, false));
  EXPECT_TRUE(down_back == converted(down, DType::kBFloat16, false));
}

TEST(Layer, WeightsTakeOneCopy) {
  Pool pool(1);
  ProblemSpec spec = MediumSpec();
  spec.hidden = 200;
  spec.intermediate = 100;
  const Problem problem(spec);
  const ExpertsLayer layer = MakeLayer(problem, pool);
  // 2 bytes a weight, H and I rounded up to the 32 columns and 16 rows of a tile.
  const std::int64_t weights = spec.experts * 3 * 224 * 112;
  EXPECT_LE(static_cast<double>(layer.weight_bytes()), 1.02 * 2.0 * static_cast<double>(weights));
}

TEST(Layer, ConcurrentCallers) {
  Pool pool(2);
  const Problem problem(MediumSpec());
  const ExpertsLayer layer = MakeLayer(problem, pool);
  const Saved saved(layer, problem);
  const Tensor out = RunForward(layer, problem, pool, &saved);
  const Gradients gradients = RunBackward(layer, problem, pool, saved);
  std::vector<std::thread> callers;
  std::array<bool, 4> same{};
  for (bool& result : same) {
    callers.emplace_back([&] {
      result = true;
      for (int i = 0; i < 5; ++i) {
        const Saved own(layer, problem);
        result = result && RunForward(layer, problem, pool, &own) == out;
        result = result && Equal(RunBackward(layer, problem, pool, own), gradients);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const bool result : same) EXPECT_TRUE(result);
}

}  // namespace
}  // namespace moesaic::moe
