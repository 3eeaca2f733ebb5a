#include "cpu_kernels/fused/scratch.h"

#include <atomic>

namespace moesaic::fused {
namespace {

std::atomic<AlignedBuffer*> g_scratch{nullptr};

}  // namespace

Scratch::Scratch(std::int64_t bytes, bool keep) : buffer_(g_scratch.exchange(nullptr)), keep_(keep) {
  if (buffer_ == nullptr) buffer_ = std::make_unique<AlignedBuffer>();
  buffer_->Ensure(bytes);
}
Scratch::~Scratch() {
  if (keep_) delete g_scratch.exchange(buffer_.release());
}

void ReleaseScratch() { delete g_scratch.exchange(nullptr); }

}  // namespace moesaic::fused
