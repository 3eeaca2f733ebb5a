#include "bindings/layer_module.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arena.h"
#include "bindings/tensor.h"
#include "bindings/unlocked.h"
#include "moe/layer.h"
#include "profiling/calls.h"
#include "threadpool/pool.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

constexpr const char* kActivationTypes = "bfloat16 or float32";
constexpr const char* kIdTypes = "int64 or int32";
constexpr const char* kWeightTypes = "bfloat16, float16 or float32";
constexpr std::int64_t kAlignment = 64;

/// The pairs of an adapter in the order of the Python field names; an entry of a LoRA layout names one by its index.
struct PairField {
  const char* a_name;
  const char* b_name;
  moe::LoraPair moe::LoraAdapter::* pair;
  moe::LoraPairGrad moe::LoraAdapterGrad::* grad;
};
constexpr std::array<PairField, 4> kPairFields = {{
    {"gate_up.a", "gate_up.b", &moe::LoraAdapter::gate_up, &moe::LoraAdapterGrad::gate_up},
    {"gate.a", "gate.b", &moe::LoraAdapter::gate, &moe::LoraAdapterGrad::gate},
    {"up.a", "up.b", &moe::LoraAdapter::up, &moe::LoraAdapterGrad::up},
    {"down.a", "down.b", &moe::LoraAdapter::down, &moe::LoraAdapterGrad::down},
}};

std::string ShapeOf(const TensorView& view) {
  std::string text = "[";
  for (int d = 0; d < view.rank; ++d) text += (d == 0 ? "" : ", ") + std::to_string(view.shape[static_cast<std::size_t>(d)]);
  return text + "]";
}

/// PEFT's A of all experts, [E * r, in] with row e * r + k, as [E, r, in].
TensorView SplitA(const TensorView& fused, std::int64_t experts, const ArgumentName& name) {
  if (fused.rank != 2 || fused.shape[0] % experts != 0) {
    throw std::invalid_argument(name.ToString() + " has shape " + ShapeOf(fused) +
                                "; expected [E * r, in] with E = " + std::to_string(experts));
  }
  const std::int64_t rank = fused.shape[0] / experts;
  return {
      fused.data, fused.dtype, 3, {experts, rank, fused.shape[1]}, {rank * fused.stride[0], fused.stride[0], fused.stride[1]}};
}

/// PEFT's B of all experts, [out, r * E] with column k * E + e, as [E, out, r].
TensorView SplitB(const TensorView& fused, std::int64_t experts, const ArgumentName& name) {
  if (fused.rank != 2 || fused.shape[1] % experts != 0) {
    throw std::invalid_argument(name.ToString() + " has shape " + ShapeOf(fused) +
                                "; expected [out, r * E] with E = " + std::to_string(experts));
  }
  return {fused.data,
          fused.dtype,
          3,
          {experts, fused.shape[0], fused.shape[1] / experts},
          {fused.stride[1], fused.stride[0], experts * fused.stride[1]}};
}

/// Adapters as Python hands them over: `tensors` is (a, b, a, b, ...), and the n-th entry (adapter, field, scale, experts) of
/// `layout` says what the n-th pair is; experts: 0, or their number where both tensors are PEFT's matrices of all experts.
struct LoraArguments {
  /// A pair as it was given, and which pair of which adapter it is.
  struct Place {
    std::size_t adapter;
    const PairField* field;
    std::int64_t experts;
    TensorView a;
    TensorView b;

    ArgumentName AName() const { return {field->a_name, static_cast<std::int64_t>(adapter)}; }
    ArgumentName BName() const { return {field->b_name, static_cast<std::int64_t>(adapter)}; }
    /// Of the tensor or of its gradient; an undefined one stays undefined.
    TensorView SplitA(const TensorView& view) const { return Split(view) ? bindings::SplitA(view, experts, AName()) : view; }
    TensorView SplitB(const TensorView& view) const { return Split(view) ? bindings::SplitB(view, experts, BName()) : view; }
    bool Split(const TensorView& view) const { return experts != 0 && view.defined(); }
  };
  std::vector<moe::LoraAdapter> adapters;
  std::vector<Place> places;

