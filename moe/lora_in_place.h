// Adapters of a call with few rows an expert, where they lie: fp32 products with the parameters themselves
// (cpu_kernels/elementwise/low_rank.h), nothing packed. To the rest of the pass it is as if there were no adapters.
//
// Packing costs as much as reading the parameters, and more where PEFT keeps one number of all experts side by side, as in B:
// a group's numbers are 64 bytes of each of its pages then. With few rows that is a quarter of a call. Here whole pages of B
// are read, of all experts at once, each thread a range of features: a sweep. What it expands or contracts are the rank-wide
// intermediates of all rows, so sweeps stand between the other stages:
//
//   forward    L = s X A^T of each expert; sweep: U = L B of gate and up; jobs, whose products start from U, and V = s Z A_d^T;
//              sweep: V B_d, rows that the merge adds
//   backward   sweep: D B_d, dB_d = (w V)^T D; jobs, which add Q A_d and write dA_d; sweep: dG B_g + dU B_u, dB = L^T dG, dU;
//              P A and dA of each expert, rows that the merge adds
//
// Symbols are those of phases.h. Sums of a sweep are kept for each of its ranges of features, which depend on nothing but the
// shape, and added up in their order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/kernels.h"
#include "moe/jobs.h"
#include "moe/lora.h"

namespace moesaic::moe {

class LoraInPlace {
 public:
  /// Whether the parameters and gradients lie as PEFT keeps them, and the rows are few enough.
  static bool Serves(const LayerConfig& config, const LoraCall& lora, std::span<const Job> jobs);
  /// Whether this is the faster way for so many rows of each expert, and its rank-wide intermediates are not too large.
  static bool IsFaster(std::span<const std::int64_t> rows, std::int64_t input_rank, std::int64_t down_rank);
  /// Tasks of a sweep over a matrix B [features][ranks * experts] of one adapter.
  static std::int64_t SweepsOf(std::int64_t experts, std::int64_t features, std::int64_t ranks);

  /// @param jobs   borrowed; one for each expert with rows
  /// @param slots  of all rows, in the order of the routing
  LoraInPlace(const LayerConfig& config, LoraCall lora, std::span<const Job> jobs, const std::int32_t* slots);

  const LoraCall& lora() const { return lora_; }

  /// Carves the rank-wide intermediates of one direction out of `memory`, and what grows with the rows out of other memory;
  /// null: only counts. Returns the bytes, of the former at most 32 MiB.
  /// @param pitch  elements between rows of H, as in workspace->rows
  /// @param count  rows of those: T * k
  std::int64_t BindLow(void* memory, bool backward);
  std::int64_t BindForward(void* memory, std::int64_t pitch, std::int64_t count);
  std::int64_t BindBackward(void* memory, std::int64_t pitch, std::int64_t count, bool d_hidden);
  /// Bytes of ThreadScratch that no function here asks more of.
  std::int64_t StageScratchBytes() const;

  /// Tasks of a sweep over a matrix of B; 0: there is none.
  std::int64_t Sweeps(LoraMatrix m) const;
  /// Of one product of the matrix, by each of them, on average.
  double SweepFlops(LoraMatrix m) const;

  // Forward.

  /// L of a job, also as bf16 to `saved` [rows][R1], if there is one.
  void InputLow(const Job& job, const void* const* rows, DType dtype, BFloat16* saved);
  void ExpandGateUp(LoraMatrix m, std::int64_t sweep);
  /// Fills the sums [features][ld] of a job's product with what gate's or up's adapters add. False: there are none.
  bool StartGateUp(LoraMatrix m, const Job& job, std::int64_t first_feature, std::int64_t features, float* sums,
                   std::int64_t ld) const;
  /// V of a job from Z, operand tiles [rows][I].
  void DownLow(const Job& job, const TileMatrix& z, BFloat16* saved);
  void ExpandDown(std::int64_t sweep);

  // Backward.

