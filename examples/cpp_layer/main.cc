// The engine without Python: one experts layer with LoRA, forward and backward, checked against the reference.
//
//   cpp_layer [tokens [experts [top_k [hidden [intermediate [rank]]]]]]
//
// Exits with 1 if the results are wrong and with 2 on wrong usage.
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

#include "cpu_kernels/isa.h"
#include "moe/layer.h"
#include "moe/reference.h"

namespace {

using namespace moesaic;
using moe::Matrix;

struct Options {
  std::int64_t tokens = 512;
  std::int64_t experts = 16;
  std::int64_t top_k = 4;
  std::int64_t hidden = 512;
  std::int64_t intermediate = 256;
  std::int64_t rank = 16;
};

/// A contiguous fp32 tensor and the view through which the engine sees it. The engine takes any strides, and bf16 as well.
struct Tensor {
  std::vector<float> values;
  TensorView view;

  Tensor(std::int64_t d0, std::int64_t d1) : values(static_cast<std::size_t>(d0 * d1)) {
    view = {values.data(), DType::kFloat32, 2, {d0, d1, 0}, {d1, 1, 0}};
  }
  Tensor(std::int64_t d0, std::int64_t d1, std::int64_t d2) : values(static_cast<std::size_t>(d0 * d1 * d2)) {
    view = {values.data(), DType::kFloat32, 3, {d0, d1, d2}, {d1 * d2, d2, 1}};
  }
};

/// Normal values, rounded to bf16, as the engine would round them: what is left in the comparison is its arithmetic.
void Randomize(Tensor& tensor, double deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
  for (float& value : tensor.values) value = ToFloat(ToBFloat16(normal(random)));
}

/// The first `rows` rows of a tensor.
TensorView FirstRows(TensorView view, std::int64_t rows) {
  view.shape[0] = rows;
  return view;
}

/// |values - expected| / |expected| (L2) over what `expected` covers.
double RelativeError(const float* values, const std::vector<Matrix>& expected) {
  double difference = 0.0;
  double norm = 0.0;
  for (const Matrix& matrix : expected) {
    for (const double value : matrix.values) {
      difference += (*values - value) * (*values - value);
      norm += value * value;
      ++values;
    }
  }
  return difference == 0.0 ? 0.0 : std::sqrt(difference / norm);
}

bool Check(const char* name, double error) {
  constexpr double kTolerance = 5e-3;  // operands in bf16, sums in fp32
  const bool good = error <= kTolerance;
  std::printf("  %-22s %.2e  %s\n", name, error, good ? "ok" : "WRONG");
  return good;
}

template <typename Call>
double Milliseconds(Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// All that a training step needs of one layer: inputs, what forward saves, outputs and gradients.
struct Batch {
  Tensor hidden, weights, d_out, out, d_hidden, d_weights;
  std::vector<std::int64_t> id_values;
  TensorView ids;
  Tensor d_gate_up_a, d_gate_up_b, d_down_a, d_down_b;
  std::vector<std::int32_t> routing;
  std::vector<BFloat16> gate, up, gate_up_low, down_low;

  Batch(const Options& o, std::mt19937& random)
      : hidden(o.tokens, o.hidden),
        weights(o.tokens, o.top_k),
        d_out(o.tokens, o.hidden),
        out(o.tokens, o.hidden),
        d_hidden(o.tokens, o.hidden),
        d_weights(o.tokens, o.top_k),
        id_values(static_cast<std::size_t>(o.tokens * o.top_k)),
        ids{id_values.data(), DType::kInt64, 2, {o.tokens, o.top_k, 0}, {o.top_k, 1, 0}},
        d_gate_up_a(o.experts, o.rank, o.hidden),
        d_gate_up_b(o.experts, 2 * o.intermediate, o.rank),
        d_down_a(o.experts, o.rank, o.intermediate),
        d_down_b(o.experts, o.hidden, o.rank) {
    Randomize(hidden, 1.0, random);
    Randomize(d_out, 1.0, random);
    std::fill(weights.values.begin(), weights.values.end(), 1.0f / static_cast<float>(o.top_k));
    std::vector<std::int64_t> order(static_cast<std::size_t>(o.experts));
    for (std::int64_t e = 0; e < o.experts; ++e) order[static_cast<std::size_t>(e)] = e;
    for (std::int64_t t = 0; t < o.tokens; ++t) {  // k different experts for each token
      std::shuffle(order.begin(), order.end(), random);
      std::copy_n(order.begin(), o.top_k, id_values.begin() + t * o.top_k);
    }
  }

  /// Memory for the saved state belongs to the caller, so that it can live as long as the backward needs it.
  moe::SavedState Allocate(const moe::SavedSizes& sizes) {
    routing.resize(static_cast<std::size_t>(sizes.routing));
    gate.resize(static_cast<std::size_t>(sizes.gate));
    up.resize(static_cast<std::size_t>(sizes.up));
    gate_up_low.resize(static_cast<std::size_t>(sizes.gate_up_low));
    down_low.resize(static_cast<std::size_t>(sizes.down_low));
    return {routing.data(), gate.data(), up.data(), gate_up_low.data(), down_low.data()};
  }
};

bool Run(const Options& o) {
  std::mt19937 random(1);
  Tensor gate_up(o.experts, 2 * o.intermediate, o.hidden);
  Tensor down(o.experts, o.hidden, o.intermediate);
  Tensor gate_up_a(o.experts, o.rank, o.hidden);
  Tensor gate_up_b(o.experts, 2 * o.intermediate, o.rank);
  Tensor down_a(o.experts, o.rank, o.intermediate);
  Tensor down_b(o.experts, o.hidden, o.rank);
  Randomize(gate_up, 1.0 / std::sqrt(o.hidden), random);
  Randomize(down, 1.0 / std::sqrt(o.intermediate), random);
  Randomize(gate_up_a, 1.0 / std::sqrt(o.hidden), random);
  Randomize(gate_up_b, 0.5 / std::sqrt(o.rank), random);
  Randomize(down_a, 1.0 / std::sqrt(o.intermediate), random);
  Randomize(down_b, 0.5 / std::sqrt(o.rank), random);
  Batch batch(o, random);

  threadpool::Pool& pool = threadpool::Pool::Default();
  std::printf("experts layer: T %ld  E %ld  k %ld  H %ld  I %ld  r %ld   (%s, %d threads)\n", o.tokens, o.experts, o.top_k,
              o.hidden, o.intermediate, o.rank, ChosenIsa().c_str(), pool.num_threads());
  const moe::LayerConfig config{o.experts, o.hidden, o.intermediate};
  const moe::ExpertsLayer layer(config, gate_up.view, down.view, pool);
  std::printf("  packed weights: %.1f MB\n", static_cast<double>(layer.weight_bytes()) / 1e6);

  moe::LoraAdapter adapter;
  adapter.gate_up = {gate_up_a.view, gate_up_b.view, 2.0f};  // one A for gate and up, as PEFT has it
  adapter.down = {down_a.view, down_b.view, 2.0f};
  moe::LoraAdapterGrad grad;
  grad.gate_up = {batch.d_gate_up_a.view, batch.d_gate_up_b.view};
  grad.down = {batch.d_down_a.view, batch.d_down_b.view};
  const moe::SavedState saved = batch.Allocate(layer.SavedStateSizes(o.tokens, o.top_k, {&adapter, 1}));

  // The first `rows` tokens through the engine.
  const auto forward = [&](std::int64_t rows) {
    layer.Forward({FirstRows(batch.hidden.view, rows),
                   FirstRows(batch.ids, rows),
                   FirstRows(batch.weights.view, rows),
                   {&adapter, 1},
                   FirstRows(batch.out.view, rows),
                   &saved},
                  pool);
  };
  const auto backward = [&](std::int64_t rows) {
    layer.Backward({FirstRows(batch.hidden.view, rows),
                    FirstRows(batch.weights.view, rows),
                    {&adapter, 1},
                    &saved,
                    FirstRows(batch.d_out.view, rows),
                    FirstRows(batch.d_hidden.view, rows),
                    FirstRows(batch.d_weights.view, rows),
                    {&grad, 1}},
                   pool);
  };
  forward(o.tokens);  // the first call warms caches and scratch memory
  backward(o.tokens);
  const double forward_ms = Milliseconds([&] { forward(o.tokens); });
  const double backward_ms = Milliseconds([&] { backward(o.tokens); });
  const double gflop = 6.0 * static_cast<double>(o.tokens * o.top_k * o.hidden * o.intermediate) / 1e9;
  std::printf("  forward  [%ld, %ld]  %8.2f ms  (%.1f GFLOP/s)\n", o.tokens, o.hidden, forward_ms, gflop / forward_ms * 1e3);
  std::printf("  backward [%ld, %ld]  %8.2f ms  (%.1f GFLOP/s)\n", o.tokens, o.hidden, backward_ms, gflop / backward_ms * 1e3);

  // A token's output and gradient do not depend on the other tokens, so the reference needs only a few of them.
  const std::int64_t rows = std::min<std::int64_t>(o.tokens, 16);
  const moe::ReferenceWeights base{gate_up.view, down.view};
  const moe::ReferenceInputs inputs{
      FirstRows(batch.hidden.view, rows), FirstRows(batch.ids, rows), FirstRows(batch.weights.view, rows), {&adapter, 1}};
  const Matrix out = moe::ReferenceForward(base, inputs);
  const moe::ReferenceGradients expected = moe::ReferenceBackward(base, inputs, FirstRows(batch.d_out.view, rows));
  std::printf("relative error against the reference, first %ld tokens\n", rows);
  bool good = Check("out", RelativeError(batch.out.values.data(), {out}));
  good &= Check("d_hidden", RelativeError(batch.d_hidden.values.data(), {expected.hidden}));
  good &= Check("d_top_k_weights", RelativeError(batch.d_weights.values.data(), {expected.weights}));

  // The gradients of the adapter add up over all tokens: those few once more, alone.
  forward(rows);
  backward(rows);
  good &= Check("gate_up dA", RelativeError(batch.d_gate_up_a.values.data(), expected.lora[0].gate_up.a));
  good &= Check("gate_up dB", RelativeError(batch.d_gate_up_b.values.data(), expected.lora[0].gate_up.b));
  good &= Check("down dA", RelativeError(batch.d_down_a.values.data(), expected.lora[0].down.a));
  good &= Check("down dB", RelativeError(batch.d_down_b.values.data(), expected.lora[0].down.b));
  return good;
}

/// False on wrong usage.
bool Parse(int argc, char** argv, Options& o) {
  const std::array<std::int64_t*, 6> values = {&o.tokens, &o.experts, &o.top_k, &o.hidden, &o.intermediate, &o.rank};
  if (argc > 1 + static_cast<int>(values.size())) return false;
  for (int i = 1; i < argc; ++i) {
    const char* end = argv[i] + std::strlen(argv[i]);
    const auto [parsed, error] = std::from_chars(argv[i], end, *values[static_cast<std::size_t>(i - 1)]);
    if (error != std::errc() || parsed != end || *values[static_cast<std::size_t>(i - 1)] < 1) return false;
  }
  return o.top_k <= o.experts;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "usage: cpp_layer [tokens [experts [top_k [hidden [intermediate [rank]]]]]]   (each at least 1, top_k <= experts)\n");
    return 2;
  }
  try {
    return Run(options) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cpp_layer: %s\n", error.what());
    return 1;
  }
}
