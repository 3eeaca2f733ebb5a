#include "tests/moe/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "cpu_kernels/tensor_access.h"

namespace moesaic::moe {
namespace {

std::vector<std::int64_t> ContiguousStrides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> stride(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  return stride;
}

/// Approximately normal values (the sum of four uniforms), rounded to bf16.
void FillRandom(const TensorView& view, double deviation, std::mt19937_64& random) {
  for (std::int64_t i = 0; i < view.shape[0]; ++i) {
    for (std::int64_t j = 0; j < view.shape[1]; ++j) {
      for (std::int64_t k = 0; k < (view.rank == 3 ? view.shape[2] : 1); ++k) {
        const std::uint64_t bits = random();
        const double sum = static_cast<double>(bits & 0xffff) + static_cast<double>(bits >> 16 & 0xffff) +
                           static_cast<double>(bits >> 32 & 0xffff) + static_cast<double>(bits >> 48);
        const double normal = (sum / 65536.0 - 2.0) * std::sqrt(3.0);
        StoreFloat(view, i, j, k, ToFloat(ToBFloat16(static_cast<float>(deviation * normal))));
      }
    }
  }
}

double Uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

PairTensors MakePair(const ProblemSpec& spec, const AdapterSpec& adapter, std::int64_t rank, std::int64_t in, std::int64_t out,
                     std::mt19937_64& random) {
  PairTensors pair;
  if (rank == 0) return pair;
  const std::vector<std::int64_t> b_shape = {spec.experts, out, rank};
  pair.a = Tensor(adapter.dtype, {spec.experts, rank, in});
  pair.b = adapter.peft_strides ? Tensor(adapter.dtype, b_shape, {1, rank * spec.experts, spec.experts})
                                : Tensor(adapter.dtype, b_shape);
  // scale * B A x is a third of W x: large enough that an error in it shows in everything, as large as trained adapters become.
  FillRandom(pair.a.view(), 1.0 / std::sqrt(static_cast<double>(in)), random);
  FillRandom(pair.b.view(), 0.33 / std::sqrt(static_cast<double>(rank)) / std::fabs(adapter.scale), random);
  return pair;
}

/// The elements of `view` against those of the reference: adds to the squared L2 norms of difference and reference.
void AddSquares(const TensorView& view, std::int64_t e, const Matrix& reference, double& difference, double& norm) {
  for (std::int64_t i = 0; i < reference.rows; ++i) {
    for (std::int64_t j = 0; j < reference.cols; ++j) {
      const double value = view.rank == 3 ? LoadFloat(view, e, i, j) : LoadFloat(view, i, j);
      difference += (value - reference(i, j)) * (value - reference(i, j));
      norm += reference(i, j) * reference(i, j);
    }
  }
}

double Ratio(double difference, double norm) { return difference == 0.0 ? 0.0 : std::sqrt(difference / norm); }

}  // namespace

Tensor::Tensor(DType dtype, const std::vector<std::int64_t>& shape) : Tensor(dtype, shape, ContiguousStrides(shape)) {}

Tensor::Tensor(DType dtype, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape.begin());
  std::copy(stride.begin(), stride.end(), view_.stride.begin());
  const std::int64_t elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  bytes_.assign(static_cast<std::size_t>(elements * SizeOf(dtype)), std::byte{0xff});
  view_.data = bytes_.data();
}

Tensor Tensor::Like() const {
  Tensor result;
  result.bytes_.assign(bytes_.size(), std::byte{0xff});
  result.view_ = view_;
  result.view_.data = result.bytes_.data();
  return result;
}

std::string Describe(const ProblemSpec& spec) {
  std::ostringstream text;
  text << "T " << spec.tokens << " E " << spec.experts << " k " << spec.top_k << " H " << spec.hidden << " I "
       << spec.intermediate << " routing " << static_cast<int>(spec.routing) << " skipped " << spec.skipped << " duplicates "
       << spec.duplicates << " activations " << static_cast<int>(spec.activations) << " gate "
       << static_cast<int>(spec.activation) << " seed " << spec.seed;
  for (const AdapterSpec& a : spec.adapters) {
    text << " [gate_up " << a.gate_up << " gate " << a.gate << " up " << a.up << " down " << a.down << " scale " << a.scale
         << " type " << static_cast<int>(a.dtype) << " peft " << a.peft_strides << "]";
  }
  return text.str();
}

Problem::Problem(const ProblemSpec& spec)
    : spec(spec),
      gate_up(DType::kBFloat16, {spec.experts, 2 * spec.intermediate, spec.hidden}),
      down(DType::kBFloat16, {spec.experts, spec.hidden, spec.intermediate}),
      hidden(spec.activations, {spec.tokens, spec.hidden}),
      ids(spec.ids, {spec.tokens, spec.top_k}),
      top_k_weights(spec.activations, {spec.tokens, spec.top_k}),
      d_out(spec.activations, {spec.tokens, spec.hidden}) {
  std::mt19937_64 random(spec.seed);
  FillRandom(gate_up.view(), 1.0 / std::sqrt(static_cast<double>(spec.hidden)), random);
  FillRandom(down.view(), 1.0 / std::sqrt(static_cast<double>(spec.intermediate)), random);
  FillRandom(hidden.view(), 1.0, random);
  FillRandom(d_out.view(), 1.0, random);
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      StoreFloat(top_k_weights.view(), t, j, 0, static_cast<float>(0.05 + Uniform(random)));
    }
  }
  FillIds(random);
  for (const AdapterSpec& adapter : spec.adapters) {
    AdapterTensors tensors;
    tensors[0] = MakePair(spec, adapter, adapter.gate_up, spec.hidden, 2 * spec.intermediate, random);
    tensors[1] = MakePair(spec, adapter, adapter.gate, spec.hidden, spec.intermediate, random);
    tensors[2] = MakePair(spec, adapter, adapter.up, spec.hidden, spec.intermediate, random);
    tensors[3] = MakePair(spec, adapter, adapter.down, spec.intermediate, spec.hidden, random);
    LoraAdapter views;
    for (std::size_t p = 0; p < kPairs.size(); ++p)
      views.*kPairs[p] = {tensors[p].a.view(), tensors[p].b.view(), adapter.scale};
    adapters.push_back(std::move(tensors));
    lora.push_back(views);
  }
}

