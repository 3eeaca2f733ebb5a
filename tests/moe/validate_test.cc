// What the boundary refuses, and how it says so.
#include "moe/validate.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "tests/moe/problem.h"

namespace moesaic::moe {
namespace {

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kIntermediate = 6;

/// The message of the std::invalid_argument that `call` throws; "" where it throws nothing.
std::string Message(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

/// Valid arguments of every call, for a test to spoil one of.
class ValidateTest : public testing::Test {
 protected:
  static ProblemSpec Spec() {
    ProblemSpec spec;
    spec.tokens = kTokens;
    spec.experts = kExperts;
    spec.top_k = kTopK;
    spec.hidden = kHidden;
    spec.intermediate = kIntermediate;
    spec.adapters = {{.gate_up = 2, .down = 3}, {.gate = 1, .up = 2}};
    return spec;
  }

  ValidateTest()
      : problem_(Spec()),
        pool_(1),
        layer_(problem_.config(), problem_.gate_up.view(), problem_.down.view(), pool_),
        saved_(layer_, problem_) {
    lora_ = problem_.lora;
    out_ = problem_.hidden.Like();
    layer_.Forward(Forward(), pool_);
    for (const LoraAdapter& adapter : lora_) {
      LoraAdapterGrad grad;
      for (std::size_t p = 0; p < kPairs.size(); ++p) grad.*kPairGrads[p] = {(adapter.*kPairs[p]).a, (adapter.*kPairs[p]).b};
      d_lora_.push_back(grad);
    }
  }

  ForwardArgs Forward() {
    return {problem_.hidden.view(), problem_.ids.view(), problem_.top_k_weights.view(), lora_, out_.view(), &saved_.state};
  }

  BackwardArgs Backward() {
    return {problem_.hidden.view(),
            problem_.top_k_weights.view(),
            lora_,
            &saved_.state,
            problem_.d_out.view(),
            out_.view(),
            problem_.top_k_weights.view(),
            d_lora_};
  }

  std::string ForwardError(const ForwardArgs& args) {
    return Message([&] { ValidateForward(problem_.config(), args); });
  }
  std::string BackwardError(const BackwardArgs& args) {
    return Message([&] { ValidateBackward(problem_.config(), args); });
  }

  void SetId(std::int64_t t, std::int64_t j, std::int64_t id) {
    static_cast<std::int64_t*>(problem_.ids.view().data)[t * kTopK + j] = id;
  }

  Problem problem_;
  threadpool::Pool pool_;
  ExpertsLayer layer_;
  Saved saved_;
  Tensor out_;
  std::vector<LoraAdapter> lora_;
  std::vector<LoraAdapterGrad> d_lora_;
};

TEST_F(ValidateTest, AcceptsValidArguments) {
  EXPECT_EQ(ForwardError(Forward()), "");
  EXPECT_EQ(BackwardError(Backward()), "");
  BackwardArgs nothing_wanted = Backward();
  nothing_wanted.d_hidden = {};
  nothing_wanted.d_weights = {};
  nothing_wanted.d_lora = {};
  EXPECT_EQ(BackwardError(nothing_wanted), "");
}

TEST_F(ValidateTest, Config) {
  EXPECT_EQ(Message([] { ValidateConfig({0, 8, 8}); }), "num_experts is 0; expected at least 1");
  EXPECT_EQ(Message([] { ValidateConfig({1, -3, 8}); }), "hidden_size is -3; expected at least 1");
  EXPECT_EQ(Message([] { ValidateConfig({1, 8, 0}); }), "intermediate_size is 0; expected at least 1");
  EXPECT_EQ(Message([] { ValidateConfig({1, 8, 8, Gate::kGeluTanh}); }), "");
  EXPECT_EQ(Message([] { ValidateConfig({1, 8, 8, static_cast<Gate>(7)}); }), "activation is 7; expected one of Gate");
}

TEST_F(ValidateTest, Weights) {
  const LayerConfig config = problem_.config();
  TensorView gate_up = problem_.gate_up.view();
  const TensorView down = problem_.down.view();
  EXPECT_EQ(Message([&] { ValidateWeights(config, gate_up, down); }), "");
  EXPECT_EQ(Message([&] { ValidateWeights(config, down, down); }),
            "gate_up_proj has shape [4, 8, 6]; expected [E = 4, 2I = 12, H = 8]");
  EXPECT_EQ(Message([&] { ValidateWeights(config, gate_up, gate_up); }),
            "down_proj has shape [4, 12, 8]; expected [E = 4, H = 8, I = 6]");
  EXPECT_EQ(Message([&] { ValidateWeights(config, {}, down); }),
            "gate_up_proj is missing; expected shape [E = 4, 2I = 12, H = 8]");
  gate_up.stride[0] = 0;  // the same weights for all experts may be read but not written
  EXPECT_EQ(Message([&] { ValidateWeights(config, gate_up, down); }), "");
  EXPECT_EQ(Message([&] { ValidateUnpack(config, gate_up, down); }),
            "gate_up_proj is written and has stride 0 along dimension 0 of size 4; expected distinct elements");
  gate_up.dtype = DType::kInt32;
  EXPECT_EQ(Message([&] { ValidateWeights(config, gate_up, down); }),
            "gate_up_proj is int32; expected bfloat16 or float16 or float32");
}

TEST_F(ValidateTest, IdsOutOfRange) {
  SetId(3, 1, 99);
  EXPECT_EQ(ForwardError(Forward()), "top_k_ids[3, 1] is 99; expected -1 or 0..4");
  SetId(3, 1, -2);
  EXPECT_EQ(ForwardError(Forward()), "top_k_ids[3, 1] is -2; expected -1 or 0..4");
  SetId(3, 1, std::int64_t{1} << 32);  // 0 if it were cut to 32 bits
  EXPECT_EQ(ForwardError(Forward()), "top_k_ids[3, 1] is 4294967296; expected -1 or 0..4");
  SetId(3, 1, kExperts);
  EXPECT_EQ(ForwardError(Forward()), "");
  SetId(3, 1, -1);
  EXPECT_EQ(ForwardError(Forward()), "");
}

TEST_F(ValidateTest, ForwardShapesAndTypes) {
  ForwardArgs args = Forward();
  args.hidden.shape[1] = 9;
  EXPECT_EQ(ForwardError(args), "hidden has shape [5, 9]; expected [T, H = 8]");
  args = Forward();
  args.hidden.rank = 3;
  EXPECT_EQ(ForwardError(args), "hidden has shape [5, 8, 0]; expected [T, H = 8]");
  args = Forward();
  args.hidden.dtype = DType::kFloat16;
  EXPECT_EQ(ForwardError(args), "hidden is float16; expected bfloat16 or float32");
  args = Forward();
  args.hidden.data = nullptr;
  EXPECT_EQ(ForwardError(args), "hidden has shape [5, 8] but its data is null");
  args = Forward();
  args.ids.shape[0] = 4;
  EXPECT_EQ(ForwardError(args), "top_k_ids has shape [4, 2]; expected [T = 5, k]");
  args = Forward();
  args.ids.dtype = DType::kFloat32;
  EXPECT_EQ(ForwardError(args), "top_k_ids is float32; expected int32 or int64");
  args = Forward();
  args.weights.shape[1] = 3;
  EXPECT_EQ(ForwardError(args), "top_k_weights has shape [5, 3]; expected [T = 5, k = 2]");
  args = Forward();
  args.ids.shape[1] = args.weights.shape[1] = 0;
  EXPECT_EQ(ForwardError(args), "top_k_ids has k = 0; expected k >= 1");
  args = Forward();
  args.out.shape[0] = 6;
  EXPECT_EQ(ForwardError(args), "out has shape [6, 8]; expected [T = 5, H = 8]");
  args = Forward();
  args.out.stride[0] = 0;
  EXPECT_EQ(ForwardError(args), "out is written and has stride 0 along dimension 0 of size 5; expected distinct elements");
  args = Forward();
  args.out.stride[0] = 7;
  EXPECT_EQ(ForwardError(args), "out is written and has overlapping elements; expected distinct ones");
  args.out.stride[0] = 1;
  args.out.stride[1] = 5;
  EXPECT_EQ(ForwardError(args), "");
  args.out.stride[1] = std::numeric_limits<std::int64_t>::max() / 2;
  EXPECT_EQ(ForwardError(args), "out is written and has overlapping elements; expected distinct ones");
  args = Forward();
  args.hidden.shape[0] = args.ids.shape[0] = args.weights.shape[0] = args.out.shape[0] = std::int64_t{1} << 30;
  EXPECT_EQ(ForwardError(args), "hidden and top_k_ids have T = 1073741824 and k = 2; expected T * k < 2^31");
}

TEST_F(ValidateTest, Lora) {
  lora_[0].gate_up.b.shape[2] = 3;
  EXPECT_EQ(ForwardError(Forward()), "lora[0].gate_up.b has shape [4, 12, 3]; expected [E = 4, out = 12, r = 2]");
  EXPECT_EQ(BackwardError(Backward()), ForwardError(Forward()));
  lora_ = problem_.lora;
  lora_[1].up.a = {};
  EXPECT_EQ(ForwardError(Forward()), "lora[1].up.a is missing; expected shape [E = 4, r, in = 8]");
  lora_ = problem_.lora;
  lora_[1].gate.b = {};
  EXPECT_EQ(ForwardError(Forward()), "lora[1].gate.b is missing; expected shape [E = 4, out = 6, r = 1]");
  lora_ = problem_.lora;
  lora_[0].down.a.shape[1] = 0;
  EXPECT_EQ(ForwardError(Forward()), "lora[0].down.a has rank 0; expected r >= 1");
  lora_ = problem_.lora;
  lora_[0].down.a.dtype = DType::kFloat16;
  EXPECT_EQ(ForwardError(Forward()), "lora[0].down.a is float16; expected bfloat16 or float32");
  lora_ = problem_.lora;
  lora_[0].down.scale = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ForwardError(Forward()), "lora[0].down.scale is inf; expected a finite number");
}

TEST_F(ValidateTest, BackwardShapes) {
  BackwardArgs args = Backward();
  args.d_out.shape[0] = 4;
  EXPECT_EQ(BackwardError(args), "d_out has shape [4, 8]; expected [T = 5, H = 8]");
  args = Backward();
  args.d_hidden.shape[1] = 7;
  EXPECT_EQ(BackwardError(args), "d_hidden has shape [5, 7]; expected [T = 5, H = 8]");
  args = Backward();
  args.d_weights.shape[1] = 1;
  EXPECT_EQ(BackwardError(args), "d_top_k_weights has shape [5, 1]; expected [T = 5, k = 2]");
  args = Backward();
  args.d_lora = args.d_lora.first(1);
  EXPECT_EQ(BackwardError(args), "d_lora has 1 adapters; expected none or 2, one for each of lora");
  d_lora_[0].gate_up.a.shape[1] = 4;
  EXPECT_EQ(BackwardError(Backward()), "d_lora[0].gate_up.a has shape [4, 4, 8]; expected [E = 4, rows = 2, columns = 8]");
  d_lora_[0].gate_up.a = {};
  EXPECT_EQ(BackwardError(Backward()), "");
  d_lora_[0].gate.a = d_lora_[0].gate_up.b;
  EXPECT_EQ(BackwardError(Backward()), "d_lora[0].gate.a is given; expected none, because the pair itself is missing");
}

TEST_F(ValidateTest, SavedState) {
  BackwardArgs args = Backward();
  args.saved = nullptr;
  EXPECT_EQ(BackwardError(args), "saved is missing; expected the state that Forward filled");
  saved_.state.gate = nullptr;
  EXPECT_EQ(ForwardError(Forward()), "saved.gate is null; expected memory of SavedStateSizes().gate elements");
  EXPECT_EQ(BackwardError(Backward()), ForwardError(Forward()));
  saved_.state.gate = saved_.gate.data();
  saved_.state.down_low = nullptr;
  EXPECT_EQ(ForwardError(Forward()), "saved.down_low is null; expected memory of SavedStateSizes().down_low elements");
  lora_[0].down = {};  // nobody needs it now
  EXPECT_EQ(ForwardError(Forward()), "");
}

TEST_F(ValidateTest, SavedRoutingOfAnotherBatch) {
  saved_.routing[2] = 77;
  EXPECT_EQ(
      BackwardError(Backward()),
      "saved.routing[2] is 77; expected offsets rising from 0 to at most T * k = 10: the saved state belongs to another batch");
  saved_.routing[2] = -1;
  EXPECT_NE(BackwardError(Backward()), "");
  layer_.Forward(Forward(), pool_);
  EXPECT_EQ(BackwardError(Backward()), "");
  saved_.routing[kExperts + 1] = 10;
  EXPECT_EQ(BackwardError(Backward()),
            "saved.routing[5] is 10; expected a slot below T * k = 10: the saved state belongs to another batch");
  saved_.routing[kExperts + 1] = saved_.routing[kExperts + 2];
  EXPECT_EQ(BackwardError(Backward()), "saved.routing[6] is " + std::to_string(saved_.routing[kExperts + 2]) +
                                           ", as an entry before it; expected each slot once: the saved state belongs to "
                                           "another batch");
}

// The layer validates what it is given, writes nothing when it refuses, and works afterwards.
TEST_F(ValidateTest, LayerStaysUsableAfterErrors) {
  const Tensor expected = RunForward(layer_, problem_, pool_);
  EXPECT_THROW(ExpertsLayer(problem_.config(), problem_.down.view(), problem_.down.view(), pool_), std::invalid_argument);

  Tensor untouched = problem_.hidden.Like();
  ForwardArgs forward = Forward();
  forward.out = untouched.view();
  static_cast<std::int64_t*>(problem_.ids.view().data)[0] += 100;
  EXPECT_THROW(layer_.Forward(forward, pool_), std::invalid_argument);
  static_cast<std::int64_t*>(problem_.ids.view().data)[0] -= 100;
  EXPECT_TRUE(untouched == problem_.hidden.Like());

  BackwardArgs backward = Backward();
  backward.d_hidden = untouched.view();
  backward.saved = nullptr;
  EXPECT_THROW(layer_.Backward(backward, pool_), std::invalid_argument);
  EXPECT_TRUE(untouched == problem_.hidden.Like());

  EXPECT_TRUE(RunForward(layer_, problem_, pool_) == expected);
}

}  // namespace
}  // namespace moesaic::moe
