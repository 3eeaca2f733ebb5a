#include "profiling/nvtx.h"

#include <nvtx3/nvToolsExt.h>
#if __has_include(<nvtx3/nvToolsExtPayload.h>)  // NVTX 3.1 and later
#include <nvtx3/nvToolsExtPayload.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
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

std::mutex mutex;                  // guards what follows until `state` is published
nvtxDomainHandle_t domain = {};    // written once, before `state` leaves kUnknown
std::uint64_t payload_schema = 0;  // likewise; 0: the tool (or these headers) has no payloads of several fields

std::uint64_t RegisterPayload() {
#ifdef NVTX_PAYLOAD_TYPE_EXT
  const auto entry = [](std::uint64_t type, const char* name, std::size_t offset) {
    nvtxPayloadSchemaEntry_t made{};
    made.type = type;
    made.name = name;
    made.offset = offset;
    return made;
  };
  const nvtxPayloadSchemaEntry_t entries[] = {
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "expert", offsetof(Payload, expert)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "rows", offsetof(Payload, rows)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE, "flops", offsetof(Payload, flops)),
      entry(NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE, "bytes", offsetof(Payload, bytes)),
  };
  nvtxPayloadSchemaAttr_t schema{};
  schema.fieldMask = NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE |
                     NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES |
                     NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_STATIC_SIZE;
  schema.name = "moesaic task";
  schema.type = NVTX_PAYLOAD_SCHEMA_TYPE_STATIC;
  schema.entries = entries;
  schema.numEntries = std::size(entries);
  schema.payloadStaticSize = sizeof(Payload);
  return nvtxPayloadSchemaRegister(domain, &schema);
#else
  return 0;
#endif
}

}  // namespace

State FindTool() {
  const std::lock_guard lock(mutex);
  if (state.load(std::memory_order_relaxed) == State::kUnknown) {
    // Without a tool every NVTX function returns at once, this one a null handle.
    domain = nvtxDomainCreateA("moesaic");
    if (domain != nullptr) payload_schema = RegisterPayload();
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

void Push(const Event& event, TaskSubject subject, double flops, double bytes) {
  nvtxEventAttributes_t attributes = event.attributes;
#ifdef NVTX_PAYLOAD_TYPE_EXT
  if (payload_schema != 0 && (subject.expert >= 0 || flops > 0 || bytes > 0)) {
    const Payload payload{subject.expert, subject.rows, flops, bytes};
    const nvtxPayloadData_t data{payload_schema, sizeof payload, &payload};
    attributes.payloadType = NVTX_PAYLOAD_TYPE_EXT;
    attributes.reserved0 = 1;  // payloads
    attributes.payload.ullValue = reinterpret_cast<std::uintptr_t>(&data);
    nvtxDomainRangePushEx(domain, &attributes);
    return;
  }
#endif
  if (subject.expert >= 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = static_cast<std::uint64_t>(subject.expert) << 32 | static_cast<std::uint32_t>(subject.rows);
  }
  nvtxDomainRangePushEx(domain, &attributes);
}

void Pop() { nvtxDomainRangePop(domain); }

void NameThread(int lane) noexcept {
  char name[32];
  std::snprintf(name, sizeof name, "moesaic worker %d", lane);
  nvtxNameOsThreadA(static_cast<std::uint32_t>(syscall(SYS_gettid)), name);
}

}  // namespace moesaic::profiling::nvtx
