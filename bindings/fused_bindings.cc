#include "bindings/fused_bindings.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/interpreter_end.h"
#include "bindings/tensor.h"
#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/fused/attention.h"
#include "cpu_kernels/fused/attention_grad.h"
#include "cpu_kernels/fused/few_queries_attention.h"
#include "cpu_kernels/fused/linear.h"
#include "cpu_kernels/fused/log_probs.h"
#include "cpu_kernels/fused/rotary.h"
#include "cpu_kernels/tensor_text.h"
#include "threadpool/pool.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

using fused::PackedMatrix;
using threadpool::Pool;

constexpr const char* kTypes = "bfloat16 or float32";

Activation ActivationOf(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  throw std::invalid_argument("activation is \"" + name + "\"; expected \"none\", \"gelu\" or \"gelu_tanh\"");
}

Norm NormOf(const std::string& name) {
  if (name == "none") return Norm::kNone;
  if (name == "layernorm") return Norm::kLayerNorm;
  if (name == "rmsnorm") return Norm::kRmsNorm;
  throw std::invalid_argument("norm is \"" + name + "\"; expected \"none\", \"layernorm\" or \"rmsnorm\"");
}

/// Without the Python lock; PyTorch may be used again afterwards.
template <typename Body>
void Compute(UsesTorch& torch, Body body) {
  torch.End();
  {
    const py::gil_scoped_release unlocked;
    body();
  }
  torch.Begin();
}

TensorView OptionalView(const py::object& object, const char* name) {
  return object.is_none() ? TensorView() : ViewOf(object, {name}, kTypes);
}

/// `size` values as the engine reads them, fp32 side by side: those of a tensor, or a copy. None: null.
class FloatVector {
 public:
  /// @param object  bf16 or fp32; one dimension, or more that are contiguous
  FloatVector(const py::object& object, const char* name, std::int64_t size) {
    if (object.is_none()) return;
    const TensorView view = ViewOf(object, {name}, kTypes);
    std::int64_t count = 1, stride = 1;
    bool dense = true;
    for (int d = view.rank - 1; d >= 0; --d) {
      const auto dim = static_cast<std::size_t>(d);
      dense = dense && (view.shape[dim] == 1 || view.stride[dim] == stride);
      stride *= view.shape[dim];
      count *= view.shape[dim];
    }
    if (count != size || !(dense || view.rank == 1 || count == 0)) {
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(count) + " values; expected " +
                                  std::to_string(size) + ", contiguous or in one dimension");
    }
    if (dense && view.dtype == DType::kFloat32) {
      data_ = static_cast<const float*>(view.data);
      return;
    }
    const std::int64_t step = dense ? 1 : view.stride[0];
    copy_.resize(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      copy_[static_cast<std::size_t>(i)] = view.dtype == DType::kFloat32
                                               ? static_cast<const float*>(view.data)[i * step]
                                               : ToFloat(static_cast<const BFloat16*>(view.data)[i * step]);
    }
    data_ = copy_.data();
  }
  FloatVector(const FloatVector&) = delete;
  FloatVector& operator=(const FloatVector&) = delete;

  const float* data() const { return data_; }

 private:
  const float* data_ = nullptr;
  std::vector<float> copy_;
};

std::int64_t Columns(const TensorView& x, const PackedMatrix* weight, bool transposed) {
  if (weight == nullptr) return x.shape[1];
  return transposed ? weight->columns() : weight->rows();
}

void CheckRank(const TensorView& view, const char* name, int rank = 2) {
  if (view.rank == rank) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.rank) + " dimensions; expected " +
                              std::to_string(rank));
}

/// The rows of a tensor [..., features] as one matrix. Throws std::invalid_argument where they do not follow each other.
TensorView RowsOf(const TensorView& view, const char* name) {
  if (view.rank == 2) return view;
  if (view.rank == 1) return {view.data, view.dtype, 2, {1, view.shape[0], 0}, {view.shape[0], view.stride[0], 0}};
  const std::int64_t outer = view.shape[0], inner = view.shape[1];
  if (outer > 1 && inner > 1 && view.stride[0] != inner * view.stride[1]) {
    throw std::invalid_argument(std::string(name) +
                                " has rows that do not follow each other; expected three dimensions of which " +
                                "the first two can be one");
  }
  return {view.data,
          view.dtype,
          2,
          {outer * inner, view.shape[2], 0},
          {inner > 1 ? view.stride[1] : view.stride[0], view.stride[2], 0}};
}