  /// L and w V as forward saved them, bf16 [rows][rank]. @param weights  w of each row of the job
  void LoadLow(const Job& job, const BFloat16* saved_input, const BFloat16* saved_down, const float* weights);
  /// Where the sweep of B_d finds a row of dO.
  void SetOutputRow(const Job& job, std::int64_t i, const void* row) { d_out_[static_cast<std::size_t>(job.begin + i)] = row; }
  void ContractDown(std::int64_t sweep, DType dtype);
  /// Q = s D B_d of a job, and w Q.
  void DownGradientLow(const Job& job, const float* weights);
  /// Bytes of `scratch` for so many features.
  std::int64_t ScratchBytes(const Job& job, std::int64_t features) const {
    return job.rows * RoundUp(features, kTileColumns) * 4;
  }
  /// Fills the sums of a job's dZ0 with Q A_d. False: there are no adapters of down.
  bool StartDown(const Job& job, std::int64_t first_feature, std::int64_t features, float* sums, std::int64_t ld,
                 void* scratch) const;
  /// dA_d for a range of I from Z, and dG, dU to where the next sweep finds them: operand tiles [rows][I].
  void KeepIntermediate(const Job& job, std::int64_t first_feature, std::int64_t features, const TileMatrix& z,
                        const TileMatrix& d_gate, const TileMatrix& d_up, void* scratch);
  void ContractGateUp(LoraMatrix m, std::int64_t sweep);
  /// P A and dA of one expert; zeros for the gradients of one without rows. @param rows  of X; null: the expert has none
  void InputGradients(std::int64_t expert, const void* const* rows, DType dtype);

  /// What the merge adds for a slot, beside its row in workspace->rows; null: nothing.
  const BFloat16* AddedRow(std::int64_t slot) const { return added_ != nullptr ? added_ + slot * pitch_ : nullptr; }

 private:
  /// A sixteenth of a matrix's features, for some experts.
  struct Sweep {
    std::int64_t first_expert, experts, range, first_feature, features;
  };
  struct Matrix {
    std::vector<LoraCall::PieceInPlace> pieces;
    std::int64_t ranks = 0, features = 0;
    std::int64_t range = 16;    ///< features of a sweep
    std::int64_t experts = 16;  ///< of a sweep: what it transposes fits L2
    std::int64_t ranges() const { return CeilDiv(features, range); }
    /// Chooses the range and the experts of a sweep.
    void Divide(std::int64_t all_experts);
    std::int64_t Sweeps(std::int64_t all_experts) const { return CeilDiv(all_experts, experts) * ranges(); }
    std::int64_t ScratchBytes(std::int64_t of_experts) const {
      return AcrossExpertsScratch(of_experts, ranks, static_cast<std::int64_t>(pieces.size())) * 4;
    }
  };

  Sweep SweepOf(const Matrix& matrix, std::int64_t index) const;
  std::vector<LowRankPiece> PiecesOf(const Matrix& matrix, std::int64_t expert, std::int64_t first_feature) const;
  /// Scales a job's sums [rows][ranks], also as bf16 to `saved`, if there is one.
  static void Scale(const Job& job, std::int64_t ranks, const float* scale, float* sums, BFloat16* saved);
  /// The sums over all ranges, scaled: [rows][ranks].
  void AddUp(const Job& job, const Matrix& matrix, const float* parts, const float* scale, float* sums) const;
  enum class Use { kExpand, kContract };
  struct SweepCall {
    Use use;
    const Matrix& matrix;
    std::int64_t index;
    std::int64_t offset;  ///< of the first feature in a row
    DType dtype;
    const float* low;
    float* parts;  ///< sums of all ranges; null: not wanted
    const void* const* rows;
    void* const* out;
  };
  void Run(const SweepCall& call) const;
  void FillSums(const Job& job, const float* const* rows, std::int64_t features, float* sums, std::int64_t ld) const;

  LayerConfig config_;
  LoraCall lora_;
  std::span<const Job> jobs_;
  const std::int32_t* slots_;
  const KernelTier& kernels_;
  std::vector<const Job*> job_of_expert_;
  std::array<Matrix, kNumLoraMatrices> matrix_;
  std::int64_t rows_ = 0;  ///< of all jobs
  std::int64_t pitch_ = 0;
  std::int64_t inner_pitch_ = 0;  ///< I rounded up to a tile
  bool wants_p_ = false;          ///< P, for dX or dA

  // Rows are those of the routing: a job's first is its `begin`.
  float* low_ = nullptr;                         ///< [rows][R1]: L
  float* down_low_ = nullptr;                    ///< [rows][R2]: V; in backward w V
  float* q_parts_ = nullptr;                     ///< [ranges][rows][R2]: D B_d
  float* q_ = nullptr;                           ///< [rows][R2]: Q
  float* wq_ = nullptr;                          ///< the same: w Q
  std::array<float*, 2> p_parts_{};              ///< [ranges][rows][R1], of gate and up: dG B_g, dU B_u
  float* added_input_ = nullptr;                 ///< [rows][gate, up][inner_pitch_] fp32: L B
  BFloat16* intermediate_ = nullptr;             ///< the same in bf16: dG, dU
  BFloat16* added_ = nullptr;                    ///< [T * k][pitch_]
  std::vector<void*> input_rows_, output_rows_;  ///< [rows]: of added_input_ or intermediate_, and of added_
  std::vector<const void*> d_out_;               ///< [rows]
};

}  // namespace moesaic::moe
