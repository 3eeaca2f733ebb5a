#include "threadpool/node_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

namespace moesaic::threadpool {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
constexpr int kMaxNodes = 1024;  // the most that Linux can be configured for
constexpr int kMaskBits = sizeof(unsigned long) * CHAR_BIT;

/// 0, or the number of the error. By the system call itself: libnuma would be one more dependency for it.
int Prefer(void* data, std::int64_t bytes, int os_node) {
  if (os_node < 0 || os_node >= kMaxNodes) return EINVAL;
  std::array<unsigned long, kMaxNodes / kMaskBits> mask{};
  mask[os_node / kMaskBits] = 1ul << (os_node % kMaskBits);
  // The kernel takes the number of bits plus one.
  const long result =
      syscall(SYS_mbind, data, static_cast<unsigned long>(bytes), MPOL_PREFERRED, mask.data(), kMaxNodes + 1, 0);
  return result == 0 ? 0 : errno;
}

}  // namespace

NodeMemory::NodeMemory(std::int64_t bytes, int os_node) : bytes_(bytes) {
  if (bytes <= 0) return;
  const std::int64_t page = sysconf(_SC_PAGESIZE), alignment = bytes >= kHugePage ? kHugePage : page;
  const std::int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
  mapped_bytes_ = rounded + alignment - page;
  void* mapping =
      mmap(nullptr, static_cast<std::size_t>(mapped_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = mapping;
  const auto offset =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(mapping) % static_cast<std::uint64_t>(alignment));
  data_ = static_cast<char*>(mapping) + (offset == 0 ? 0 : alignment - offset);
  // Advice only, both. A small piece keeps out of huge pages: one would hold its neighbours too, which another node may touch
  // first.
  madvise(data_, static_cast<std::size_t>(rounded), bytes >= kHugePage ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  if (os_node >= 0) bound_ = Prefer(data_, rounded, os_node) == 0;
}

NodeMemory::NodeMemory(NodeMemory&& other) noexcept { *this = std::move(other); }

NodeMemory& NodeMemory::operator=(NodeMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(bound_, other.bound_);
  return *this;
}

NodeMemory::~NodeMemory() {
  if (mapping_ != nullptr) munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
}

int NodeOfPage(const void* address) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* pages[1] = {reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(address) / page * page)};
  int status = 0;
  // Without target nodes it moves nothing and tells where the pages are.
  if (syscall(SYS_move_pages, 0, 1ul, pages, nullptr, &status, 0) != 0) return -errno;
  return status;
}

std::string WhyNotBound(int os_node) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  void* data = mmap(nullptr, static_cast<std::size_t>(page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  const int error = Prefer(data, page, os_node);
  munmap(data, static_cast<std::size_t>(page));
  return error == 0 ? "" : std::strerror(error);
}

}  // namespace moesaic::threadpool
