// Random experts layers for the tests: shapes, adapters and routing from a spec, all memory owned here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "moe/layer.h"
#include "moe/reference.h"

namespace moesaic::moe {

/// A tensor that owns its memory. Fresh memory holds NaN in every floating-point type, so that an element which nobody writes
/// shows.
class Tensor {
 public:
  Tensor() = default;
  /// Contiguous.
  Tensor(DType dtype, const std::vector<std::int64_t>& shape);
  /// Strides in elements; together they must address exactly the product of the shape.
  Tensor(DType dtype, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& stride);
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  const TensorView& view() const { return view_; }
  /// The same shape, type and strides, filled with NaN.
  Tensor Like() const;
  bool operator==(const Tensor& other) const { return bytes_ == other.bytes_; }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

enum class Routing { kUniform, kSkewed, kOneExpert };

/// Ranks of one adapter's pairs; 0: the pair is not there.
struct AdapterSpec {
  std::int64_t gate_up = 0;
  std::int64_t gate = 0;
  std::int64_t up = 0;
  std::int64_t down = 0;
  float scale = 2.0f;
  DType dtype = DType::kFloat32;
  bool peft_strides = false;  ///< B as a view [E, out, r] of memory [out, r * E]
};

struct ProblemSpec {
  std::int64_t tokens = 0;
  std::int64_t experts = 1;
  std::int64_t top_k = 1;
  std::int64_t hidden = 1;
  std::int64_t intermediate = 1;
  std::vector<AdapterSpec> adapters;
  Routing routing = Routing::kUniform;
  double skipped = 0.0;     ///< share of the slots that get -1 or E
  bool duplicates = false;  ///< the slots of a token may name an expert twice
  DType activations = DType::kFloat32;
  DType ids = DType::kInt64;
  Gate activation = Gate::kSilu;
  std::uint64_t seed = 1;
};

/// For messages: "T 3 E 4 k 2 ...".
std::string Describe(const ProblemSpec& spec);

/// The four pairs of an adapter, in the order gate_up, gate, up, down; undefined where the spec has rank 0.
struct PairTensors {
  Tensor a;
  Tensor b;
};
using AdapterTensors = std::array<PairTensors, 4>;

inline constexpr std::array<const char*, 4> kPairNames = {"gate_up", "gate", "up", "down"};
inline constexpr std::array<LoraPair LoraAdapter::*, 4> kPairs = {&LoraAdapter::gate_up, &LoraAdapter::gate, &LoraAdapter::up,
                                                                  &LoraAdapter::down};
inline constexpr std::array<LoraPairGrad LoraAdapterGrad::*, 4> kPairGrads = {&LoraAdapterGrad::gate_up, &LoraAdapterGrad::gate,
                                                                              &LoraAdapterGrad::up, &LoraAdapterGrad::down};
inline constexpr std::array<ReferencePairGrad ReferenceAdapterGrad::*, 4> kReferencePairs = {
    &ReferenceAdapterGrad::gate_up, &ReferenceAdapterGrad::gate, &ReferenceAdapterGrad::up, &ReferenceAdapterGrad::down};

/// Inputs of a layer. Every value but the routing weights is representable in bf16, whatever its type.
struct Problem {
  explicit Problem(const ProblemSpec& spec);

  LayerConfig config() const { return {spec.experts, spec.hidden, spec.intermediate, spec.activation}; }
  ReferenceWeights weights() const { return {gate_up.view(), down.view(), spec.activation}; }
  ReferenceInputs inputs() const { return {hidden.view(), ids.view(), top_k_weights.view(), lora}; }

  ProblemSpec spec;
  Tensor gate_up;        // [E, 2I, H]
  Tensor down;           // [E, H, I]
  Tensor hidden;         // [T, H]
  Tensor ids;            // [T, k]
  Tensor top_k_weights;  // [T, k]
  Tensor d_out;          // [T, H]
  std::vector<AdapterTensors> adapters;
  std::vector<LoraAdapter> lora;  // views of `adapters`

 private:
  void FillIds(std::mt19937_64& random);
};

/// Memory for what Forward saves, of exactly the sizes that the layer asks for.
struct Saved {
  Saved(const ExpertsLayer& layer, const Problem& problem);

  std::vector<std::int32_t> routing;
  std::vector<BFloat16> gate, up, gate_up_low, down_low;
  SavedState state;
};

struct Gradients {
  Tensor hidden;
  Tensor top_k_weights;
  std::vector<AdapterTensors> lora;
};

/// One call each, on fresh memory. Gradients have the types and strides of their tensors.
Tensor RunForward(const ExpertsLayer& layer, const Problem& problem, threadpool::Pool& pool, const Saved* saved = nullptr);
Gradients RunBackward(const ExpertsLayer& layer, const Problem& problem, threadpool::Pool& pool, const Saved& saved);

/// Every bit the same.
bool Equal(const Gradients& a, const Gradients& b);

/// |tensor - reference| / |reference| (L2); 0 where both are all zero, NaN where the tensor holds one.
double RelativeError(const TensorView& tensor, const Matrix& reference);
double RelativeError(const TensorView& tensor, const std::vector<Matrix>& reference);

}  // namespace moesaic::moe
