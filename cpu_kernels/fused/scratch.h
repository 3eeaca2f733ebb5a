// Memory that a call of fused layers uses and leaves for the next one.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu_kernels/aligned_buffer.h"

namespace moesaic::fused {

/// What the last call left, for the next one to use again; a call that finds none makes its own. Throws std::bad_alloc.
class Scratch {
 public:
  /// @param keep  whether it stays for the next call
  explicit Scratch(std::int64_t bytes, bool keep = true);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return static_cast<char*>(buffer_->data()); }

 private:
  std::unique_ptr<AlignedBuffer> buffer_;
  const bool keep_;
};

/// Whether a call that takes so many bytes leaves them for the next one.
inline bool IsKept(std::int64_t bytes, std::int64_t threads) {
  constexpr std::int64_t kMost = std::int64_t{64} << 20, kMostOfThread = std::int64_t{8} << 20;
  return bytes <= kMost + threads * kMostOfThread;
}

/// Frees the scratch memory that past calls left for the next: at most 64 MiB and 8 MiB a thread.
void ReleaseScratch();

}  // namespace moesaic::fused