/// Contiguous, as `like` with `features` in the last dimension.
OutputTensor RowsLike(const TensorView& like, std::int64_t features) {
  TensorView layout = like;
  layout.shape[static_cast<std::size_t>(like.rank - 1)] = features;
  std::int64_t stride = 1;
  for (int d = like.rank - 1; d >= 0; --d) {
    layout.stride[static_cast<std::size_t>(d)] = stride;
    stride *= layout.shape[static_cast<std::size_t>(d)];
  }
  return OutputTensor::Like(layout);
}

/// @param save  whether what backward needs is returned too: the activation's input, what the norm was computed from, and what
///              an adapter made of x, [r, rows]
/// @param low_only  whether that is all that is wanted
py::tuple Linear(const py::object& x, const PackedMatrix* weight, bool transposed, const py::object& bias,
                 const py::object& addend, const py::object& lora_a, const py::object& lora_b, float lora_scale,
                 const std::string& activation, const py::object& residual, const std::string& norm, const py::object& gamma,
                 const py::object& beta, float epsilon, bool save, bool low_only, const py::object& out) {
  UsesTorch torch;
  fused::LinearArgs args;
  const TensorView x_view = ViewOf(x, {"x"}, kTypes);
  args.x = RowsOf(x_view, "x");
  args.weight = weight;
  args.transposed = transposed;
  const std::int64_t rows = args.x.shape[0], columns = Columns(args.x, weight, transposed);
  const FloatVector bias_values(bias, "bias", columns), gamma_values(gamma, "gamma", columns),
      beta_values(beta, "beta", columns);
  args.bias = bias_values.data();
  args.addend = OptionalView(addend, "addend");
  args.low_rank.a = OptionalView(lora_a, "lora_a");
  args.low_rank.b = OptionalView(lora_b, "lora_b");
  args.low_rank.scale = lora_scale;
  args.activation = ActivationOf(activation);
  if (!residual.is_none()) args.residual = RowsOf(ViewOf(residual, {"residual"}, kTypes), "residual");
  args.norm = NormOf(norm);
  args.gamma = gamma_values.data();
  args.beta = beta_values.data();
  args.epsilon = epsilon;
  if (weight == nullptr &&
      (args.norm == Norm::kNone || args.residual.defined() || args.addend.defined() || args.low_rank.defined())) {
    throw std::invalid_argument("weight is None; expected one, or a norm of x alone");
  }
  OutputTensor fresh, pre, normalized, inverse_std, low;
  if (out.is_none() && !low_only) {
    args.out = RowsOf((fresh = RowsLike(x_view, columns)).view(), "out");
  } else if (!out.is_none()) {
    args.out = ViewOf(out, {"out"}, kTypes);
  }
  if (save && args.activation != Activation::kNone) {
    args.pre = (pre = OutputTensor::Contiguous(args.x.dtype, rows, columns)).view();
  }
  if (save && args.norm != Norm::kNone) {
    args.normalized = (normalized = OutputTensor::Contiguous(args.x.dtype, rows, columns)).view();
    inverse_std = OutputTensor::Contiguous(DType::kFloat32, rows, 1);
    args.inverse_std = static_cast<float*>(inverse_std.data());
  }
  if (save && args.low_rank.defined()) {
    low = OutputTensor::Contiguous(DType::kFloat32, args.low_rank.rank(), rows);
    args.low_rank.low = static_cast<float*>(low.data());
  }
  Compute(torch, [&] { fused::Linear(args, Pool::Default()); });
  return py::make_tuple(out.is_none() ? fresh.ToTorch() : out, pre.ToTorch(), normalized.ToTorch(), inverse_std.ToTorch(),
                        low.ToTorch());
}

