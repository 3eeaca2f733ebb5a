// Any x86-64: the AMX cell over emulated tiles. Compiled twice, for the baseline and for AVX2 with FMA.
#include "cpu_kernels/gemm/amx_cell.h"
#include "cpu_kernels/gemm/emulated_tiles.h"
#include "cpu_kernels/host.h"
#include "cpu_kernels/tier.h"

namespace moesaic {
#if defined(__AVX2__)
extern const KernelTier kTierPortableAvx2;
const KernelTier kTierPortableAvx2 = MakeTier<AmxCell<EmulatedTiles>>("portable", HostRunsAvx2);
#else
extern const KernelTier kTierPortable;
const KernelTier kTierPortable = MakeTier<AmxCell<EmulatedTiles>>("portable", HostRunsBaseline);
#endif
}  // namespace moesaic
