// The NVTX side of a range: domain "moesaic", one registered string for each name, one category for each category's name.
//
// Two implementations: nvtx.cc over the nvtx3 headers, and nvtx_absent.cc where they were not found.
#pragma once

#include <atomic>
#include <string>

#include "profiling/trace.h"

namespace moesaic::profiling::nvtx {

/// What a range pushes; made once for each registered range and kept for the life of the process.
struct Event;

enum class State { kUnknown, kNoTool, kTool };

/// kUnknown until the first range opens: NVTX looks for a tool (NVTX_INJECTION64_PATH) once, at its first call, and that
/// should not happen while the program is being loaded.
extern std::atomic<State> state;

/// Asks NVTX whether a tool is there. Thread safe; the answer never changes afterwards.
State FindTool();

/// True where ranges have to be pushed. A load and a predicted branch without a tool.
inline bool Active() {
  State now = state.load(std::memory_order_acquire);
  if (now == State::kUnknown) {
    now = FindTool();
  }
  return now == State::kTool;
}

/// Only where Active(). Throws std::bad_alloc.
const Event* MakeEvent(const std::string& name, const std::string& category);

/// Only where Active(). Pushes and pops on the calling thread nest. The payload of a range inside a task is
/// expert << 32 | rows.
void Push(const Event& event, TaskScope::Subject subject);
void Pop();

/// Only where Active(): the calling thread is "moesaic worker <lane>" from now on.
void NameThread(int lane) noexcept;

}  // namespace moesaic::profiling::nvtx