/// @param p, low  [r, rows] fp32, as Linear() gave them for d and for x
py::tuple LowRankBackward(const py::object& p, const py::object& low, const py::object& x, const py::object& d) {
  UsesTorch torch;
  fused::LowRankGradArgs args;
  args.x = RowsOf(ViewOf(x, {"x"}, kTypes), "x");
  args.d = RowsOf(ViewOf(d, {"d"}, kTypes), "d");
  const TensorView p_view = ViewOf(p, {"p"}, kTypes);
  CheckRank(p_view, "p");
  args.rank = p_view.shape[0];
  const FloatVector p_values(p, "p", args.rank * args.x.shape[0]), low_values(low, "low", args.rank * args.x.shape[0]);
  args.p = p_values.data();
  args.low = low_values.data();
  OutputTensor d_a = OutputTensor::Contiguous(DType::kFloat32, args.rank, args.x.shape[1]);
  OutputTensor d_b = OutputTensor::Contiguous(DType::kFloat32, args.d.shape[1], args.rank);
  args.d_a = static_cast<float*>(d_a.data());
  args.d_b = static_cast<float*>(d_b.data());
  Compute(torch, [&] { fused::LowRankGrad(args, Pool::Default()); });
  return py::make_tuple(d_a.ToTorch(), d_b.ToTorch());
}

py::tuple NormBackward(const std::string& norm, const py::object& d_out, const py::object& normalized,
                       const py::object& inverse_std, const py::object& gamma) {
  UsesTorch torch;
  fused::NormGradArgs args;
  args.norm = NormOf(norm);
  args.d_out = ViewOf(d_out, {"d_out"}, kTypes);
  CheckRank(args.d_out, "d_out");
  args.normalized = ViewOf(normalized, {"normalized"}, kTypes);
  const FloatVector inverse_std_values(inverse_std, "inverse_std", args.d_out.shape[0]);
  const FloatVector gamma_values(gamma, "gamma", args.d_out.shape[1]);
  args.inverse_std = inverse_std_values.data();
  args.gamma = gamma_values.data();
  OutputTensor d_in = OutputTensor::Contiguous(args.d_out.dtype, args.d_out.shape[0], args.d_out.shape[1]);
  OutputTensor d_gamma = OutputTensor::Contiguous(DType::kFloat32, 1, args.d_out.shape[1]);
  OutputTensor d_beta = OutputTensor::Contiguous(DType::kFloat32, 1, args.d_out.shape[1]);
  args.d_in = d_in.view();
  args.d_gamma = static_cast<float*>(d_gamma.data());
  args.d_beta = static_cast<float*>(d_beta.data());
  Compute(torch, [&] { fused::NormGrad(args, Pool::Default()); });
  return py::make_tuple(d_in.ToTorch(), d_gamma.ToTorch(), d_beta.ToTorch());
}

py::object ActivationBackward(const std::string& activation, const py::object& d_out, const py::object& pre) {
  UsesTorch torch;
  const TensorView d_out_view = ViewOf(d_out, {"d_out"}, kTypes), pre_view = ViewOf(pre, {"pre"}, kTypes);
  CheckRank(d_out_view, "d_out");
  const Activation kind = ActivationOf(activation);
  OutputTensor d_pre = OutputTensor::Contiguous(d_out_view.dtype, d_out_view.shape[0], d_out_view.shape[1]);
  Compute(torch, [&] { fused::ActivationGrad(kind, d_out_view, pre_view, d_pre.view(), Pool::Default()); });
  return d_pre.ToTorch();
}

/// What both forms of attention take, of three dimensions each.
template <class Args>
void ReadFactors(const py::object& q, const py::object& k, const py::object& v, Args& args) {
  args.q = ViewOf(q, {"q"}, kTypes);
  args.k = ViewOf(k, {"k"}, kTypes);
  args.v = ViewOf(v, {"v"}, kTypes);
  CheckRank(args.q, "q", 3);
  CheckRank(args.k, "k", 3);
}

/// [batch * rows, columns], which `view` shows as [batch, rows, columns].
OutputTensor RowsOfSequences(std::int64_t batch, std::int64_t rows, std::int64_t columns, TensorView& view) {
  OutputTensor out = OutputTensor::Contiguous(DType::kBFloat16, batch * rows, columns);
  view = {out.data(), DType::kBFloat16, 3, {batch, rows, columns}, {rows * columns, columns, 1}};
  return out;
}

