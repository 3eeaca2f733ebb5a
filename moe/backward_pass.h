// One call of the backward, shared by its two halves: backward_down.cc (D0..D4, A1) and backward_gate_up.cc (GU0..GU4).
#pragma once

#include "moe/pass.h"

namespace moesaic::moe {

/// Activations of one job between its stages. Those that only gradients need are left empty where none is wanted.
struct BackwardBuffers {
  TileMatrix d;       ///< pairs [rows][H]: D_e
  SplitTiles q;       ///< pairs [rows][R2]: s D_e B_d
  TileMatrix d_gate;  ///< operand [rows][I]: dG
  TileMatrix d_up;    ///< operand [rows][I]: dU
  SplitTiles p;       ///< operand [rows][R1]: s (dG B_g + dU B_u)
  float* d_weight;    ///< [units of I][rows]: partial sums of dw

  TileMatrix d_stored;    ///< stored [rows][H]: D_e, for dB_d
  TileMatrix wv_t;        ///< operand [R2][rows]: (w s V)^T, for dB_d
  SplitTiles wq_stored;   ///< stored [rows][R2]: w s Q, for dA_d
  TileMatrix z_t;         ///< operand [I][rows]: Z^T, for dA_d
  TileMatrix d_gate_t;    ///< operand [I][rows]: dG^T, for dB_g
  TileMatrix d_up_t;      ///< operand [I][rows]: dU^T, for dB_u
  TileMatrix low_stored;  ///< stored [rows][R1]: s U_g, s U_u, for dB_g, dB_u
  SplitTiles p_t;         ///< operand [R1][rows]: P^T, for dA
  TileMatrix x_stored;    ///< stored [rows][H]: X_e, for dA

  std::int64_t Bind(void* memory, std::int64_t rows, const LayerConfig& config, const LoraCall& lora);
};

class BackwardPass : public Pass {
 public:
  BackwardPass(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args, const threadpool::Pool& pool);

  void Run(threadpool::Pool& pool);

 private:
  static BackwardPass& Self(void* context) { return *static_cast<BackwardPass*>(context); }
  template <void (BackwardPass::*kStage)(std::int64_t job, std::int64_t part)>
  static void Task(void* context, std::int64_t index, int) {
    (Self(context).*kStage)(TaskIndex::Job(index), TaskIndex::Part(index));
  }

  BackwardBuffers BuffersOf(std::int64_t job) const;
  /// Routing weights of a job's rows.
  void LoadWeights(const Job& job, float* weights) const;
  bool wants_gate_up() const;

  // backward_down.cc
  void ScatterAndPack(std::int64_t job, std::int64_t part);          ///< D0, D1, D2
  void DownLoraLow(const Job& job, const BackwardBuffers& buffers);  ///< D4: Q, and what dA_d and dB_d contract over
  void DownBase(std::int64_t job, std::int64_t part);                ///< D3, A1 for a range of I
  void SumIntermediate(std::int64_t job, std::int64_t part);         ///< D4: dA_d; GU3: dB_g, dB_u, for a range of I

  // backward_gate_up.cc
  void GateUpLora(std::int64_t job, std::int64_t part);  ///< dw; GU2, GU3: P
  void SumHidden(std::int64_t job, std::int64_t part);   ///< GU3: dA; D4: dB_d, for a range of H
  void GateUpBase(std::int64_t job, std::int64_t part);  ///< GU1 and GU3's dX for a range of H
  void Merge(std::int64_t first_token);                  ///< GU4

  const BackwardArgs& args_;
  RowSource hidden_;
  RowSource d_out_;
  const std::uint8_t* slot_used_ = nullptr;  ///< [T * k]: 0 where the slot was skipped
};

}  // namespace moesaic::moe
