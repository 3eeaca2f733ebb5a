// The contract of layer.h served by the reference, one thread, no packing: slow and right.
#include "moe/layer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "moe/reference.h"
#include "moe/validate.h"

namespace moesaic::moe {
namespace {

/// A contiguous bf16 copy of a [d0, d1, d2] tensor.
struct Copy {
  std::vector<BFloat16> values;
  TensorView view;

  explicit Copy(const TensorView& source) : values(static_cast<std::size_t>(source.shape[0] * source.shape[1] * source.shape[2])) {
    view = source;
    view.data = values.data();
    view.dtype = DType::kBFloat16;
    view.stride = {source.shape[1] * source.shape[2], source.shape[2], 1};
    CopyElements(source, view);
  }

  static void CopyElements(const TensorView& from, const TensorView& to) {
    for (std::int64_t i = 0; i < from.shape[0]; ++i) {
      for (std::int64_t j = 0; j < from.shape[1]; ++j) {
        for (std::int64_t k = 0; k < from.shape[2]; ++k) StoreFloat(to, i, j, k, LoadFloat(from, i, j, k));
      }
    }
  }
};

void Store(const TensorView& view, const Matrix& values) {
  if (!view.defined()) return;
  for (std::int64_t i = 0; i < values.rows; ++i) {
    for (std::int64_t j = 0; j < values.cols; ++j) StoreFloat(view, i, j, 0, static_cast<float>(values(i, j)));
  }
}

void Store(const TensorView& view, const std::vector<Matrix>& values) {
  if (!view.defined()) return;
  for (std::size_t e = 0; e < values.size(); ++e) {
    for (std::int64_t i = 0; i < values[e].rows; ++i) {
      for (std::int64_t j = 0; j < values[e].cols; ++j) {
        StoreFloat(view, static_cast<std::int64_t>(e), i, j, static_cast<float>(values[e](i, j)));
      }
    }
  }
}

void Store(const LoraPairGrad& view, const ReferencePairGrad& values) {
  Store(view.a, values.a);
  Store(view.b, values.b);
}

std::int64_t Rank(const LoraPair& pair) { return pair.defined() ? pair.a.shape[1] : 0; }

}  // namespace

class ExpertsLayer::Impl {
 public:
  Impl(const LayerConfig& config, const TensorView& gate_up, const TensorView& down)
      : config(config), gate_up(gate_up), down(down), weights{this->gate_up.view, this->down.view} {}

  LayerConfig config;
  Copy gate_up;
  Copy down;
  ReferenceWeights weights;
};

ExpertsLayer::ExpertsLayer(const LayerConfig& config, const TensorView& gate_up, const TensorView& down, threadpool::Pool&) {
  ValidateWeights(config, gate_up, down);
  impl_ = std::make_unique<Impl>(config, gate_up, down);
}

ExpertsLayer::~ExpertsLayer() = default;

const LayerConfig& ExpertsLayer::config() const { return impl_->config; }

std::int64_t ExpertsLayer::weight_bytes() const {
  return static_cast<std::int64_t>((impl_->gate_up.values.size() + impl_->down.values.size()) * sizeof(BFloat16));
}

SavedSizes ExpertsLayer::SavedStateSizes(std::int64_t tokens, std::int64_t top_k, std::span<const LoraAdapter> lora) const {
  std::int64_t gate_up_rank = 0;
  std::int64_t down_rank = 0;
  for (const LoraAdapter& adapter : lora) {
    gate_up_rank += Rank(adapter.gate_up) + Rank(adapter.gate) + Rank(adapter.up);
    down_rank += Rank(adapter.down);
  }
  const std::int64_t slots = tokens * top_k;
  const LayerConfig& c = impl_->config;
  return {c.num_experts + 1 + slots, slots * c.intermediate_size, slots * c.intermediate_size, slots * gate_up_rank, slots * down_rank};
}

void ExpertsLayer::Forward(const ForwardArgs& args, threadpool::Pool&) const {
  ValidateForward(impl_->config, args);
  Store(args.out, ReferenceForward(impl_->weights, {args.hidden, args.ids, args.weights, args.lora}));
  if (args.saved == nullptr) return;
  const std::int64_t num_experts = impl_->config.num_experts;
  const std::int64_t top_k = args.ids.shape[1];
  const SavedSizes sizes = SavedStateSizes(args.ids.shape[0], top_k, args.lora);
  std::int32_t* offsets = args.saved->routing;
  std::int32_t* slots = offsets + num_experts + 1;
  std::int32_t count = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    offsets[e] = count;
    for (std::int64_t slot = 0; slot < args.ids.shape[0] * top_k; ++slot) {
      if (LoadInt(args.ids, slot / top_k, slot % top_k) == e) slots[count++] = static_cast<std::int32_t>(slot);
    }
  }
  offsets[num_experts] = count;
  std::fill_n(args.saved->gate, sizes.gate, BFloat16{0});
  std::fill_n(args.saved->up, sizes.up, BFloat16{0});
  std::fill_n(args.saved->gate_up_low, sizes.gate_up_low, BFloat16{0});
  std::fill_n(args.saved->down_low, sizes.down_low, BFloat16{0});
}

void ExpertsLayer::Backward(const BackwardArgs& args, threadpool::Pool&) const {
  ValidateBackward(impl_->config, args);
  const std::int64_t num_experts = impl_->config.num_experts;
  const std::int32_t* offsets = args.saved->routing;
  const std::int32_t* slots = offsets + num_experts + 1;
  std::vector<std::int32_t> id_values(static_cast<std::size_t>(args.weights.shape[0] * args.weights.shape[1]), -1);
  for (std::int32_t e = 0; e < num_experts; ++e) {
    for (std::int32_t i = offsets[e]; i < offsets[e + 1]; ++i) id_values[static_cast<std::size_t>(slots[i])] = e;
  }
  const TensorView ids{id_values.data(), DType::kInt32, 2, args.weights.shape, {args.weights.shape[1], 1, 0}};
  const ReferenceGradients grads = ReferenceBackward(impl_->weights, {args.hidden, ids, args.weights, args.lora}, args.d_out);
  Store(args.d_hidden, grads.hidden);
  Store(args.d_weights, grads.weights);
  for (std::size_t n = 0; n < args.d_lora.size(); ++n) {
    Store(args.d_lora[n].gate_up, grads.lora[n].gate_up);
    Store(args.d_lora[n].gate, grads.lora[n].gate);
    Store(args.d_lora[n].up, grads.lora[n].up);
    Store(args.d_lora[n].down, grads.lora[n].down);
  }
}

void ExpertsLayer::Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool&) const {
  ValidateUnpack(impl_->config, gate_up, down);
  Copy::CopyElements(impl_->gate_up.view, gate_up);
  Copy::CopyElements(impl_->down.view, down);
}

}  // namespace moesaic::moe
