// Which instruction sets this host has, which this process may use, and which one the engine uses.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic {

/// A forced instruction set that this host, this process or this build does not have.
class UnsupportedHostError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What is known of one tier of kernels. `supported`: the CPU has the instructions; `permitted`: the operating system lets this
/// process use them (AMX needs arch_prctl(ARCH_REQ_XCOMP_PERM)); `compiled`: this build holds the kernels, for "onednn" that it
/// was made with oneDNN.
struct IsaTier {
  std::string name;  ///< "amx_bf16", "avx512_bf16", "avx512", "portable", "onednn"
  bool supported = false;
  bool permitted = false;
  bool compiled = false;
  bool chosen = false;
};

/// Every tier, best first. The first call asks the kernel for AMX permission. Thread safe.
/// Throws UnsupportedHostError where MOESAIC_ISA names a tier that is unknown or cannot run here.
const std::vector<IsaTier>& IsaTiers();

/// The tier in use: MOESAIC_ISA, else the best that can run. The reference is valid until this thread's next call.
const std::string& ChosenIsa();

/// Uses this tier from now on; "": MOESAIC_ISA, else the best, as at the start. Packed weights and saved states stay valid:
/// their layout is the same on every tier. Throws UnsupportedHostError where the tier cannot run; then nothing changes.
void ForceIsa(std::string_view name);

/// Runs the tier's own GEMM kernel and compares it with the scalar reference. False where the tier cannot run.
bool VerifyIsa(std::string_view name);

/// "AMD EPYC 9755 128-Core Processor", from the CPU itself.
std::string CpuName();

}  // namespace moesaic
