// Memory for tiles: 64-byte aligned, in huge pages where it is large and the system gives them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace moesaic {

/// Owns `bytes` of uninitialised memory. Throws std::bad_alloc where it cannot be had.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0) return;
    constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
    const std::int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const auto rounded = static_cast<std::size_t>((bytes + alignment - 1) / alignment * alignment);
    data_ = std::aligned_alloc(static_cast<std::size_t>(alignment), rounded);
    if (data_ == nullptr) throw std::bad_alloc();
    // Advice only: without it, or where the system refuses, 4 KB pages serve.
    if (bytes >= kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~AlignedBuffer() { std::free(data_); }

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

  /// Makes it at least this large; the contents are lost when it grows.
  void Ensure(std::int64_t bytes) {
    if (bytes <= bytes_) return;
    *this = AlignedBuffer();
    *this = AlignedBuffer(bytes);
  }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Hands out consecutive 64-byte aligned pieces of a buffer; with a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* Take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  std::int64_t used() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

}  // namespace moesaic
