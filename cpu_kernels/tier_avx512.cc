// Skylake-SP, Cascade Lake, Ice Lake: AVX-512 without a bf16 product.
#include "cpu_kernels/gemm/widen_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kTierAvx512;
const KernelTier kTierAvx512 = MakeTier<WidenCell<16, 3, 8>>("avx512", HostRunsAvx512);
}  // namespace moesaic