  LoraArguments(const py::tuple& tensors, const py::tuple& layout) {
    if (tensors.size() != 2 * layout.size()) {
      throw std::invalid_argument("lora has " + std::to_string(tensors.size()) + " tensors for " +
                                  std::to_string(layout.size()) + " pairs; expected two for each");
    }
    places.reserve(layout.size());
    for (std::size_t n = 0; n < layout.size(); ++n) {
      const auto entry = py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(layout.ptr(), static_cast<Py_ssize_t>(n)));
      const auto adapter = entry[0].cast<std::size_t>();
      if (adapter >= adapters.size()) adapters.resize(adapter + 1);
      Place& place = places.emplace_back(
          Place{adapter, &kPairFields.at(entry[1].cast<std::size_t>()), entry[3].cast<std::int64_t>(), {}, {}});
      place.a = ViewOf(PyTuple_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(2 * n)), place.AName(), kActivationTypes);
      place.b = ViewOf(PyTuple_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(2 * n + 1)), place.BName(), kActivationTypes);
      adapters[adapter].*place.field->pair = {place.SplitA(place.a), place.SplitB(place.b), entry[2].cast<float>()};
    }
  }
};

/// Where the saved tensors lie in the one block that Python sees: the offset of each in bytes, and the size of the whole.
struct StateLayout {
  std::array<std::int64_t, 5> offsets;
  std::int64_t bytes;

  explicit StateLayout(const moe::SavedSizes& sizes) : bytes(0) {
    const auto size_of_low = static_cast<std::int64_t>(sizeof(BFloat16));
    const std::array<std::int64_t, 5> parts = {sizes.routing * static_cast<std::int64_t>(sizeof(std::int32_t)),
                                               sizes.gate * size_of_low, sizes.up * size_of_low,
                                               sizes.gate_up_low * size_of_low, sizes.down_low * size_of_low};
    for (std::size_t n = 0; n < parts.size(); ++n) {
      offsets[n] = bytes;
      bytes += (parts[n] + kAlignment - 1) / kAlignment * kAlignment;
    }
  }

  moe::SavedState At(void* data) const {
    auto* base = static_cast<std::byte*>(data);
    return {reinterpret_cast<std::int32_t*>(base + offsets[0]), reinterpret_cast<BFloat16*>(base + offsets[1]),
            reinterpret_cast<BFloat16*>(base + offsets[2]), reinterpret_cast<BFloat16*>(base + offsets[3]),
            reinterpret_cast<BFloat16*>(base + offsets[4])};
  }
};

/// True where T, H and k can be read off the arguments; otherwise the engine's own validation says what is wrong.
bool HasSlots(const TensorView& hidden, const TensorView& top_k) {
  return hidden.rank == 2 && top_k.rank == 2 && hidden.shape[0] == top_k.shape[0] &&
         (top_k.shape[1] == 0 || top_k.shape[0] <= std::numeric_limits<std::int32_t>::max() / top_k.shape[1]);
}

moe::LayerConfig ConfigOf(const std::string& weight_format, const TensorView& gate_up, const TensorView& down) {
  if (weight_format != "bf16") throw std::invalid_argument("weight_format is \"" + weight_format + "\"; expected \"bf16\"");
  if (gate_up.rank != 3 || down.rank != 3) {
    throw std::invalid_argument("gate_up_proj and down_proj have " + std::to_string(gate_up.rank) + " and " +
                                std::to_string(down.rank) + " dimensions; expected shapes [E, 2I, H] and [E, H, I]");
  }
  return {gate_up.shape[0], gate_up.shape[2], down.shape[2], moe::WeightFormat::kBFloat16};
}

