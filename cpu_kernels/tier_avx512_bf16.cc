// Zen 5, Cooper Lake, and Zen 4, whose weights come from memory in another way: VDPBF16PS.
#include "cpu_kernels/gemm/avx512_bf16_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kTierAvx512Bf16, kTierAvx512Bf16Zen4;
const KernelTier kTierAvx512Bf16 = MakeTier<Avx512Bf16Cell<Avx512Bf16Product>>("avx512_bf16", HostRunsAvx512Bf16ButIsNotZen4);
// Second in the list, so that it serves Zen 4 alone, and tests run it on every host with these instructions.
const KernelTier kTierAvx512Bf16Zen4 = MakeTier<Avx512Bf16Cell<Zen4Product>, 2>("avx512_bf16", HostRunsAvx512Bf16);
}  // namespace moesaic