/// The first key of each query, as attention reads it; None: null.
class FirstKeys {
 public:
  /// @param object  contiguous int64 [batch, queries]
  FirstKeys(const py::object& object, std::int64_t batch, std::int64_t queries) {
    if (object.is_none()) return;
    const TensorView view = ViewOf(object, {"first_keys"}, "int64");
    CheckRank(view, "first_keys");
    if (view.dtype != DType::kInt64 || view.shape[0] != batch || view.shape[1] != queries) {
      throw std::invalid_argument("first_keys is [" + std::to_string(view.shape[0]) + ", " + std::to_string(view.shape[1]) +
                                  "] of " + NameOf(view.dtype) + "; expected [" + std::to_string(batch) + ", " +
                                  std::to_string(queries) + "] of int64");
    }
    if ((queries > 1 && view.stride[1] != 1) || (batch > 1 && view.stride[0] != queries)) {
      throw std::invalid_argument("first_keys has strides " + std::to_string(view.stride[0]) + " and " +
                                  std::to_string(view.stride[1]) + "; expected a contiguous tensor");
    }
    keys_.reserve(static_cast<std::size_t>(batch * queries));
    const auto* const keys = static_cast<const std::int64_t*>(view.data);
    for (std::int64_t i = 0; i < batch * queries; ++i) {
      keys_.push_back(
          static_cast<std::int32_t>(std::clamp<std::int64_t>(keys[i], 0, std::numeric_limits<std::int32_t>::max())));
    }
  }
  const std::int32_t* data() const { return keys_.empty() ? nullptr : keys_.data(); }

 private:
  std::vector<std::int32_t> keys_;
};

/// What forward and backward of attention of many queries take alike, but for the bias and the first keys.
void ReadAttention(const py::object& q, const py::object& k, const py::object& v, std::int64_t heads, float scale,
                   std::int64_t key_heads, bool causal, fused::AttentionArgs& args) {
  ReadFactors(q, k, v, args);
  args.heads = heads;
  args.scale = scale;
  args.key_heads = key_heads;
  args.causal = causal;
}

/// Queries of all heads and sequences. Throws std::invalid_argument if there are no such heads.
std::int64_t QueriesOf(const fused::AttentionArgs& args) {
  if (args.heads < 1 || args.heads > args.q.shape[2]) {
    throw std::invalid_argument("heads is " + std::to_string(args.heads) + "; expected a divisor of q's " +
                                std::to_string(args.q.shape[2]) + " columns");
  }
  return args.q.shape[0] * args.heads * args.q.shape[1];
}

/// @param save  whether what attention_backward needs comes with the result: [2, queries of all heads], most and inverse_sums
py::object Attention(const py::object& q, const py::object& k, const py::object& v, std::int64_t heads, float scale,
                     const py::object& bias, std::int64_t key_heads, bool causal, bool save, const py::object& first_keys) {
  UsesTorch torch;
  fused::AttentionArgs args;
  ReadAttention(q, k, v, heads, scale, key_heads, causal, args);
  const FloatVector bias_values(bias, "bias", args.k.shape[0] * args.k.shape[1]);
  args.bias = bias_values.data();
  const FirstKeys first(first_keys, args.q.shape[0], args.q.shape[1]);
  args.first_keys = first.data();
  OutputTensor out = RowsOfSequences(args.q.shape[0], args.q.shape[1], args.q.shape[2], args.out), statistics;
  if (save) {
    const std::int64_t queries = QueriesOf(args);
    statistics = OutputTensor::Contiguous(DType::kFloat32, 2, queries);
    args.most = static_cast<float*>(statistics.data());
    args.inverse_sums = args.most + queries;
  }
  Compute(torch, [&] { fused::Attention(args, Pool::Default()); });
  if (!save) return out.ToTorch();
  return py::make_tuple(out.ToTorch(), statistics.ToTorch());
}