class Layer {
 public:
  Layer(const std::string& weight_format, const py::object& gate_up_proj, const py::object& down_proj) {
    UsesTorch torch;
    const TensorView gate_up = ViewOf(gate_up_proj, {"gate_up_proj"}, kWeightTypes);
    const TensorView down = ViewOf(down_proj, {"down_proj"}, kWeightTypes);
    const moe::LayerConfig config = ConfigOf(weight_format, gate_up, down);
    torch.End();
    const Unlocked unlocked;
    layer_ = std::make_unique<moe::ExpertsLayer>(config, gate_up, down, threadpool::Pool::Default());
  }

  const moe::ExpertsLayer& layer() const { return *layer_; }
  int number() const { return number_; }

  py::tuple Forward(const py::object& hidden, const py::object& ids, const py::object& weights, const py::tuple& lora_tensors,
                    const py::tuple& lora_layout, bool save, const py::object& into) const {
    profiling::CallTimer timer(profiling::CallKind::kForward, number_);
    UsesTorch torch;
    moe::ForwardArgs args;
    args.hidden = ViewOf(hidden, {"hidden"}, kActivationTypes);
    args.ids = ViewOf(ids, {"top_k_ids"}, kIdTypes);
    args.weights = ViewOf(weights, {"top_k_weights"}, kActivationTypes);
    const LoraArguments lora(lora_tensors, lora_layout);
    args.lora = lora.adapters;
    OutputTensor out;
    OutputTensor state;
    moe::SavedState saved;
    if (HasSlots(args.hidden, args.ids)) {
      out = into.is_none() ? OutputTensor::Contiguous(args.hidden.dtype, args.hidden.shape[0], layer_->config().hidden_size)
                           : OutputTensor::Into(into, {"into"}, kActivationTypes);
      args.out = out.view();
      if (save) {
        const StateLayout layout(layer_->SavedStateSizes(args.ids.shape[0], args.ids.shape[1], args.lora));
        state = OutputTensor::Bytes(layout.bytes);
        saved = layout.At(state.data());
        args.saved = &saved;
      }
    }
    torch.End();
    {
      const Unlocked unlocked;
      timer.EngineBegins();
      layer_->Forward(args, threadpool::Pool::Default());
      timer.EngineEnds(args.hidden.shape[0], threadpool::Pool::Default().num_threads());
    }
    torch.Begin();
    return py::make_tuple(out.ToTorch(), state.ToTorch());
  }

  /// @param needs  for hidden, top_k_weights and each of lora_tensors: a truth value, or the tensor to write the gradient to
  py::tuple Backward(const py::object& state, const py::object& hidden, const py::object& weights,
                     const py::tuple& lora_tensors, const py::tuple& lora_layout, const py::object& d_out,
                     const py::tuple& needs) const {
    profiling::CallTimer timer(profiling::CallKind::kBackward, number_);
    UsesTorch torch;
    moe::BackwardArgs args;
    args.hidden = ViewOf(hidden, {"hidden"}, kActivationTypes);
    args.weights = ViewOf(weights, {"top_k_weights"}, kActivationTypes);
    args.d_out = ViewOf(d_out, {"d_out"}, kActivationTypes);
    const LoraArguments lora(lora_tensors, lora_layout);
    args.lora = lora.adapters;
    if (needs.size() != 2 + lora_tensors.size()) {
      throw std::invalid_argument("needs has " + std::to_string(needs.size()) + " values; expected " +
                                  std::to_string(2 + lora_tensors.size()));
    }
    const auto gradient = [&needs](std::size_t n, const TensorView& like) {
      const py::handle need = PyTuple_GET_ITEM(needs.ptr(), static_cast<Py_ssize_t>(n));
      if (need.ptr() == Py_False) return OutputTensor();
      return need.ptr() == Py_True ? OutputTensor::Like(like) : OutputTensor::Into(need, {"needs"}, kActivationTypes);
    };

    moe::SavedState saved;
    OutputTensor aligned_state;
    if (HasSlots(args.hidden, args.weights)) {
      const StateLayout layout(layer_->SavedStateSizes(args.weights.shape[0], args.weights.shape[1], args.lora));
      void* data = BytesOf(state, {"saved.state"}, layout.bytes);
      if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) {
        // A hook for saved tensors may have put it anywhere; the kernels want it aligned.
        aligned_state = OutputTensor::Bytes(layout.bytes);
        data = std::memcpy(aligned_state.data(), data, static_cast<std::size_t>(layout.bytes));
      }
      saved = layout.At(data);
      args.saved = &saved;
    }

