// One call of the backward, shared by its two halves: backward_down.cc (D0..D4, A1) and backward_gate_up.cc (GU0..GU4).
#pragma once

#include <array>
#include <span>

#include "moe/pass.h"
#include "profiling/trace.h"

namespace moesaic::moe {

/// Activations of one job between its stages. Those that only gradients need are left empty where none is wanted.
struct BackwardBuffers {
  TileMatrix d;       ///< as a direct GEMM takes them (Pass::StoredRows), [rows][H]: D_e
  SplitTiles q;       ///< the same [rows][R2]: s D_e B_d
  TileMatrix d_gate;  ///< operand [rows][I]: dG
  TileMatrix d_up;    ///< operand [rows][I]: dU
  SplitTiles p;       ///< operand [rows][R1]: s (dG B_g + dU B_u)
  float* d_weight;    ///< [units of I][rows]: partial sums of dw

  TileMatrix wv;   ///< row pairs [rows][R2]: w s V, for dB_d
  SplitTiles p_t;  ///< operand [R1][rows]: P^T, for dA
  TileMatrix low;  ///< row pairs [rows][R1]: s U_g, s U_u, for dB_g, dB_u
  SplitTiles wq;   ///< row pairs [rows][R2]: w s Q, for dA_d

  /// This job's share of the sums over rows that run along I, fp32 [I][rank] as in ExpertLora: only where an expert's rows are
  /// in several jobs, and used by all but the first of them.
  std::array<float*, kNumLoraMatrices> partial{};

  TileMatrix z;  ///< operand [rows][I]: Z, for dA_d of adapters in place

  /// @param inner  rows of I
  std::int64_t Bind(void* memory, std::int64_t rows, std::int64_t hidden, std::int64_t inner, const LoraCall& lora,
                    bool in_chunks, bool keeps_z);
};

/// Gradients that are summed where dG, dU and Z are computed, a step of some blocks of I at a time.
inline constexpr std::array kIntermediateSums = {kLoraADownT, kLoraBGate, kLoraBUp};

class BackwardPass : public Pass {
 public:
  BackwardPass(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args, const threadpool::Pool& pool);

  void Run(threadpool::Pool& pool);

 private:
  /// What backward needs before its tasks: plan, memory, graph. Alone, on the calling thread.
  void AllocateAndBuild();
  static BackwardPass& Self(void* context) { return *static_cast<BackwardPass*>(context); }
  template <void (BackwardPass::*kStage)(std::int64_t job, std::int64_t part)>
  static void Task(void* context, std::int64_t index, int) {
    BackwardPass& pass = Self(context);
    const Job& job = pass.jobs[TaskIndex::Job(index)];
    const profiling::TaskScope scope(job.expert, job.rows);
    (pass.*kStage)(TaskIndex::Job(index), TaskIndex::Part(index));
  }

  BackwardBuffers BuffersOf(std::int64_t job) const;
  /// Routing weights of a job's rows.
  void LoadWeights(const Job& job, float* weights) const;
  bool wants_gate_up() const;  ///< P, for dX or dA
  bool keeps_z() const;        ///< from DownBase's products to dA_d of adapters in place

  // backward_down.cc
  void ScatterAndPack(std::int64_t job, std::int64_t part);          ///< D0, D1, D2
  void DownLoraLow(const Job& job, const BackwardBuffers& buffers);  ///< D4: Q, and what dA_d and dB_d contract over
  void DownBase(std::int64_t job, std::int64_t part);                ///< D3, A1; D4: dA_d; GU3: dB_g, dB_u, for a range of I
  /// Of a step's blocks of I: operand tiles [32 blocks][tokens]; data null where no gradient needs them.
  struct StepTransposed {
    TileMatrix d_gate, d_up, z;
  };
  void StepGradients(const Job& job, const BackwardBuffers& buffers, const StepTransposed& step, Range blocks);
  void SumIntermediate(std::int64_t job, std::int64_t part);  ///< adds what a later job of an expert has of these sums

  // backward_gate_up.cc
  void GateUpLora(std::int64_t job, std::int64_t part);  ///< dw; GU3: P
  void SumHidden(std::int64_t job, std::int64_t part);   ///< GU2, GU3: dA; D4: dB_d, for a range of H
  void InputGradients(const Job& job, const BackwardBuffers& buffers, Range columns);  ///< GU2, GU3: dA
  void DownGradients(const Job& job, const BackwardBuffers& buffers, Range columns);   ///< D4: dB_d
  void GateUpBase(std::int64_t job, std::int64_t part);                                ///< GU1 and GU3's dX for a range of H
  void Merge(std::int64_t first_token);  ///< GU4; dw, where several shards have a part of it
  void MergeWeights(std::int64_t first_token, std::int64_t end_token);

  // In backward.cc: adapters in place.
  TaskId BeginInPlace();               ///< adds what comes before the jobs
  TaskId EndInPlace(TaskId computed);  ///< and what comes behind them
  std::int64_t GateUpSweeps(LoraMatrix m) const;
  template <void (BackwardPass::*kSweep)(std::int64_t index)>
  static void Sweep(void* context, std::int64_t index, int) {
    (Self(context).*kSweep)(index);
  }
  void LoadLow(std::int64_t job);
  void ContractDown(std::int64_t sweep);  ///< D4: D B_d, dB_d
  void ContractGate(std::int64_t sweep);  ///< GU3: dG B_g, dB_g
  void ContractUp(std::int64_t sweep);    ///< GU3: dU B_u, dB_u
  void ContractGateUp(LoraMatrix m, std::int64_t sweep, Phase p, Phase d_b);
  void InputInPlace(std::int64_t expert);  ///< GU3: P A, dA

  const BackwardArgs& args_;
  RowSource hidden_;
  RowSource d_out_;
  bool in_chunks_ = false;                   ///< some expert's rows are in several jobs
  const std::uint8_t* slot_used_ = nullptr;  ///< [T * k]: 0 where the slot was skipped
  float* shard_d_weights_ = nullptr;         ///< [shards][T * k]: their parts of dw; null where there is one shard
};

}  // namespace moesaic::moe