py::object AttentionBackward(const py::object& d_out, const py::object& q, const py::object& k, const py::object& v,
                             const py::object& out, const py::object& statistics, std::int64_t heads, float scale,
                             const py::object& bias, std::int64_t key_heads, bool causal, const py::object& first_keys) {
  UsesTorch torch;
  fused::AttentionGradArgs args;
  fused::AttentionArgs& forward = args.forward;
  ReadAttention(q, k, v, heads, scale, key_heads, causal, forward);
  forward.out = ViewOf(out, {"out"}, kTypes);
  args.d_out = ViewOf(d_out, {"d_out"}, kTypes);
  const FloatVector bias_values(bias, "bias", forward.k.shape[0] * forward.k.shape[1]);
  forward.bias = bias_values.data();
  const FirstKeys first(first_keys, forward.q.shape[0], forward.q.shape[1]);
  forward.first_keys = first.data();
  const std::int64_t queries = QueriesOf(forward);
  if (statistics.is_none()) throw std::invalid_argument("statistics is None; expected what attention() saved");
  const FloatVector saved(statistics, "statistics", 2 * queries);
  args.most = saved.data();
  args.inverse_sums = saved.data() + queries;
  OutputTensor d_q = RowsOfSequences(forward.q.shape[0], forward.q.shape[1], forward.q.shape[2], args.d_q);
  OutputTensor d_k = RowsOfSequences(forward.k.shape[0], forward.k.shape[1], forward.k.shape[2], args.d_k);
  OutputTensor d_v = RowsOfSequences(forward.k.shape[0], forward.k.shape[1], forward.k.shape[2], args.d_v);
  Compute(torch, [&] { fused::AttentionGrad(args, Pool::Default()); });
  return py::make_tuple(d_q.ToTorch(), d_k.ToTorch(), d_v.ToTorch());
}

/// @param batch  sequences
py::object FewQueriesAttention(const py::object& q, const py::object& k, const py::object& v, std::int64_t batch, float scale,
                               const py::object& bias, bool causal) {
  UsesTorch torch;
  fused::FewQueriesAttentionArgs args;
  ReadFactors(q, k, v, args);
  args.scale = scale;
  args.causal = causal;
  const FloatVector bias_values(bias, "bias", batch * args.k.shape[1]);
  args.bias = bias_values.data();
  const std::int64_t heads = batch > 0 ? args.q.shape[0] / batch : 0;
  OutputTensor out = RowsOfSequences(batch, args.q.shape[1], heads * args.q.shape[2], args.out);
  Compute(torch, [&] { fused::FewQueriesAttention(args, Pool::Default()); });
  return out.ToTorch();
}

/// The targets of rows, int64 side by side.
const std::int64_t* IdsOf(const py::object& targets, std::int64_t rows) {
  const TensorView view = ViewOf(targets, {"targets"}, "int64");
  if (view.rank != 1 || view.dtype != DType::kInt64 || view.shape[0] != rows || (view.stride[0] != 1 && rows > 1)) {
    throw std::invalid_argument("targets is no contiguous int64 tensor for " + std::to_string(rows) + " rows");
  }
  return static_cast<const std::int64_t*>(view.data);
}

/// @return [6, rows]: log_probs, log_sums, entropies, log_squares, mean_logits, and 1 where the target is the largest, else 0
py::object LogProbs(const py::object& x, const PackedMatrix* weight, const py::object& targets, const py::object& bias,
                    float scale) {
  UsesTorch torch;
  fused::LogProbsArgs args;
  args.x = RowsOf(ViewOf(x, {"x"}, kTypes), "x");
  args.weight = weight;
  const FloatVector bias_values(bias, "bias", Columns(args.x, weight, false));
  args.bias = bias_values.data();
  args.scale = scale;
  const std::int64_t rows = args.x.shape[0];
  args.targets = IdsOf(targets, rows);
  OutputTensor out = OutputTensor::Contiguous(DType::kFloat32, 6, rows);
  std::vector<std::uint8_t> are_top1(static_cast<std::size_t>(rows));
  fused::LogProbsResults results;
  float* next = static_cast<float*>(out.data());
  for (float** array :
       {&results.log_probs, &results.log_sums, &results.entropies, &results.log_squares, &results.mean_logits}) {
    *array = next;
    next += rows;
  }
  results.are_top1 = are_top1.data();
  Compute(torch, [&] {
    fused::LogProbs(args, results, Pool::Default());
    std::copy(are_top1.begin(), are_top1.end(), next);
  });
  return out.ToTorch();
}