void Problem::FillIds(std::mt19937_64& random) {
  const auto draw = [&]() -> std::int64_t {
    if (spec.routing == Routing::kOneExpert) return spec.experts - 1;
    // The fourth power puts about half of the rows on the first sixteenth of the experts.
    const double u = spec.routing == Routing::kSkewed ? std::pow(Uniform(random), 4.0) : Uniform(random);
    return static_cast<std::int64_t>(u * static_cast<double>(spec.experts));
  };
  const bool distinct = !spec.duplicates && spec.routing != Routing::kOneExpert && spec.top_k <= spec.experts;
  for (std::int64_t t = 0; t < spec.tokens; ++t) {
    std::vector<std::int64_t> row;
    while (static_cast<std::int64_t>(row.size()) < spec.top_k) {
      const std::int64_t e = draw();
      if (!distinct || std::find(row.begin(), row.end(), e) == row.end()) row.push_back(e);
    }
    for (std::int64_t j = 0; j < spec.top_k; ++j) {
      std::int64_t id = row[static_cast<std::size_t>(j)];
      if (Uniform(random) < spec.skipped) id = random() % 2 == 0 ? -1 : spec.experts;
      if (spec.ids == DType::kInt64) {
        static_cast<std::int64_t*>(ids.view().data)[t * spec.top_k + j] = id;
      } else {
        static_cast<std::int32_t*>(ids.view().data)[t * spec.top_k + j] = static_cast<std::int32_t>(id);
      }
    }
  }
}

Saved::Saved(const ExpertsLayer& layer, const Problem& problem) {
  const SavedSizes sizes = layer.SavedStateSizes(problem.spec.tokens, problem.spec.top_k, problem.lora);
  constexpr BFloat16 kNan = {0xffff};
  routing.assign(static_cast<std::size_t>(sizes.routing), -1);
  gate.assign(static_cast<std::size_t>(sizes.gate), kNan);
  up.assign(static_cast<std::size_t>(sizes.up), kNan);
  gate_up_low.assign(static_cast<std::size_t>(sizes.gate_up_low), kNan);
  down_low.assign(static_cast<std::size_t>(sizes.down_low), kNan);
  state = {routing.data(), gate.data(), up.data(), gate_up_low.data(), down_low.data()};
}

Tensor RunForward(const ExpertsLayer& layer, const Problem& problem, threadpool::Pool& pool, const Saved* saved) {
  Tensor out = problem.hidden.Like();
  layer.Forward({problem.hidden.view(), problem.ids.view(), problem.top_k_weights.view(), problem.lora, out.view(),
                 saved == nullptr ? nullptr : &saved->state},
                pool);
  return out;
}

Gradients RunBackward(const ExpertsLayer& layer, const Problem& problem, threadpool::Pool& pool, const Saved& saved) {
  Gradients gradients{problem.hidden.Like(), problem.top_k_weights.Like(), {}};
  std::vector<LoraAdapterGrad> views;
  for (const AdapterTensors& adapter : problem.adapters) {
    AdapterTensors tensors;
    LoraAdapterGrad view;
    for (std::size_t p = 0; p < kPairGrads.size(); ++p) {
      tensors[p] = {adapter[p].a.Like(), adapter[p].b.Like()};
      view.*kPairGrads[p] = {tensors[p].a.view(), tensors[p].b.view()};
    }
    gradients.lora.push_back(std::move(tensors));
    views.push_back(view);
  }
  layer.Backward({problem.hidden.view(), problem.top_k_weights.view(), problem.lora, &saved.state, problem.d_out.view(),
                  gradients.hidden.view(), gradients.top_k_weights.view(), views},
                 pool);
  return gradients;
}

bool Equal(const Gradients& a, const Gradients& b) {
  if (!(a.hidden == b.hidden) || !(a.top_k_weights == b.top_k_weights) || a.lora.size() != b.lora.size()) return false;
  for (std::size_t n = 0; n < a.lora.size(); ++n) {
    for (std::size_t p = 0; p < a.lora[n].size(); ++p) {
      if (!(a.lora[n][p].a == b.lora[n][p].a) || !(a.lora[n][p].b == b.lora[n][p].b)) return false;
    }
  }
  return true;
}

double RelativeError(const TensorView& tensor, const Matrix& reference) {
  double difference = 0.0;
  double norm = 0.0;
  AddSquares(tensor, 0, reference, difference, norm);
  return Ratio(difference, norm);
}

double RelativeError(const TensorView& tensor, const std::vector<Matrix>& reference) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t e = 0; e < reference.size(); ++e) {
    AddSquares(tensor, static_cast<std::int64_t>(e), reference[e], difference, norm);
  }
  return Ratio(difference, norm);
}

}  // namespace moesaic::moe
