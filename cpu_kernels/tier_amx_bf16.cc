// 4th-generation Xeon and later: TDPBF16PS.
#include "cpu_kernels/gemm/amx_cell.h"
#include "cpu_kernels/gemm/amx_tiles.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
extern const KernelTier kTierAmxBf16;
const KernelTier kTierAmxBf16 = MakeTier<AmxCell<AmxTiles>>("amx_bf16", HostRunsAmxBf16);
}  // namespace moesaic
