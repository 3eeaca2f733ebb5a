#include "bindings/layer_module.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arena.h"
#include "bindings/interpreter_end.h"
#include "bindings/tensor.h"
#include "cpu_kernels/tensor_text.h"
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

/// PEFT's A of all experts, [E * r, in] with row e * r + k, as [E, r, in].
TensorView SplitA(const TensorView& fused, std::int64_t experts, const ArgumentName& name) {
  if (fused.rank != 2 || fused.shape[0] % experts != 0) {
    throw std::invalid_argument(name.ToString() + " has shape " + ShapeText(fused) +
                                "; expected [E * r, in] with E = " + std::to_string(experts));
  }
  const std::int64_t rank = fused.shape[0] / experts;
  return {
      fused.data, fused.dtype, 3, {experts, rank, fused.shape[1]}, {rank * fused.stride[0], fused.stride[0], fused.stride[1]}};
}

/// PEFT's B of all experts, [out, r * E] with column k * E + e, as [E, out, r].
TensorView SplitB(const TensorView& fused, std::int64_t experts, const ArgumentName& name) {
  if (fused.rank != 2 || fused.shape[1] % experts != 0) {
    throw std::invalid_argument(name.ToString() + " has shape " + ShapeText(fused) +
                                "; expected [out, r * E] with E = " + std::to_string(experts));
  }
  return {fused.data,
          fused.dtype,
          3,
          {experts, fused.shape[0], fused.shape[1] / experts},
          {fused.stride[1], fused.stride[0], experts * fused.stride[1]}};
}

/// Refuses one of PEFT's two matrices where nothing says of how many experts they are. Other wrong shapes are the engine's to
/// name.
void ExpectOneOfEachExpert(const TensorView& tensor, const ArgumentName& name, const char* expected) {
  if (tensor.rank != 2) return;
  throw std::invalid_argument(name.ToString() + " has shape " + ShapeText(tensor) + " and its pair has no experts=; expected " +
                              expected);
}