/// @param log_sums, entropies  of LogProbs()
py::object LogProbsBackward(const py::object& d_log_probs, const py::object& d_entropies, const py::object& x,
                            const PackedMatrix* weight, const py::object& targets, const py::object& log_sums,
                            const py::object& entropies, const py::object& bias, float scale) {
  UsesTorch torch;
  fused::LogProbsGradArgs args;
  args.forward.x = RowsOf(ViewOf(x, {"x"}, kTypes), "x");
  args.forward.weight = weight;
  const FloatVector bias_values(bias, "bias", Columns(args.forward.x, weight, false));
  args.forward.bias = bias_values.data();
  args.forward.scale = scale;
  const std::int64_t rows = args.forward.x.shape[0];
  args.forward.targets = IdsOf(targets, rows);
  const FloatVector sums(log_sums, "log_sums", rows), entropy_values(entropies, "entropies", rows);
  const FloatVector d_log_prob_values(d_log_probs, "d_log_probs", rows), d_entropy_values(d_entropies, "d_entropies", rows);
  args.log_sums = sums.data();
  args.entropies = entropy_values.data();
  args.d_log_probs = d_log_prob_values.data();
  args.d_entropies = d_entropy_values.data();
  OutputTensor d_x = OutputTensor::Contiguous(args.forward.x.dtype, rows, args.forward.x.shape[1]);
  args.d_x = d_x.view();
  Compute(torch, [&] { fused::LogProbsGrad(args, Pool::Default()); });
  return d_x.ToTorch();
}

py::object SiluMul(const py::object& x, const py::object& out) {
  UsesTorch torch;
  const TensorView view = ViewOf(x, {"x"}, kTypes);
  CheckRank(view, "x");
  OutputTensor fresh;
  TensorView out_view;
  if (out.is_none()) {
    out_view = (fresh = OutputTensor::Contiguous(view.dtype, view.shape[0], view.shape[1] / 2)).view();
  } else {
    out_view = ViewOf(out, {"out"}, kTypes);
  }
  Compute(torch, [&] { fused::SiluMulRows(view, out_view, Pool::Default()); });
  return out.is_none() ? fresh.ToTorch() : out;
}

py::object SiluMulBackward(const py::object& d_out, const py::object& x) {
  UsesTorch torch;
  const TensorView d_out_view = ViewOf(d_out, {"d_out"}, kTypes), view = ViewOf(x, {"x"}, kTypes);
  CheckRank(view, "x");
  OutputTensor d_x = OutputTensor::Contiguous(view.dtype, view.shape[0], view.shape[1]);
  Compute(torch, [&] { fused::SiluMulGrad(d_out_view, view, d_x.view(), Pool::Default()); });
  return d_x.ToTorch();
}

py::object Rotary(const py::object& x, const py::object& cos, const py::object& sin, bool back) {
  UsesTorch torch;
  fused::RotaryArgs args;
  args.x = ViewOf(x, {"x"}, kTypes);
  args.cos = ViewOf(cos, {"cos"}, kTypes);
  args.sin = ViewOf(sin, {"sin"}, kTypes);
  args.back = back;
  CheckRank(args.x, "x");
  OutputTensor out = OutputTensor::Contiguous(args.x.dtype, args.x.shape[0], args.x.shape[1]);
  args.out = out.view();
  Compute(torch, [&] { fused::Rotary(args, Pool::Default()); });
  return out.ToTorch();
}

/// Up to 64 values of a tensor, spread over its dimensions, as their bytes.
py::bytes Sample(const py::object& tensor) {
  const UsesTorch torch;
  const TensorView view = ViewOf(tensor, {"tensor"}, "bfloat16, float16 or float32");
  const std::int64_t most = view.rank < 3 ? 8 : 4, bytes = SizeOf(view.dtype);
  std::array<std::int64_t, 3> size = {1, 1, 1}, stride = {};
  const auto rank = static_cast<std::size_t>(view.rank);
  for (std::size_t d = 0; d < rank; ++d) {
    size[3 - rank + d] = view.shape[d];
    stride[3 - rank + d] = view.stride[d] * bytes;
  }
  const auto step = [&](std::size_t d) { return std::max<std::int64_t>(1, CeilDiv(size[d], most)); };
  std::string values;
  for (std::int64_t i = 0; i < size[0]; i += step(0)) {
    for (std::int64_t j = 0; j < size[1]; j += step(1)) {
      for (std::int64_t k = 0; k < size[2]; k += step(2)) {
        const char* value = static_cast<const char*>(view.data) + i * stride[0] + j * stride[1] + k * stride[2];
        values.append(value, static_cast<std::size_t>(bytes));
      }
    }
  }
  return values;
}

}  // namespace

