// Whether this host, this operating system and this process can execute an instruction set.
#pragma once

namespace moesaic {

bool HostRunsAmxBf16();     ///< AMX-TILE, AMX-BF16, AVX512-BF16, and the operating system's permission
bool HostRunsAvx512Bf16();  ///< AVX-512 F, BW, VL, DQ and BF16
bool HostRunsAvx512Bf16ButIsNotZen4();
bool HostRunsAvx512();    ///< AVX-512 F, BW, VL and DQ
bool HostRunsAvx2();      ///< AVX2, FMA, F16C and BMI2
bool HostRunsBaseline();  ///< always

/// The CPU has AMX-TILE and AMX-BF16, whatever the operating system permits.
bool CpuHasAmxBf16();

}  // namespace moesaic
