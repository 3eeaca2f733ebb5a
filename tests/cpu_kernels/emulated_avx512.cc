// The avx512 tier's cell compiled for the baseline: its blocking and edges are tested on hosts without AVX-512 too. The
// elementwise kernels beside it are the baseline's.
#include "cpu_kernels/gemm/widen_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kEmulatedAvx512;
const KernelTier kEmulatedAvx512 = MakeTier<WidenCell<16, 3, 8>>("emulated_avx512", HostRunsBaseline);
}  // namespace moesaic