    OutputTensor d_hidden;
    OutputTensor d_weights;
    std::vector<OutputTensor> d_lora(lora_tensors.size());
    std::vector<moe::LoraAdapterGrad> d_adapters(lora.adapters.size());
    args.d_hidden = (d_hidden = gradient(0, args.hidden)).view();
    args.d_weights = (d_weights = gradient(1, args.weights)).view();
    for (std::size_t n = 0; n < lora.places.size(); ++n) {
      const LoraArguments::Place& place = lora.places[n];
      moe::LoraPairGrad& grad = d_adapters[place.adapter].*place.field->grad;
      grad.a = place.SplitA((d_lora[2 * n] = gradient(2 + 2 * n, place.a)).view());
      grad.b = place.SplitB((d_lora[2 * n + 1] = gradient(3 + 2 * n, place.b)).view());
    }
    args.d_lora = d_adapters;
    torch.End();
    {
      const Unlocked unlocked;
      timer.EngineBegins();
      layer_->Backward(args, threadpool::Pool::Default());
      timer.EngineEnds(args.hidden.shape[0], threadpool::Pool::Default().num_threads());
    }
    torch.Begin();
    py::tuple d_tensors(d_lora.size());
    for (std::size_t n = 0; n < d_lora.size(); ++n) d_tensors[n] = d_lora[n].ToTorch();
    return py::make_tuple(d_hidden.ToTorch(), d_weights.ToTorch(), d_tensors);
  }

  void Unpack(const py::object& gate_up_proj, const py::object& down_proj) const {
    UsesTorch torch;
    const TensorView gate_up = ViewOf(gate_up_proj, {"gate_up_proj"}, kWeightTypes);
    const TensorView down = ViewOf(down_proj, {"down_proj"}, kWeightTypes);
    torch.End();
    const Unlocked unlocked;
    layer_->Unpack(gate_up, down, threadpool::Pool::Default());
  }

 private:
  std::unique_ptr<moe::ExpertsLayer> layer_;
  int number_ = [] {  // the layer's name in profiles: how many were made before it
    static std::atomic<int> made{0};
    return made.fetch_add(1, std::memory_order_relaxed);
  }();
};

}  // namespace

void BindLayer(py::module_& module) {
  using py::arg;
  py::class_<Layer>(module, "Layer")
      .def(py::init<const std::string&, const py::object&, const py::object&>(), arg("weight_format"), arg("gate_up_proj"),
           arg("down_proj"))
      .def_property_readonly("num_experts", [](const Layer& self) { return self.layer().config().num_experts; })
      .def_property_readonly("hidden_size", [](const Layer& self) { return self.layer().config().hidden_size; })
      .def_property_readonly("intermediate_size", [](const Layer& self) { return self.layer().config().intermediate_size; })
      .def_property_readonly("number", &Layer::number)
      .def_property_readonly("weight_bytes", [](const Layer& self) { return self.layer().weight_bytes(); })
      .def_property_readonly("shards",
                             [](const Layer& self) {
                               py::list rows;
                               for (const moe::Shard& shard : self.layer().shards()) {
                                 rows.append(py::make_tuple(shard.node, shard.begin, shard.size));
                               }
                               return rows;
                             })
      .def("forward", &Layer::Forward, arg("hidden"), arg("top_k_ids"), arg("top_k_weights"), arg("lora_tensors"),
           arg("lora_layout"), arg("save"), arg("into") = py::none())
      .def("backward", &Layer::Backward, arg("state"), arg("hidden"), arg("top_k_weights"), arg("lora_tensors"),
           arg("lora_layout"), arg("d_out"), arg("needs"))
      .def("unpack", &Layer::Unpack, arg("gate_up_proj"), arg("down_proj"));
}

}  // namespace moesaic::bindings
