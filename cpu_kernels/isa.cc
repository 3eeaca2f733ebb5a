#include "cpu_kernels/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cpu_kernels/host.h"
#include "cpu_kernels/kernels.h"

namespace moesaic {

extern const KernelTier kTierAmxBf16;
extern const KernelTier kTierAvx512Bf16;
extern const KernelTier kTierAvx512Bf16Zen4;
extern const KernelTier kTierAvx512;
extern const KernelTier kTierPortableAvx2;
extern const KernelTier kTierOneDnn;
extern const KernelTier kTierPortable;

namespace {

/// Better first, as measured. Two entries may share a name: the first that runs here serves it. On AVX2 hosts the portable
/// kernels are faster than oneDNN, for which everything is unpacked to fp32 first (README.md).
constexpr const KernelTier* kTiers[] = {&kTierAmxBf16, &kTierAvx512Bf16, &kTierAvx512Bf16Zen4, &kTierAvx512, &kTierPortableAvx2,
#if defined(MOESAIC_HAS_ONEDNN)
                                        &kTierOneDnn,
#endif
                                        &kTierPortable};

std::atomic<const KernelTier*> g_forced{nullptr};

/// Linux gives the tile registers' state only to processes that ask for it (Documentation/arch/x86/xstate.rst).
bool RequestAmxPermission() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool IsSupported(const KernelTier& tier) {
  if (std::strcmp(tier.name, "amx_bf16") == 0) return CpuHasAmxBf16() && HostRunsAvx512Bf16();
  return tier.runs_here();
}

const KernelTier& FindTier(std::string_view name) {
  std::string known;
  const KernelTier* found = nullptr;
  for (const KernelTier* tier : kTiers) {
    if (name == tier->name) {
      if (tier->runs_here()) return *tier;
      found = tier;
    }
    if ((known + ",").find(std::string(tier->name) + ",") == std::string::npos) {
      known += (known.empty() ? "" : ", ") + std::string(tier->name);
    }
  }
  if (found == nullptr) {
    throw UnsupportedHostError("MOESAIC_ISA is \"" + std::string(name) + "\"; this build has " + known);
  }
  const bool denied = IsSupported(*found);
  throw UnsupportedHostError(
      "MOESAIC_ISA is \"" + std::string(name) + "\"; " +
      (denied ? "the operating system does not permit it to this process" : "this CPU (" + CpuName() + ") does not have it"));
}

const KernelTier& BestTier() {
  for (const KernelTier* tier : kTiers) {
    if (tier->runs_here()) return *tier;
  }
  return kTierPortable;
}

}  // namespace

bool HostRunsBaseline() { return true; }

bool HostRunsAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

bool HostRunsAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && HostRunsAvx2();
}

bool HostRunsAvx512Bf16() { return __builtin_cpu_supports("avx512bf16") && HostRunsAvx512(); }

bool HostRunsAvx512Bf16ButIsNotZen4() {
  if (!HostRunsAvx512Bf16()) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__builtin_cpu_is("amd") || __get_cpuid(1, &a, &b, &c, &d) == 0) return true;
  return (a >> 8 & 0xfu) + (a >> 20 & 0xffu) != 0x19;  // Zen 3, of the same family, has no AVX-512
}

bool CpuHasAmxBf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d >> 24 & 1u) != 0 && (d >> 22 & 1u) != 0;
}

bool HostRunsAmxBf16() {
  static const bool runs = CpuHasAmxBf16() && HostRunsAvx512Bf16() && RequestAmxPermission();
  return runs;
}

void FinishStores() { __builtin_ia32_sfence(); }

std::span<const KernelTier* const> KernelTiers() { return kTiers; }

const KernelTier& ChosenKernels() {
  if (const KernelTier* forced = g_forced.load(std::memory_order_acquire)) return *forced;
  const char* wanted = std::getenv("MOESAIC_ISA");
  const KernelTier& tier = wanted != nullptr && *wanted != '\0' ? FindTier(wanted) : BestTier();
  g_forced.store(&tier, std::memory_order_release);
  return tier;
}

void ForceIsa(std::string_view name) { g_forced.store(name.empty() ? nullptr : &FindTier(name), std::memory_order_release); }

const std::vector<IsaTier>& IsaTiers() {
  static const std::vector<IsaTier> tiers = [] {
    std::vector<IsaTier> list;
    for (const KernelTier* tier : kTiers) {
      auto row = std::find_if(list.begin(), list.end(), [&](const IsaTier& known) { return known.name == tier->name; });
      if (row == list.end()) {
        row = list.insert(row, {.name = tier->name, .compiled = true});
        row->chosen = row->name == ChosenKernels().name;
      }
      row->supported = row->supported || IsSupported(*tier);
      row->permitted = row->permitted || tier->runs_here();
    }
#if !defined(MOESAIC_HAS_ONEDNN)
    list.push_back({.name = "onednn", .supported = HostRunsAvx2(), .permitted = HostRunsAvx2()});
#endif
    return list;
  }();
  return tiers;
}

const std::string& ChosenIsa() {
  static thread_local std::string name;
  name = ChosenKernels().name;
  return name;
}

bool VerifyIsa(std::string_view name) {
  const KernelTier* tier = nullptr;
  for (const KernelTier* candidate : kTiers) {
    if (tier == nullptr && name == candidate->name && candidate->runs_here()) tier = candidate;
  }
  if (tier == nullptr) return false;
  // One tile each of weights and activations, small integers: the sums are exact.
  struct alignas(64) Tiles {
    BFloat16 stored[kTileElements], pairs[kTileElements];
    float c[kPanelRows * kPanelRows];
  };
  const auto tiles = std::make_unique<Tiles>();
  float weights[16][32], activations[16][32];
  const void* rows[16];
  for (int i = 0; i < 16; ++i) {
    rows[i] = activations[i];
    for (int k = 0; k < 32; ++k) {
      weights[i][k] = static_cast<float>((i * 7 + k * 3) % 11 - 5);
      activations[i][k] = static_cast<float>((i * 5 + k) % 9 - 4);
      tiles->stored[i * kTileColumns + StoredPosition(k)] = ToBFloat16(weights[i][k]);
    }
  }
  PackRowsArgs pack;
  pack.rows = rows;
  pack.count = 16;
  pack.columns = 32;
  pack.pairs = TileMatrix::Activations(tiles->pairs, 16, 32);
  pack.panels = 1;
  pack.tile_columns = 1;
  tier->pack_rows(pack);
  const GemmSegment segment{TileMatrix::Weights(tiles->stored, 16, 32), pack.pairs};
  DirectGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = 1;
  gemm.activation_panels = 1;
  gemm.c = tiles->c;
  gemm.ldc = kPanelRows;
  tier->direct_gemm(gemm);
  for (int i = 0; i < 16; ++i) {
    for (int t = 0; t < 16; ++t) {
      float expected = 0;
      for (int k = 0; k < 32; ++k) expected += weights[i][k] * activations[t][k];
      if (tiles->c[i * kPanelRows + t] != expected) return false;
    }
  }
  return true;
}

std::string CpuName() {
  char name[49] = {};
  unsigned words[4];
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    if (__get_cpuid(0x80000002u + leaf, &words[0], &words[1], &words[2], &words[3]) == 0) return "unknown x86-64";
    std::memcpy(name + 16 * leaf, words, 16);
  }
  std::string text(name);
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace moesaic
