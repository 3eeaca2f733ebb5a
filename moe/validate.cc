#include "moe/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tensor_text.h"

namespace moesaic::moe {
namespace {

constexpr std::initializer_list<DType> kActivationTypes = {DType::kBFloat16, DType::kFloat32};
constexpr std::initializer_list<DType> kWeightTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr std::initializer_list<DType> kIdTypes = {DType::kInt32, DType::kInt64};

/// Builds a message piece by piece and throws it.
template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

/// One dimension that is expected: a size, or -1 for any, with the letter that stands for it in messages.
struct Dim {
  std::int64_t size;
  const char* letter;
};

std::string Describe(std::initializer_list<Dim> dims) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const Dim& dim : dims) {
    text << separator << dim.letter;
    if (dim.size >= 0) text << " = " << dim.size;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

/// Checks rank, shape, type and that there is memory behind the view.
void CheckTensor(const std::string& name, const TensorView& view, std::initializer_list<Dim> dims,
                 std::initializer_list<DType> types) {
  if (!view.defined()) Fail(name, " is missing; expected shape ", Describe(dims));
  if (view.rank < 0 || view.rank > 3) Fail(name, " has ", view.rank, " dimensions; expected shape ", Describe(dims));
  bool matches = view.rank == static_cast<int>(dims.size());
  bool empty = false;
  for (std::size_t d = 0; matches && d < dims.size(); ++d) {
    const std::int64_t expected = (dims.begin() + d)->size;
    matches = view.shape[d] >= 0 && (expected < 0 || view.shape[d] == expected);
    empty |= view.shape[d] == 0;
  }
  if (!matches) Fail(name, " has shape ", ShapeText(view), "; expected ", Describe(dims));
  if (std::find(types.begin(), types.end(), view.dtype) == types.end()) {
    std::string expected;
    for (const DType type : types) expected += (expected.empty() ? "" : " or ") + std::string(NameOf(type));
    Fail(name, " is ", NameOf(view.dtype), "; expected ", expected);
  }
  if (!empty && view.data == nullptr) Fail(name, " has shape ", ShapeText(view), " but its data is null");
}

/// Whether no two elements share memory: along each dimension, in the order of the strides, one step leads past all that the
/// dimensions before it reach. What lies otherwise without an overlap (interlaced rows of odd lengths) nobody has.
bool IsDistinct(const TensorView& view) {
  std::array<int, 3> dims = {0, 1, 2};
  const auto stride = [&view](int d) { return std::abs(view.stride[static_cast<std::size_t>(d)]); };
  for (int n = 1; n < view.rank; ++n) {
    for (int m = n; m > 0 && stride(dims[m]) < stride(dims[m - 1]); --m) std::swap(dims[m], dims[m - 1]);
  }
  std::int64_t reach = 0;
  for (int n = 0; n < view.rank; ++n) {
    const std::int64_t steps = view.shape[static_cast<std::size_t>(dims[n])] - 1;
    if (steps < 0) return true;
    if (steps == 0) continue;
    if (stride(dims[n]) <= reach) return false;
    std::int64_t steps_reach = 0;
    if (__builtin_mul_overflow(steps, stride(dims[n]), &steps_reach) || __builtin_add_overflow(reach, steps_reach, &reach)) {
      return false;
    }
  }
  return true;
}

/// As CheckTensor, for a view that is written: elements that share memory would be written by several threads.
void CheckOutput(const std::string& name, const TensorView& view, std::initializer_list<Dim> dims,
                 std::initializer_list<DType> types) {
  CheckTensor(name, view, dims, types);
  for (std::size_t d = 0; d < static_cast<std::size_t>(view.rank); ++d) {
    if (view.stride[d] == 0 && view.shape[d] > 1) {
      Fail(name, " is written and has stride 0 along dimension ", d, " of size ", view.shape[d],
           "; expected distinct elements");
    }
  }
  if (!IsDistinct(view)) Fail(name, " is written and has overlapping elements; expected distinct ones");
}

void CheckPair(const std::string& name, const LoraPair& pair, std::int64_t experts, std::int64_t in, std::int64_t out) {
  if (!pair.a.defined() && !pair.b.defined()) return;
  CheckTensor(name + ".a", pair.a, {{experts, "E"}, {-1, "r"}, {in, "in"}}, kActivationTypes);
  const std::int64_t rank = pair.a.shape[1];
  if (rank < 1) Fail(name, ".a has rank ", rank, "; expected r >= 1");
  CheckTensor(name + ".b", pair.b, {{experts, "E"}, {out, "out"}, {rank, "r"}}, kActivationTypes);
  if (!std::isfinite(pair.scale)) Fail(name, ".scale is ", pair.scale, "; expected a finite number");
}

void CheckLora(const LayerConfig& c, std::span<const LoraAdapter> lora) {
  for (std::size_t n = 0; n < lora.size(); ++n) {
    const std::string name = "lora[" + std::to_string(n) + "]";
    CheckPair(name + ".gate_up", lora[n].gate_up, c.num_experts, c.hidden_size, 2 * c.intermediate_size);
    CheckPair(name + ".gate", lora[n].gate, c.num_experts, c.hidden_size, c.intermediate_size);
    CheckPair(name + ".up", lora[n].up, c.num_experts, c.hidden_size, c.intermediate_size);
    CheckPair(name + ".down", lora[n].down, c.num_experts, c.intermediate_size, c.hidden_size);
  }
}

/// A gradient has the shape of its tensor, and there is none for a pair that is not there.
void CheckGrad(const std::string& name, const TensorView& grad, const TensorView& tensor) {
  if (!grad.defined()) return;
  if (!tensor.defined()) Fail(name, " is given; expected none, because the pair itself is missing");
  CheckOutput(name, grad, {{tensor.shape[0], "E"}, {tensor.shape[1], "rows"}, {tensor.shape[2], "columns"}}, kActivationTypes);
}

void CheckPairGrad(const std::string& name, const LoraPairGrad& grad, const LoraPair& pair) {
  CheckGrad(name + ".a", grad.a, pair.a);
  CheckGrad(name + ".b", grad.b, pair.b);
}

/// k as `name` has it. Slots are numbered in int32.
void CheckSlots(const char* name, std::int64_t tokens, std::int64_t top_k) {
  if (top_k < 1) Fail(name, " has k = ", top_k, "; expected k >= 1");
  if (tokens > std::numeric_limits<std::int32_t>::max() / top_k) {
    Fail("hidden and ", name, " have T = ", tokens, " and k = ", top_k, "; expected T * k < 2^31");
  }
}

/// Null pointers where the saved state has elements.
void CheckSaved(const SavedState& saved, std::int64_t slots, std::span<const LoraAdapter> lora) {
  bool gate_up_lora = false;
  bool down_lora = false;
  for (const LoraAdapter& adapter : lora) {
    gate_up_lora |= adapter.gate_up.defined() || adapter.gate.defined() || adapter.up.defined();
    down_lora |= adapter.down.defined();
  }
  const auto check = [](const char* name, const void* data, bool needed) {
    if (needed && data == nullptr) Fail("saved.", name, " is null; expected memory of SavedStateSizes().", name, " elements");
  };
  check("routing", saved.routing, true);
  check("gate", saved.gate, slots > 0);
  check("up", saved.up, slots > 0);
  check("gate_up_low", saved.gate_up_low, slots > 0 && gate_up_lora);
  check("down_low", saved.down_low, slots > 0 && down_lora);
}

void CheckRouting(const std::int32_t* routing, std::int64_t experts, std::int64_t slots) {
  std::int64_t previous = 0;
  for (std::int64_t e = 0; e <= experts; ++e) {
    if (routing[e] < previous || routing[e] > slots || (e == 0 && routing[e] != 0)) {
      Fail("saved.routing[", e, "] is ", routing[e], "; expected offsets rising from 0 to at most T * k = ", slots,
           ": the saved state belongs to another batch");
    }
    previous = routing[e];
  }
  std::vector<bool> seen(static_cast<std::size_t>(slots));
  for (std::int64_t i = 0; i < previous; ++i) {
    const std::int32_t slot = routing[experts + 1 + i];
    if (slot < 0 || slot >= slots) {
      Fail("saved.routing[", experts + 1 + i, "] is ", slot, "; expected a slot below T * k = ", slots,
           ": the saved state belongs to another batch");
    }
    if (seen[static_cast<std::size_t>(slot)]) {  // two threads would write its gradient
      Fail("saved.routing[", experts + 1 + i, "] is ", slot, ", as an entry before it; expected each slot once",
           ": the saved state belongs to another batch");
    }
    seen[static_cast<std::size_t>(slot)] = true;
  }
}

}  // namespace

void ValidateConfig(const LayerConfig& config) {
  if (config.num_experts < 1) Fail("num_experts is ", config.num_experts, "; expected at least 1");
  if (config.hidden_size < 1) Fail("hidden_size is ", config.hidden_size, "; expected at least 1");
  if (config.intermediate_size < 1) Fail("intermediate_size is ", config.intermediate_size, "; expected at least 1");
  if (config.activation != Gate::kSilu && config.activation != Gate::kGeluTanh) {
    Fail("activation is ", static_cast<int>(config.activation), "; expected one of Gate");
  }
}

void ValidateWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down) {
  ValidateConfig(config);
  const std::int64_t experts = config.num_experts, hidden = config.hidden_size, intermediate = config.intermediate_size;
  CheckTensor("gate_up_proj", gate_up, {{experts, "E"}, {2 * intermediate, "2I"}, {hidden, "H"}}, kWeightTypes);
  CheckTensor("down_proj", down, {{experts, "E"}, {hidden, "H"}, {intermediate, "I"}}, kWeightTypes);
}

