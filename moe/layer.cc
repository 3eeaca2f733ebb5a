#include "moe/layer.h"

#include "moe/backward.h"
#include "moe/forward.h"
#include "moe/packed_weights.h"
#include "moe/validate.h"

namespace moesaic::moe {
namespace {

std::int64_t Rank(const LoraPair& pair) { return pair.defined() ? pair.a.shape[1] : 0; }

}  // namespace

class ExpertsLayer::Impl {
 public:
  Impl(const LayerConfig& config_, const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool)
      : config(config_), weights(config_, gate_up, down, pool) {}

  LayerConfig config;
  PackedWeights weights;
};

ExpertsLayer::ExpertsLayer(const LayerConfig& config, const TensorView& gate_up, const TensorView& down,
                           threadpool::Pool& pool) {
  ValidateWeights(config, gate_up, down);
  impl_ = std::make_unique<Impl>(config, gate_up, down, pool);
}

ExpertsLayer::~ExpertsLayer() = default;

const LayerConfig& ExpertsLayer::config() const { return impl_->config; }

std::int64_t ExpertsLayer::weight_bytes() const { return impl_->weights.bytes(); }

std::span<const Shard> ExpertsLayer::shards() const { return impl_->weights.shards(); }

SavedSizes ExpertsLayer::SavedStateSizes(std::int64_t tokens, std::int64_t top_k, std::span<const LoraAdapter> lora) const {
  std::int64_t input_rank = 0, down_rank = 0;
  for (const LoraAdapter& adapter : lora) {
    input_rank += Rank(adapter.gate_up) + Rank(adapter.gate) + Rank(adapter.up);
    down_rank += Rank(adapter.down);
  }
  const std::int64_t slots = tokens * top_k, inner = impl_->config.intermediate_size;
  return {impl_->config.num_experts + 1 + slots, slots * inner, slots * inner, slots * input_rank,
          static_cast<std::int64_t>(impl_->weights.shards().size()) * slots * down_rank};
}

void ExpertsLayer::Forward(const ForwardArgs& args, threadpool::Pool& pool) const {
  ValidateForward(impl_->config, args);
  const threadpool::Pool::Turn turn(pool);  // before scratch memory is taken: callers that wait need none
  RunForward(impl_->config, impl_->weights, args, pool);
}

void ExpertsLayer::Backward(const BackwardArgs& args, threadpool::Pool& pool) const {
  ValidateBackward(impl_->config, args);
  const threadpool::Pool::Turn turn(pool);
  RunBackward(impl_->config, impl_->weights, args, pool);
}

void ExpertsLayer::Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const {
  ValidateUnpack(impl_->config, gate_up, down);
  impl_->weights.Unpack(gate_up, down, pool);
}

}  // namespace moesaic::moe
