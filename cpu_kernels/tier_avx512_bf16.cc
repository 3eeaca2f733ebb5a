// Zen 4, Zen 5, Cooper Lake: VDPBF16PS.
#include "cpu_kernels/gemm/avx512_bf16_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kTierAvx512Bf16;
const KernelTier kTierAvx512Bf16 = MakeTier<Avx512Bf16Cell>("avx512_bf16", HostRunsAvx512Bf16);
}  // namespace moesaic