void ValidateUnpack(const LayerConfig& config, const TensorView& gate_up, const TensorView& down) {
  const std::int64_t experts = config.num_experts, hidden = config.hidden_size, intermediate = config.intermediate_size;
  CheckOutput("gate_up_proj", gate_up, {{experts, "E"}, {2 * intermediate, "2I"}, {hidden, "H"}}, kWeightTypes);
  CheckOutput("down_proj", down, {{experts, "E"}, {hidden, "H"}, {intermediate, "I"}}, kWeightTypes);
}

void ValidateForward(const LayerConfig& config, const ForwardArgs& args) {
  CheckTensor("hidden", args.hidden, {{-1, "T"}, {config.hidden_size, "H"}}, kActivationTypes);
  const std::int64_t tokens = args.hidden.shape[0];
  CheckTensor("top_k_ids", args.ids, {{tokens, "T"}, {-1, "k"}}, kIdTypes);
  const std::int64_t top_k = args.ids.shape[1];
  CheckSlots("top_k_ids", tokens, top_k);
  CheckTensor("top_k_weights", args.weights, {{tokens, "T"}, {top_k, "k"}}, kActivationTypes);
  CheckLora(config, args.lora);
  CheckOutput("out", args.out, {{tokens, "T"}, {config.hidden_size, "H"}}, kActivationTypes);
  if (args.saved != nullptr) CheckSaved(*args.saved, tokens * top_k, args.lora);
  ForEachInt(args.ids, [&](std::int64_t t, std::int64_t j, std::int64_t id) {
    if (id < -1 || id > config.num_experts) {
      Fail("top_k_ids[", t, ", ", j, "] is ", id, "; expected -1 or 0..", config.num_experts);
    }
  });
}