/// Adapters as Python hands them over: `tensors` is (a, b, a, b, ...) from `begin` on, and the n-th entry (adapter, field,
/// scale, experts) of `layout` says what the n-th pair is; experts: 0, or their number where both tensors are PEFT's matrices
/// of all experts.
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

  LoraArguments(const py::tuple& tensors, std::size_t begin, const py::tuple& layout) {
    if (tensors.size() != begin + 2 * layout.size()) {
      throw std::invalid_argument("lora has " + std::to_string(tensors.size() - begin) + " tensors for " +
                                  std::to_string(layout.size()) + " pairs; expected two for each");
    }
    places.reserve(layout.size());
    for (std::size_t n = 0; n < layout.size(); ++n) {
      const auto entry = py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(layout.ptr(), static_cast<Py_ssize_t>(n)));
      const auto adapter = entry[0].cast<std::size_t>();
      if (adapter >= adapters.size()) adapters.resize(adapter + 1);
      Place& place = places.emplace_back(
          Place{adapter, &kPairFields.at(entry[1].cast<std::size_t>()), entry[3].cast<std::int64_t>(), {}, {}});
      const auto at = static_cast<Py_ssize_t>(begin + 2 * n);
      place.a = ViewOf(PyTuple_GET_ITEM(tensors.ptr(), at), place.AName(), kActivationTypes);
      place.b = ViewOf(PyTuple_GET_ITEM(tensors.ptr(), at + 1), place.BName(), kActivationTypes);
      if (place.experts == 0) {
        ExpectOneOfEachExpert(place.a, place.AName(), "[E, r, in], or [E * r, in] with experts=E");
        ExpectOneOfEachExpert(place.b, place.BName(), "[E, out, r], or [out, r * E] with experts=E");
      }
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

Gate GateOf(const std::string& activation) {
  if (activation == "silu") return Gate::kSilu;
  if (activation == "gelu_tanh") return Gate::kGeluTanh;
  throw std::invalid_argument("activation is \"" + activation + "\"; expected \"silu\" or \"gelu_tanh\"");
}

moe::LayerConfig ConfigOf(const std::string& weight_format, const TensorView& gate_up, const TensorView& down,
                          const std::string& activation) {
  if (weight_format != "bf16") throw std::invalid_argument("weight_format is \"" + weight_format + "\"; expected \"bf16\"");
  if (gate_up.rank != 3 || down.rank != 3) {
    throw std::invalid_argument("gate_up_proj and down_proj have " + std::to_string(gate_up.rank) + " and " +
                                std::to_string(down.rank) + " dimensions; expected shapes [E, 2I, H] and [E, H, I]");
  }
  return {gate_up.shape[0], gate_up.shape[2], down.shape[2], GateOf(activation)};
}

/// A forward whose arguments are read and whose results are torch tensors already; Run() has the engine fill them.
///
/// Why in two parts: after a pass over the weights no cache holds anything of Python's or PyTorch's. What is done before the
/// engine begins finds there what was used just before; the same behind it takes two to four times as long.
class ForwardCall {
 public:
  /// Reads the arguments. Throws what is wrong with them as far as it is known without their values.
  ForwardCall(std::shared_ptr<const moe::ExpertsLayer> layer, int number, const py::object& hidden, const py::object& ids,
              const py::object& weights, const py::tuple& lora_tensors, const py::tuple& lora_layout, bool save,
              const py::object& into)
      : timer_(std::in_place, profiling::CallKind::kForward, number),
        layer_(std::move(layer)),
        inputs_{hidden, ids, weights, lora_tensors} {
    UsesTorch torch;
    args_.hidden = ViewOf(hidden, {"hidden"}, kActivationTypes);
    args_.ids = ViewOf(ids, {"top_k_ids"}, kIdTypes);
    args_.weights = ViewOf(weights, {"top_k_weights"}, kActivationTypes);
    lora_.emplace(lora_tensors, 0, lora_layout);
    args_.lora = lora_->adapters;
    if (!HasSlots(args_.hidden, args_.ids)) {
      torch.End();
      Run();  // the engine's validation says what is wrong
      return;
    }
    OutputTensor out = into.is_none()
                           ? OutputTensor::Contiguous(args_.hidden.dtype, args_.hidden.shape[0], layer_->config().hidden_size)
                           : OutputTensor::Into(into, {"into"}, kActivationTypes);
    args_.out = out.view();
    OutputTensor state;
    if (save) {
      const StateLayout layout(layer_->SavedStateSizes(args_.ids.shape[0], args_.ids.shape[1], args_.lora));
      state = OutputTensor::Bytes(layout.bytes);
      saved_ = layout.At(state.data());
      args_.saved = &saved_;
    }
    out_ = out.ToTorch();
    state_ = state.ToTorch();
  }
  ForwardCall(const ForwardCall&) = delete;
  ForwardCall& operator=(const ForwardCall&) = delete;

  const py::object& out() const { return out_; }
  /// None where nothing is saved.
  const py::object& state() const { return state_; }

  /// Once, on the thread that made this object.
  void Run() {
    if (!timer_.has_value()) throw std::logic_error("this forward has run already");
    {
      const py::gil_scoped_release unlocked;
      timer_->EngineBegins();
      layer_->Forward(args_, threadpool::Pool::Default());
      timer_->EngineEnds(args_.hidden.shape[0], threadpool::Pool::Default().num_threads());
    }
    timer_.reset();
    const UsesTorch still_there;  // or the thread ends here
  }

 private:
  std::optional<profiling::CallTimer> timer_;
  std::shared_ptr<const moe::ExpertsLayer> layer_;
  std::array<py::object, 4> inputs_;  // held: args_ points to their memory, as to that of the results
  std::optional<LoraArguments> lora_;
  moe::ForwardArgs args_;
  moe::SavedState saved_;
  py::object out_;
  py::object state_;
};

class Layer {
 public:
  Layer(const std::string& weight_format, const py::object& gate_up_proj, const py::object& down_proj,
        const std::string& activation) {
    UsesTorch torch;
    const TensorView gate_up = ViewOf(gate_up_proj, {"gate_up_proj"}, kWeightTypes);
    const TensorView down = ViewOf(down_proj, {"down_proj"}, kWeightTypes);
    const moe::LayerConfig config = ConfigOf(weight_format, gate_up, down, activation);
    torch.End();
    const py::gil_scoped_release unlocked;
    layer_ = std::make_shared<moe::ExpertsLayer>(config, gate_up, down, threadpool::Pool::Default());
  }

  const moe::ExpertsLayer& layer() const { return *layer_; }
  int number() const { return number_; }

  py::tuple PrepareForward(const py::object& hidden, const py::object& ids, const py::object& weights,
                           const py::tuple& lora_tensors, const py::tuple& lora_layout, bool save,
                           const py::object& into) const {
    auto call = std::make_unique<ForwardCall>(layer_, number_, hidden, ids, weights, lora_tensors, lora_layout, save, into);
    py::object out = call->out();
    py::object state = call->state();
    return py::make_tuple(std::move(out), std::move(state), std::move(call));
  }

  /// @param saved_tensors  (state, hidden, top_k_weights, LoRA tensors)
  /// @param needs  its last values are for all of those but the state: a truth value, or the tensor to write the gradient to
  /// @return one value for each of `needs`, None for the first ones
  py::tuple Backward(const py::tuple& saved_tensors, const py::tuple& lora_layout, const py::object& d_out,
                     const py::tuple& needs) const {
    profiling::CallTimer timer(profiling::CallKind::kBackward, number_);
    UsesTorch torch;
    if (saved_tensors.size() < 3 || needs.size() + 1 < saved_tensors.size()) {
      throw std::invalid_argument("saved_tensors has " + std::to_string(saved_tensors.size()) + " values and needs " +
                                  std::to_string(needs.size()) + "; expected three or more, and at most one less");
    }
    const std::size_t first = needs.size() + 1 - saved_tensors.size();
    const auto saved_tensor = [&saved_tensors](std::size_t n) {
      return py::handle(PyTuple_GET_ITEM(saved_tensors.ptr(), static_cast<Py_ssize_t>(n)));
    };
    moe::BackwardArgs args;
    args.hidden = ViewOf(saved_tensor(1), {"hidden"}, kActivationTypes);
    args.weights = ViewOf(saved_tensor(2), {"top_k_weights"}, kActivationTypes);
    args.d_out = ViewOf(d_out, {"d_out"}, kActivationTypes);
    const LoraArguments lora(saved_tensors, 3, lora_layout);
    args.lora = lora.adapters;

    moe::SavedState saved;
    OutputTensor aligned_state;
    if (HasSlots(args.hidden, args.weights)) {
      const StateLayout layout(layer_->SavedStateSizes(args.weights.shape[0], args.weights.shape[1], args.lora));
      void* data = BytesOf(saved_tensor(0), {"saved.state"}, layout.bytes);
      if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) {
        // A hook for saved tensors may have put it anywhere; the kernels want it aligned.
        aligned_state = OutputTensor::Bytes(layout.bytes);
        data = std::memcpy(aligned_state.data(), data, static_cast<std::size_t>(layout.bytes));
      }
      saved = layout.At(data);
      args.saved = &saved;
    }

    py::tuple grads(needs.size());  // before the engine runs: see ForwardCall
    for (std::size_t n = 0; n < first; ++n) grads[n] = py::none();
    const auto gradient = [&](std::size_t place, const TensorView& like) -> TensorView {
      const std::size_t n = first + place;
      const py::handle need = PyTuple_GET_ITEM(needs.ptr(), static_cast<Py_ssize_t>(n));
      OutputTensor output;
      if (need.ptr() == Py_True) output = OutputTensor::Like(like);
      if (need.ptr() != Py_True && need.ptr() != Py_False) output = OutputTensor::Into(need, {"needs"}, kActivationTypes);
      const TensorView view = output.view();
      grads[n] = output.ToTorch();
      return view;
    };
    std::vector<moe::LoraAdapterGrad> d_adapters(lora.adapters.size());
    args.d_hidden = gradient(0, args.hidden);
    args.d_weights = gradient(1, args.weights);
    for (std::size_t n = 0; n < lora.places.size(); ++n) {
      const LoraArguments::Place& place = lora.places[n];
      moe::LoraPairGrad& grad = d_adapters[place.adapter].*place.field->grad;
      grad.a = place.SplitA(gradient(2 + 2 * n, place.a));
      grad.b = place.SplitB(gradient(3 + 2 * n, place.b));
    }
    args.d_lora = d_adapters;
    torch.End();
    {
      const py::gil_scoped_release unlocked;
      timer.EngineBegins();
      layer_->Backward(args, threadpool::Pool::Default());
      timer.EngineEnds(args.hidden.shape[0], threadpool::Pool::Default().num_threads());
    }
    torch.Begin();  // or the thread ends here
    return grads;
  }

  void Unpack(const py::object& gate_up_proj, const py::object& down_proj) const {
    UsesTorch torch;
    const TensorView gate_up = ViewOf(gate_up_proj, {"gate_up_proj"}, kWeightTypes);
    const TensorView down = ViewOf(down_proj, {"down_proj"}, kWeightTypes);
    torch.End();
    const py::gil_scoped_release unlocked;
    layer_->Unpack(gate_up, down, threadpool::Pool::Default());
  }

 private:
  std::shared_ptr<moe::ExpertsLayer> layer_;
  int number_ = [] {  // the layer's name in profiles: how many were made before it
    static std::atomic<int> made{0};
    return made.fetch_add(1, std::memory_order_relaxed);
  }();
};

}  // namespace

void BindLayer(py::module_& module) {
  using py::arg;
  py::class_<ForwardCall>(module, "ForwardCall").def("run", &ForwardCall::Run);
  py::class_<Layer>(module, "Layer")
      .def(py::init<const std::string&, const py::object&, const py::object&, const std::string&>(), arg("weight_format"),
           arg("gate_up_proj"), arg("down_proj"), arg("activation"))
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
      .def("prepare_forward", &Layer::PrepareForward, arg("hidden"), arg("top_k_ids"), arg("top_k_weights"),
           arg("lora_tensors"), arg("lora_layout"), arg("save"), arg("into") = py::none())
      .def("backward", &Layer::Backward, arg("saved_tensors"), arg("lora_layout"), arg("d_out"), arg("needs"))
      .def("unpack", &Layer::Unpack, arg("gate_up_proj"), arg("down_proj"));
}

}  // namespace moesaic::bindings
