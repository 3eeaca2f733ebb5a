// Memory on one NUMA node.
#pragma once

#include <cstdint>
#include <string>

namespace moesaic::threadpool {

/// Owns `bytes` of zeroed pages of its own, 2 MiB aligned where they are that many and in huge pages where the system gives
/// them. Throws std::bad_alloc where they cannot be had.
///
/// They are meant for a node: where the system permits (mbind, MPOL_PREFERRED), each page comes to lie there whoever touches it
/// first, as long as that node has memory left. Where it does not (a container's filter of system calls, a kernel without
/// NUMA), a page lies on the node of the thread that touches it first: let threads of the node do it (TaskGraph::KeepOnNodes).
class NodeMemory {
 public:
  NodeMemory() = default;
  /// @param os_node  the operating system's number of the node; -1: no matter
  NodeMemory(std::int64_t bytes, int os_node);
  NodeMemory(NodeMemory&& other) noexcept;
  NodeMemory& operator=(NodeMemory&& other) noexcept;
  ~NodeMemory();

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  /// The system took the node as advice.
  bool bound() const { return bound_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::int64_t mapped_bytes_ = 0;
  bool bound_ = false;
};

/// The node (the operating system's number) on which the page of `address` lies; a negative number where it has not been
/// touched, or where the system does not say.
int NodeOfPage(const void* address);

/// Why NodeMemory cannot bind pages to this node: the system's reason, e.g. "Operation not permitted"; empty: it can.
std::string WhyNotBound(int os_node);

}  // namespace moesaic::threadpool