void ValidateBackward(const LayerConfig& config, const BackwardArgs& args) {
  CheckTensor("hidden", args.hidden, {{-1, "T"}, {config.hidden_size, "H"}}, kActivationTypes);
  const std::int64_t tokens = args.hidden.shape[0];
  CheckTensor("top_k_weights", args.weights, {{tokens, "T"}, {-1, "k"}}, kActivationTypes);
  const std::int64_t top_k = args.weights.shape[1];
  CheckSlots("top_k_weights", tokens, top_k);
  CheckLora(config, args.lora);
  CheckTensor("d_out", args.d_out, {{tokens, "T"}, {config.hidden_size, "H"}}, kActivationTypes);
  if (args.d_hidden.defined()) {
    CheckOutput("d_hidden", args.d_hidden, {{tokens, "T"}, {config.hidden_size, "H"}}, kActivationTypes);
  }
  if (args.d_weights.defined()) {
    CheckOutput("d_top_k_weights", args.d_weights, {{tokens, "T"}, {top_k, "k"}}, kActivationTypes);
  }
  if (!args.d_lora.empty() && args.d_lora.size() != args.lora.size()) {
    Fail("d_lora has ", args.d_lora.size(), " adapters; expected none or ", args.lora.size(), ", one for each of lora");
  }
  for (std::size_t n = 0; n < args.d_lora.size(); ++n) {
    const std::string name = "d_lora[" + std::to_string(n) + "]";
    CheckPairGrad(name + ".gate_up", args.d_lora[n].gate_up, args.lora[n].gate_up);
    CheckPairGrad(name + ".gate", args.d_lora[n].gate, args.lora[n].gate);
    CheckPairGrad(name + ".up", args.d_lora[n].up, args.lora[n].up);
    CheckPairGrad(name + ".down", args.d_lora[n].down, args.lora[n].down);
  }
  if (args.saved == nullptr) Fail("saved is missing; expected the state that Forward filled");
  CheckSaved(*args.saved, tokens * top_k, args.lora);
  CheckRouting(args.saved->routing, config.num_experts, tokens * top_k);
}

}  // namespace moesaic::moe
