// The NVTX side of a range: domain "moesaic", one registered string for each name, one category for each category's name.
//
// Two implementations: nvtx.cc over the nvtx3 headers, and nvtx_absent.cc where they were not found.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
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

/// Only where Active(). Throws std::bad_alloc. A tool sees few categories: "LoRA", "forward" and "backward" of phases, and of
/// other ranges their own ("fused", "sample", "layer", "pool", "run").
const Event* MakeEvent(const std::string& name, const std::string& category);

/// What a range inside a task, or one that counts its work, tells a tool beside its name: a payload of NVTX's extension with
/// these fields and their names. A tool that knows no such payloads gets expert << 32 | rows, an unsigned integer, of ranges
/// inside tasks.
struct Payload {
  std::int32_t expert;  ///< -1: none
  std::int32_t rows;
  double flops;
  double bytes;
};

/// Only where Active(). Pushes and pops on the calling thread nest.
void Push(const Event& event, TaskSubject subject, double flops = 0, double bytes = 0);
void Pop();

/// A range that tools see and timers do not count. `event` is made by the first one that opens.
class ToolRange {
 public:
  ToolRange(std::atomic<const Event*>& event, const char* name, const char* category) noexcept : open_(Active()) {
    if (!open_) return;
    const Event* made = event.load(std::memory_order_acquire);
    try {
      if (made == nullptr) event.store(made = MakeEvent(name, category), std::memory_order_release);
      Push(*made, {});
    } catch (const std::bad_alloc&) {  // a tool may miss a range; the work that it watches goes on
      open_ = false;
    }
  }
  ~ToolRange() {
    if (open_) Pop();
  }
  ToolRange(const ToolRange&) = delete;
  ToolRange& operator=(const ToolRange&) = delete;

 private:
  bool open_;
};

/// For measurements of what a tool costs: hides the tool that is there from ranges that open from now on, or shows it again.
/// Only while no range is open. Returns whether there is a tool.
bool Mute(bool muted);

/// Only where Active(): the calling thread is "moesaic worker <lane>" from now on.
void NameThread(int lane) noexcept;

}  // namespace moesaic::profiling::nvtx
