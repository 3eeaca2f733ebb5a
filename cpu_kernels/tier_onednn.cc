// Any host with AVX2: oneDNN's products.
#include "cpu_kernels/gemm/onednn_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kTierOneDnn;
const KernelTier kTierOneDnn = MakeTier<OneDnnCell>("onednn", HostRunsAvx2);
}  // namespace moesaic
