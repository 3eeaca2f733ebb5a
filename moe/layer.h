// The experts of one mixture-of-experts layer: frozen base weights, packed once, and forward and backward over them.
//
// Forward, for each token t and each of its k slots j with expert e = ids[t, j] (0 <= e < E; anything equal to -1 or E is
// skipped) and routing weight w = weights[t, j]:
//
//   G = x W_g^T + s U_g B_g^T,  U_g = x A_g^T      U = x W_u^T + s U_u B_u^T,  U_u = x A_u^T
//   Z = f(G) * U, f = silu or another of gate.h
//   Y = Z W_d^T + s V B_d^T,    V = Z A_d^T        out[t] += w * Y
//
// Backward: the gradients of hidden, of the routing weights and of every LoRA matrix; base weights are frozen. The phases and
// their formulas stand in phases.h.
//
// Arithmetic: operands bf16, accumulation fp32. Results are bitwise the same for any number of threads, on one packed layer; on
// a machine with several NUMA nodes sums over I are rounded once more for each of them (shards.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cpu_kernels/bfloat16.h"
#include "moe/config.h"
#include "moe/shards.h"
#include "threadpool/pool.h"

namespace moesaic::moe {

/// Number of elements of each tensor that forward saves for backward. S = T*k slots.
struct SavedSizes {
  std::int64_t routing;      ///< int32: E + 1 offsets, then the slots t*k + j grouped by expert
  std::int64_t gate;         ///< bf16: G, S * I
  std::int64_t up;           ///< bf16: U, S * I
  std::int64_t gate_up_low;  ///< bf16: s * x A^T of gate and up, S * (sum of their ranks)
  std::int64_t down_low;     ///< bf16: s * V, S * (sum of the down ranks), for each shard of I its part
};

/// Memory of the caller's that holds the saved tensors; contents are the engine's own.
struct SavedState {
  std::int32_t* routing = nullptr;
  BFloat16* gate = nullptr;
  BFloat16* up = nullptr;
  BFloat16* gate_up_low = nullptr;
  BFloat16* down_low = nullptr;
};

struct ForwardArgs {
  TensorView hidden;                  ///< [T, H] bf16 or fp32
  TensorView ids;                     ///< [T, k] int32 or int64; -1 or E: skip
  TensorView weights;                 ///< [T, k] bf16 or fp32
  std::span<const LoraAdapter> lora;  ///< active adapters; they add up
  TensorView out;                     ///< [T, H] bf16 or fp32, overwritten
  const SavedState* saved = nullptr;  ///< null: nothing is saved
};

struct BackwardArgs {
  TensorView hidden;                        ///< as given to Forward
  TensorView weights;                       ///< as given to Forward
  std::span<const LoraAdapter> lora;        ///< as given to Forward
  const SavedState* saved = nullptr;        ///< as Forward filled it; only read
  TensorView d_out;                         ///< [T, H] bf16 or fp32
  TensorView d_hidden;                      ///< [T, H] bf16 or fp32, overwritten; undefined: not computed
  TensorView d_weights;                     ///< [T, k] bf16 or fp32, overwritten; undefined: not computed
  std::span<const LoraAdapterGrad> d_lora;  ///< empty, or one for each of `lora`
};

/// Threads: Forward and Backward are const and may be called from several threads at once (the pool serves them in turn).
class ExpertsLayer {
 public:
  /// Packs the weights; the caller may free its own afterwards.
  /// @param gate_up  [E, 2I, H] (gate rows first), bf16, fp16 or fp32, any strides
  /// @param down     [E, H, I]
  /// Throws std::invalid_argument naming the argument, std::bad_alloc where memory cannot be had.
  ExpertsLayer(const LayerConfig& config, const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool);
  ~ExpertsLayer();
  ExpertsLayer(const ExpertsLayer&) = delete;
  ExpertsLayer& operator=(const ExpertsLayer&) = delete;

  const LayerConfig& config() const;
  /// Bytes that the packed weights take.
  std::int64_t weight_bytes() const;
  /// How I is divided among NUMA nodes: fixed when the weights were packed, by the pool's machine.
  std::span<const Shard> shards() const;

  /// @param tokens T, @param top_k k
  SavedSizes SavedStateSizes(std::int64_t tokens, std::int64_t top_k, std::span<const LoraAdapter> lora) const;

  /// Throws std::invalid_argument naming the argument, what came and what was expected; nothing is written then.
  void Forward(const ForwardArgs& args, threadpool::Pool& pool) const;
  void Backward(const BackwardArgs& args, threadpool::Pool& pool) const;

  /// Writes the packed weights back: gate_up [E, 2I, H] and down [E, H, I], any dtype and strides of the constructor's.
  void Unpack(const TensorView& gate_up, const TensorView& down, threadpool::Pool& pool) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::moe
