// Any x86-64, compiled twice: for AVX2 with FMA; and for the baseline, with the AMX cell over emulated tiles, so that the AMX
// tier's blocking and edges are the same code on every host.
#include "cpu_kernels/gemm/amx_cell.h"
#include "cpu_kernels/gemm/emulated_tiles.h"
#include "cpu_kernels/gemm/widen_cell.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
#if defined(__AVX2__)
extern const KernelTier kTierPortableAvx2;
const KernelTier kTierPortableAvx2 = MakeTier<WidenCell<8, 1, 6>>("portable", HostRunsAvx2);
#else
extern const KernelTier kTierPortable;
const KernelTier kTierPortable = MakeTier<AmxCell<EmulatedTiles>>("portable", HostRunsBaseline);
#endif
}  // namespace moesaic