void BindFused(py::module_& module) {
  using py::arg;
  py::class_<PackedMatrix>(module, "PackedMatrix")
      .def(py::init([](const py::object& weight) {
             UsesTorch torch;
             const TensorView view = ViewOf(weight, {"weight"}, kTypes);
             torch.End();
             const py::gil_scoped_release unlocked;
             return std::make_unique<PackedMatrix>(view, Pool::Default());
           }),
           arg("weight"))
      .def_property_readonly("rows", &PackedMatrix::rows)
      .def_property_readonly("columns", &PackedMatrix::columns)
      .def_property_readonly("bytes", &PackedMatrix::bytes)
      .def_property_readonly("is_bf16", [](const PackedMatrix& self) { return self.dtype() == DType::kBFloat16; })
      .def(
          "unpack",
          [](const PackedMatrix& self, const py::object& weight) {
            UsesTorch torch;
            const TensorView view = ViewOf(weight, {"weight"}, kTypes);
            torch.End();
            const py::gil_scoped_release unlocked;
            self.Unpack(view, Pool::Default());
          },
          arg("weight"));
  module.def("fused_linear", &Linear, arg("x"), arg("weight").none(true), arg("transposed") = false, arg("bias") = py::none(),
             arg("addend") = py::none(), arg("lora_a") = py::none(), arg("lora_b") = py::none(), arg("lora_scale") = 1.0f,
             arg("activation") = "none", arg("residual") = py::none(), arg("norm") = "none", arg("gamma") = py::none(),
             arg("beta") = py::none(), arg("eps") = 0.0f, arg("save") = false, arg("low_only") = false,
             arg("out") = py::none());
  module.def("low_rank_backward", &LowRankBackward, arg("p"), arg("low"), arg("x"), arg("d"));
  module.def("norm_backward", &NormBackward, arg("norm"), arg("d_out"), arg("normalized"), arg("inverse_std"), arg("gamma"));
  module.def("activation_backward", &ActivationBackward, arg("activation"), arg("d_out"), arg("pre"));
  module.def("attention", &Attention, arg("q"), arg("k"), arg("v"), arg("heads"), arg("scale"), arg("bias") = py::none(),
             arg("key_heads") = 0, arg("causal") = false, arg("save") = false, arg("first_keys") = py::none());
  module.def("attention_backward", &AttentionBackward, arg("d_out"), arg("q"), arg("k"), arg("v"), arg("out"),
             arg("statistics"), arg("heads"), arg("scale"), arg("bias") = py::none(), arg("key_heads") = 0,
             arg("causal") = false, arg("first_keys") = py::none());
  module.def("few_queries_attention", &FewQueriesAttention, arg("q"), arg("k"), arg("v"), arg("batch"), arg("scale"),
             arg("bias") = py::none(), arg("causal") = false);
  module.def("sample_of", &Sample, arg("tensor"));
  module.def("log_probs", &LogProbs, arg("x"), arg("weight").none(true), arg("targets"), arg("bias") = py::none(),
             arg("scale") = 1.0f);
  module.def("log_probs_backward", &LogProbsBackward, arg("d_log_probs"), arg("d_entropies"), arg("x"),
             arg("weight").none(true), arg("targets"), arg("log_sums"), arg("entropies"), arg("bias") = py::none(),
             arg("scale") = 1.0f);
  module.def("silu_mul", &SiluMul, arg("x"), arg("out") = py::none());
  module.def("silu_mul_backward", &SiluMulBackward, arg("d_out"), arg("x"));
  module.def("rotary", &Rotary, arg("x"), arg("cos"), arg("sin"), arg("back") = false);
}

}  // namespace moesaic::bindings
