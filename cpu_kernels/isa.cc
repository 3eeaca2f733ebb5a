#include "cpu_kernels/isa.h"

#include <cstdlib>
#include <fstream>

namespace moesaic {

const std::vector<IsaTier>& IsaTiers() {
  static const std::vector<IsaTier> tiers = [] {
    const char* forced = std::getenv("MOESAIC_ISA");
    if (forced != nullptr && std::string_view(forced) != "portable") {
      throw UnsupportedHostError("MOESAIC_ISA is \"" + std::string(forced) + "\"; this build has: portable");
    }
    return std::vector<IsaTier>{{"portable", true, true, true, true}};
  }();
  return tiers;
}

const std::string& ChosenIsa() { return IsaTiers().front().name; }

bool VerifyIsa(std::string_view name) { return name == "portable"; }

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace moesaic
