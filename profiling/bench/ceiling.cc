#include "profiling/bench/ceiling.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <new>
#include <set>
#include <stdexcept>

#include "cpu_kernels/isa.h"
#include "profiling/bench/probes.h"
#include "profiling/bench/rate.h"

namespace moesaic::bench {
namespace {

struct ComputeKernel {
  const char* isa;
  const char* instruction;
  ComputeLoop loop;
  double step_flops;
  std::int64_t steps_per_turn;  // some 20 microseconds, so that looking at the clock costs nothing
  bool (*available)();
};

bool TierRunnable(std::string_view name) {
  for (const IsaTier& tier : IsaTiers()) {
    if (tier.name == name) return tier.supported && tier.permitted;
  }
  return false;
}

// libgcc's answer includes the operating system's part (XGETBV).
bool HasAvx512() { return __builtin_cpu_supports("avx512f") != 0; }
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; }

// The first one available counts where a tier stands twice.
constexpr ComputeKernel kComputeKernels[] = {
    {"amx_bf16", "TDPBF16PS", ComputeAmxBf16, kAmxStepFlops, 1000, [] { return TierRunnable("amx_bf16"); }},
    {"avx512_bf16", "VDPBF16PS zmm", ComputeAvx512Bf16, kAvx512Bf16StepFlops, 10000,
     [] { return TierRunnable("avx512_bf16"); }},
    {"avx512", "fp32 multiply-add, 512 bits", ComputeAvx512, kAvx512StepFlops, 10000, HasAvx512},
    {"portable", "fp32 multiply-add, 256 bits", ComputeAvx2, kAvx2StepFlops, 10000, HasAvx2},
    {"portable", "fp32 multiply and add, 128 bits", ComputeSse2, kSse2StepFlops, 10000, [] { return true; }},
};

const ComputeKernel& FindKernel(std::string_view isa) {
  bool known = false;
  for (const ComputeKernel& kernel : kComputeKernels) {
    if (kernel.isa != isa) continue;
    known = true;
    if (kernel.available()) return kernel;
  }
  throw std::invalid_argument("isa is \"" + std::string(isa) + "\", " +
                              (known ? "which this host does not have" : "expected one of ComputeProbes()"));
}

/// Its flops.
double ComputeTurn(const ComputeKernel& kernel) {
  float sink = 0.0f;
  kernel.loop(kernel.steps_per_turn, &sink);
  std::uint32_t bits;
  std::memcpy(&bits, &sink, sizeof(bits));
  Keep(bits);
  return kernel.step_flops * static_cast<double>(kernel.steps_per_turn);
}

void CheckSeconds(double seconds) {
  if (!(seconds > 0.0 && seconds <= 60.0)) {
    throw std::invalid_argument("seconds is " + std::to_string(seconds) + ", expected a time in (0, 60]");
  }
}

std::int64_t FreeMemoryBytes() {
  std::ifstream info("/proc/meminfo");
  std::string key;
  std::int64_t kib = 0;
  for (std::string unit; info >> key >> kib; std::getline(info, unit)) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

}  // namespace

std::vector<ComputeProbe> ComputeProbes() {
  std::vector<ComputeProbe> probes;
  for (const ComputeKernel& kernel : kComputeKernels) {
    const bool available = kernel.available();
    if (!probes.empty() && probes.back().isa == kernel.isa) {
      if (!probes.back().available) probes.back() = {kernel.isa, kernel.instruction, available};
      continue;
    }
    probes.push_back({kernel.isa, kernel.instruction, available});
  }
  return probes;
}

double MeasureCompute(std::string_view isa, threadpool::Pool* pool, double seconds) {
  CheckSeconds(seconds);
  return 1e-9 * MeasureRate(pool, seconds, [&kernel = FindKernel(isa)](int) { return ComputeTurn(kernel); });
}

double MeasureBestCompute(std::string_view isa, threadpool::Pool* pool, double seconds) {
  CheckSeconds(seconds);
  return 1e-9 * MeasureBestRate(pool, seconds, 5e-4, [&kernel = FindKernel(isa)](int) { return ComputeTurn(kernel); });
}

class ReadProbe::Impl {
 public:
  Impl(threadpool::Pool* pool, std::int64_t bytes) : pool_(pool), shares_(pool == nullptr ? 1 : pool->num_threads()) {
    if (bytes < 0) throw std::invalid_argument("bytes is " + std::to_string(bytes) + ", expected 0 or more");
    if (bytes == 0) {
      bytes = std::min(std::max(std::int64_t{1} << 30, 4 * LastLevelCacheBytes()), FreeMemoryBytes() / 4);
    }
    const auto count = static_cast<std::int64_t>(shares_.size());
    share_bytes_ = std::max<std::int64_t>((bytes / count + kReadTurnBytes - 1) / kReadTurnBytes, 1) * kReadTurnBytes;
    bytes_ = share_bytes_ * count;
    void* memory = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(memory);
    madvise(memory, static_cast<std::size_t>(bytes_), MADV_HUGEPAGE);  // refused on some kernels; the reads work all the same
    try {
      // Written, since pages only read would all be the kernel's one page of zeros.
      OnAllWorkers(pool_, [&](int worker) { std::memset(Share(worker).data(), 1, Share(worker).size()); });
      ChooseLoop();
    } catch (...) {
      munmap(memory_, static_cast<std::size_t>(bytes_));
      throw;
    }
  }
  ~Impl() { munmap(memory_, static_cast<std::size_t>(bytes_)); }

