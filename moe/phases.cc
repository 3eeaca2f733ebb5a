#include "moe/phases.h"

#include <algorithm>
#include <array>

namespace moesaic::moe {
namespace {

using P = Phase;

// clang-format off
constexpr std::array<PhaseInfo, kNumPhases> kTable = {{
    // phase, parent, name, published name,
    //     formula,
    //     reads, writes, parallel over
    {P::kForward, P::kForward, "forward", "forward",
     "out = sum over the slots of w * Y",
     "X, ids, w, W, A, B", "out, G, U, U_g, U_u, V", ""},
    {P::kRouting, P::kForward, "routing", "",
     "rows_e = slots (t, j) with ids[t, j] = e, in the order of the batch; cut into jobs",
     "ids", "routing", ""},
    {P::kAllocate, P::kForward, "allocate", "",
     "bind scratch memory; the task graph",
     "routing", "", ""},
    {P::kGather, P::kForward, "gather", "",
     "X_e = X[rows_e], rounded to bf16",
     "X, routing", "X_e", "expert, row block"},
    {P::kPackInput, P::kForward, "pack_input", "",
     "X_e in the form that the matrix unit reads",
     "X_e", "X_e packed", "expert, row block"},
    {P::kGateUpGemm, P::kForward, "gate_up_gemm", "",
     "G = X_e W_g^T, U = X_e W_u^T",
     "X_e, W_g, W_u", "G, U", "expert, row block, I block"},
    {P::kGateUpLora, P::kForward, "gate_up_lora", "",
     "U_g = X_e A_g^T, G += s U_g B_g^T; the same for up",
     "X_e, A, B", "U_g, U_u, G, U", "expert, row block, I block"},
    {P::kActivation, P::kForward, "activation", "",
     "Z = f(G) * U, f(G) = G sigma(y(G)): silu, y = G, or gelu_tanh",
     "G, U", "Z", "expert, row block, I block"},
    {P::kPackIntermediate, P::kForward, "pack_intermediate", "",
     "Z in the form that the matrix unit reads",
     "Z", "Z packed", "expert, row block"},
    {P::kDownGemm, P::kForward, "down_gemm", "",
     "Y_e = Z W_d^T",
     "Z, W_d", "Y_e", "expert, row block, H block"},
    {P::kDownLora, P::kForward, "down_lora", "",
     "V = Z A_d^T, Y_e += s V B_d^T",
     "Z, A, B", "V, Y_e", "expert, row block, H block"},
    {P::kMerge, P::kForward, "merge", "",
     "out[rows_e] += w * Y_e",
     "Y_e, w, routing", "out", "tokens"},

    {P::kBackward, P::kBackward, "backward", "backward",
     "gradients of <dO, out>",
     "dO, X, w, W, A, B, saved state", "dX, dw, dA, dB", ""},
    {P::kBackwardDown, P::kBackward, "backward_down", "backward_down",
     "dZ0 = D_e W_d + s Q A_d",
     "dO, W_d, A, B", "dZ0, dA_d, dB_d", ""},
    {P::kD0Prepare, P::kBackwardDown, "D0_prepare", "D0_prepare+memset",
     "plan, memory and graph, by the caller alone; bind buffers; what the down backward needs once",
     "", "", ""},
    {P::kD1Scatter, P::kBackwardDown, "D1_scatter", "D1_scatter",
     "D_e = dO[rows_e], rounded to bf16",
     "dO, routing", "D_e", "expert, row block"},
    {P::kD2Pack, P::kBackwardDown, "D2_pack", "D2_quantize",
     "D_e in the form that the matrix unit reads",
     "D_e", "D_e packed", "expert, row block"},
    {P::kD3Gemm, P::kBackwardDown, "D3_gemm", "D3_gemm",
     "dZ0 = D_e W_d",
     "D_e, W_d", "dZ0", "expert, row block, I block"},
    {P::kD4LoraGrad, P::kBackwardDown, "D4_lora_grad", "D4_lora_grad",
     "Q = D_e B_d, dZ0 += s Q A_d, dB_d = s D_e^T (w V), dA_d = s (w Q)^T Z",
     "D_e, V, Z, w, A, B", "dZ0, dA_d, dB_d", "expert, block of the gradient"},
    {P::kBackwardActivation, P::kBackward, "backward_activation", "backward_activation",
     "from dZ0 to dw, dG, dU",
     "dZ0, G, U, w", "dw, dG, dU", ""},
    {P::kA1SiluBackward, P::kBackwardActivation, "A1_silu_backward", "silu_backward",
     "dw = rowsum(dZ0 * Z), dZ = w dZ0, dU = dZ f(G), dG = dZ U sigma(y) (1 + G (1 - sigma(y)) y')",
     "dZ0, G, U, w", "dw, dG, dU", "expert, row block, I block"},
    {P::kBackwardGateUp, P::kBackward, "backward_gate_up", "backward_gate_up",
     "dX_e = dG W_g + dU W_u + s (P_g A_g + P_u A_u)",
     "dG, dU, X, W_g, W_u, A, B", "dX, dA, dB", ""},
    {P::kGU0Prepare, P::kBackwardGateUp, "GU0_prepare", "GU0_prepare+memset",
     "bind buffers; what the gate and up backward needs once",
     "", "", ""},
    {P::kGU1BasePassGate, P::kBackwardGateUp, "GU1_base_pass_gate", "base_pass(gate)",
     "dX_e = dG W_g",
     "dG, W_g", "dX_e", "expert, row block, H block"},
    {P::kGU1BasePassUp, P::kBackwardGateUp, "GU1_base_pass_up", "base_pass(up)",
     "dX_e += dU W_u",
     "dU, W_u", "dX_e", "expert, row block, H block"},
    {P::kGU2PackForLora, P::kBackwardGateUp, "GU2_pack_for_lora", "GU2_requantize_for_lora",
     "X_e again, in the form that dA reads",
     "X, routing", "X_e packed", "expert, row block"},
    {P::kGU3LoraPassGate, P::kBackwardGateUp, "GU3_lora_pass_gate", "lora_pass(gate)",
     "LoRA gradients of gate",
     "dG, X_e, U_g, A_g, B_g", "dX_e, dA_g, dB_g", ""},
    {P::kGU3GatePackDG, P::kGU3LoraPassGate, "pack_dG", "",
     "dG in the forms that P and dB read",
     "dG", "dG packed", "expert, row block"},
    {P::kGU3GateP, P::kGU3LoraPassGate, "P", "",
     "P_g = dG B_g",
     "dG, B_g", "P_g", "expert, row block"},
    {P::kGU3GateDB, P::kGU3LoraPassGate, "dB", "",
     "dB_g = s dG^T U_g",
     "dG, U_g", "dB_g", "expert, I block"},
    {P::kGU3GateDXLora, P::kGU3LoraPassGate, "dX_lora", "",
     "dX_e += s P_g A_g",
     "P_g, A_g", "dX_e", "expert, row block, H block"},
    {P::kGU3GateDA, P::kGU3LoraPassGate, "dA", "",
     "dA_g = s P_g^T X_e; with an A shared by gate and up, s (P_g + P_u)^T X_e",
     "P_g, X_e", "dA_g", "expert, H block"},
    {P::kGU3LoraPassUp, P::kBackwardGateUp, "GU3_lora_pass_up", "lora_pass(up)",
     "LoRA gradients of up",
     "dU, X_e, U_u, A_u, B_u", "dX_e, dA_u, dB_u", ""},
    {P::kGU3UpPackDG, P::kGU3LoraPassUp, "pack_dG", "",
     "dU in the forms that P and dB read",
     "dU", "dU packed", "expert, row block"},
    {P::kGU3UpP, P::kGU3LoraPassUp, "P", "",
     "P_u = dU B_u",
     "dU, B_u", "P_u", "expert, row block"},
    {P::kGU3UpDB, P::kGU3LoraPassUp, "dB", "",
     "dB_u = s dU^T U_u",
     "dU, U_u", "dB_u", "expert, I block"},
    {P::kGU3UpDXLora, P::kGU3LoraPassUp, "dX_lora", "",
     "dX_e += s P_u A_u",
     "P_u, A_u", "dX_e", "expert, row block, H block"},
    {P::kGU3UpDA, P::kGU3LoraPassUp, "dA", "",
     "dA_u = s P_u^T X_e; with an A shared by gate and up it is part of the gate's",
     "P_u, X_e", "dA_u", "expert, H block"},
    {P::kGU4Merge, P::kBackwardGateUp, "GU4_merge", "",
     "dX[rows_e] += dX_e",
     "dX_e, routing", "dX", "tokens"},
}};
// clang-format on

constexpr bool InOrder() {
  for (std::size_t i = 0; i < kNumPhases; ++i) {
    if (static_cast<std::size_t>(kTable[i].phase) != i || kTable[i].parent > kTable[i].phase) return false;
  }
  return true;
}
static_assert(InOrder(), "entry i of the table is Phase(i), and a parent comes before its steps");

std::array<profiling::RangeId, kNumPhases> RegisterAll() {
  std::array<profiling::RangeId, kNumPhases> ids{};
  for (const PhaseInfo& info : kTable) {
    const char* category = info.parent == info.phase ? "layer" : Info(info.parent).name;
    const bool holds_others =
        info.parent != info.phase &&
        std::any_of(kTable.begin(), kTable.end(), [&](const PhaseInfo& other) { return other.parent == info.phase; });
    ids[static_cast<std::size_t>(info.phase)] =
        profiling::RegisterRange(info.name, category, holds_others ? profiling::RangeKind::kSum : profiling::RangeKind::kTimed);
  }
  return ids;
}

}  // namespace

std::span<const PhaseInfo, kNumPhases> PhaseTable() { return kTable; }

profiling::RangeId RangeOf(Phase phase) {
  static const std::array<profiling::RangeId, kNumPhases> ids = RegisterAll();
  return ids[static_cast<std::size_t>(phase)];
}

}  // namespace moesaic::moe
