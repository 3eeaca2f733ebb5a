#include "profiling/nvtx.h"

#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>

namespace moesaic::profiling::nvtx {

struct Event {
  nvtxEventAttributes_t attributes;
};

std::atomic<State> state{State::kUnknown};

namespace {

// What a phase is part of, for tools: its own category names its parent phase.
std::string GroupOf(const std::string& name, const std::string& category) {
  if (name.find("lora") != std::string::npos || category.find("lora") != std::string::npos) return "LoRA";
  if (category == "forward" || name == "forward") return "forward";
  if (category.starts_with("backward") || name == "backward") return "backward";
  return category;
}

std::mutex mutex;                // guards what follows until `state` is published
nvtxDomainHandle_t domain = {};  // written once, before `state` leaves kUnknown

}  // namespace

State FindTool() {
  const std::lock_guard lock(mutex);
  if (state.load(std::memory_order_relaxed) == State::kUnknown) {
    // Without a tool every NVTX function returns at once, this one a null handle.
    domain = nvtxDomainCreateA("moesaic");
    state.store(domain != nullptr ? State::kTool : State::kNoTool, std::memory_order_release);
  }
  return state.load(std::memory_order_relaxed);
}

bool Mute(bool muted) {
  FindTool();
  const std::lock_guard lock(mutex);
  if (domain != nullptr) state.store(muted ? State::kNoTool : State::kTool, std::memory_order_release);
  return domain != nullptr;
}

const Event* MakeEvent(const std::string& name, const std::string& category) {
  static std::map<std::string, std::uint32_t>& categories = *new std::map<std::string, std::uint32_t>;
  const std::lock_guard lock(mutex);
  // Zero means "no category" to NVTX.
  const auto [entry, is_new] =
      categories.try_emplace(GroupOf(name, category), static_cast<std::uint32_t>(categories.size() + 1));
  if (is_new) {
    nvtxDomainNameCategoryA(domain, entry->second, entry->first.c_str());
  }
  auto* event = new Event{};
  event->attributes.version = NVTX_VERSION;
  event->attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event->attributes.category = entry->second;
  event->attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  event->attributes.message.registered = nvtxDomainRegisterStringA(domain, name.c_str());
  return event;
}

void Push(const Event& event, TaskScope::Subject subject) {
  if (subject.expert < 0) {
    nvtxDomainRangePushEx(domain, &event.attributes);
    return;
  }
  nvtxEventAttributes_t attributes = event.attributes;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  attributes.payload.ullValue = static_cast<std::uint64_t>(subject.expert) << 32 | static_cast<std::uint32_t>(subject.rows);
  nvtxDomainRangePushEx(domain, &attributes);
}

void Pop() { nvtxDomainRangePop(domain); }

void MarkFlops(const Event& event, double flops) {
  nvtxEventAttributes_t attributes = event.attributes;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_DOUBLE;
  attributes.payload.dValue = flops;
  nvtxDomainMarkEx(domain, &attributes);
}

void NameThread(int lane) noexcept {
  char name[32];
  std::snprintf(name, sizeof name, "moesaic worker %d", lane);
  nvtxNameOsThreadA(static_cast<std::uint32_t>(syscall(SYS_gettid)), name);
}

}  // namespace moesaic::profiling::nvtx