  double Measure(double seconds) {
    Check(seconds);
    return 1e-9 * MeasureRate(pool_, seconds, [&](int worker) { return Turn(*loop_, worker); });
  }

  double MeasureBest(double seconds) {
    Check(seconds);
    return 1e-9 * MeasureBestRate(pool_, seconds, kWindow, [&](int worker) { return Turn(*loop_, worker); });
  }

  std::span<std::byte> Share(int worker) const {
    return {memory_ + worker * share_bytes_, static_cast<std::size_t>(share_bytes_)};
  }
  std::int64_t bytes() const { return bytes_; }
  const std::string& method() const { return method_; }

 private:
  static constexpr double kWindow = 5e-4;

  struct alignas(64) ShareState {
    std::int64_t turn = 0;  // the next one
  };

  void Check(double seconds) const {
    CheckSeconds(seconds);
    if (pool_ != nullptr && pool_->num_threads() != static_cast<int>(shares_.size())) {
      throw std::invalid_argument("the pool has " + std::to_string(pool_->num_threads()) + " threads, expected the " +
                                  std::to_string(shares_.size()) + " that it had when the probe was made");
    }
  }

  // Tries every loop twice and keeps the fastest.
  void ChooseLoop() {
    const ReadLoop* loops = HasAvx512() ? kReadAvx512 : HasAvx2() ? kReadAvx2 : kReadSse2;
    double best = 0.0;
    for (int i = 0; i < 2 * kReadLoops; ++i) {
      const ReadLoop& loop = loops[i % kReadLoops];
      const double rate = MeasureBestRate(pool_, 0.02, kWindow, [&](int worker) { return Turn(loop, worker); });
      if (rate > best) {
        best = rate;
        loop_ = &loop;
      }
    }
    method_ = loop_->name;
  }

  double Turn(const ReadLoop& loop, int worker) {
    std::int64_t& turn = shares_[static_cast<std::size_t>(worker)].turn;
    Keep(loop.read(Share(worker).data(), share_bytes_, turn));
    turn = turn + 1 < share_bytes_ / kReadTurnBytes ? turn + 1 : 0;
    return static_cast<double>(kReadTurnBytes);
  }

  threadpool::Pool* const pool_;
  std::vector<ShareState> shares_;
  std::int64_t share_bytes_ = 0;
  std::int64_t bytes_ = 0;
  std::byte* memory_ = nullptr;
  const ReadLoop* loop_ = nullptr;
  std::string method_;
};

ReadProbe::ReadProbe(threadpool::Pool* pool, std::int64_t bytes) : impl_(std::make_unique<Impl>(pool, bytes)) {}
ReadProbe::~ReadProbe() = default;
double ReadProbe::Measure(double seconds) { return impl_->Measure(seconds); }
double ReadProbe::MeasureBest(double seconds) { return impl_->MeasureBest(seconds); }
std::span<std::byte> ReadProbe::Share(int worker) const { return impl_->Share(worker); }
std::int64_t ReadProbe::bytes() const { return impl_->bytes(); }
const std::string& ReadProbe::method() const { return impl_->method(); }

std::int64_t LastLevelCacheBytes() {
  std::int64_t total = 0;
  std::set<std::string> seen;  // caches shared by several cores are listed under each of them
  const long cpus = sysconf(_SC_NPROCESSORS_CONF);
  for (long cpu = 0; cpu < cpus; ++cpu) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index3/";
    std::string sharers;
    std::int64_t kib = 0;
    if (!(std::ifstream(folder + "shared_cpu_list") >> sharers) || !(std::ifstream(folder + "size") >> kib)) continue;
    if (seen.insert(sharers).second) total += kib * 1024;
  }
  return total;
}

}  // namespace moesaic::bench
