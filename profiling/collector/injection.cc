// The collector as NVTX sees it: NVTX_INJECTION64_PATH names this library, and each copy of the NVTX headers in the process
// calls InitializeInjectionNvtx2 once.
//
// MOESAIC_NVTX_OUTPUT is where the reports go when the process ends; "%p" in it becomes the process id (a forked child without
// it adds its own). NAME.txt and NAME.csv are the summary, and with MOESAIC_NVTX_TRACE=1 NAME.trace.csv lists every range.
// Default: moesaic_nvtx.%p. Payloads of ranges, single numbers and those of the payload extension, stand in that list. A
// process in which no range was opened writes nothing.
#include <nvtx3/nvToolsExt.h>
#if __has_include(<nvtx3/nvToolsExtPayload.h>)  // NVTX 3.1 and later
#include <nvtx3/nvToolsExtPayload.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "profiling/collector/recorder.h"
#include "profiling/collector/report.h"

namespace moesaic::profiling::collector {
namespace {

pid_t first_pid = 0;

std::string OutputName() {
  const char* wanted = std::getenv("MOESAIC_NVTX_OUTPUT");
  std::string name = wanted == nullptr || *wanted == '\0' ? "moesaic_nvtx.%p" : wanted;
  const std::string pid = std::to_string(getpid());
  if (const std::size_t place = name.find("%p"); place != std::string::npos) return name.replace(place, 2, pid);
  return getpid() == first_pid ? name : name + "." + pid;
}

void WriteReports() {
  try {
    const Collected collected = Recorder::Get().Collect();
    const bool empty = [&] {
      for (const auto& thread : collected.threads) {
        if (!thread.ranges.empty()) return false;
      }
      const Losses& losses = collected.losses;
      return losses.over_capacity + losses.too_deep + losses.unbalanced_pops + losses.unfinished == 0;
    }();
    if (empty) return;
    const std::string name = OutputName();
    std::ofstream text(name + ".txt"), csv(name + ".csv");
    WriteSummaryText(collected, text);
    WriteSummaryCsv(collected, csv);
    const char* trace = std::getenv("MOESAIC_NVTX_TRACE");
    if (trace != nullptr && std::string_view(trace) == "1") {
      std::ofstream out(name + ".trace.csv");
      WriteTraceCsv(collected, out);
    }
  } catch (const std::exception&) {  // a program must not fail at its end because it was watched
  }
}

std::string Narrow(const wchar_t* wide) {
  std::string text;
  for (; wide != nullptr && *wide != 0; ++wide) {
    const auto c = static_cast<std::uint32_t>(static_cast<char32_t>(*wide));
    if (c < 0x80) {
      text += static_cast<char>(c);
    } else if (c < 0x800) {
      text += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      text += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    } else {
      text += {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
               static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    }
  }
  return text;
}

// Handles are numbers in disguise: nothing is allocated for them, and a wrong one cannot be followed. Zero is NVTX's own
// default domain, and "no string".
std::uint32_t DomainOf(nvtxDomainHandle_t handle) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(handle));
}

NameId NameOf(std::uint32_t domain, const nvtxEventAttributes_t* event) {
  Recorder& recorder = Recorder::Get();
  if (event == nullptr) return recorder.Name(domain, "");
  switch (event->messageType) {
    case NVTX_MESSAGE_TYPE_REGISTERED:
      return static_cast<NameId>(reinterpret_cast<std::uintptr_t>(event->message.registered));
    case NVTX_MESSAGE_TYPE_ASCII:
      return recorder.Name(domain, event->message.ascii == nullptr ? "" : event->message.ascii);
    case NVTX_MESSAGE_TYPE_UNICODE:
      return recorder.Name(domain, Narrow(event->message.unicode));
    default:
      return recorder.Name(domain, "");
  }
}

template <typename T>
Payload Number(FieldType type, T value) {
  // One schema a type, for the life of the process.
  static const std::uint32_t schema = Recorder::Get().AddSchema({{"", type, 0}});
  Payload payload{.schema = schema};
  std::memcpy(payload.bytes.data(), &value, sizeof value);
  return payload;
}

#ifdef NVTX_PAYLOAD_TYPE_EXT
// Identifiers of schemas, as programs see them, are numbers of the recorder's behind this one.
constexpr std::uint64_t kFirstSchema = NVTX_PAYLOAD_SCHEMA_ID_DYNAMIC_START;

Payload FirstOf(const nvtxPayloadData_t* data, std::size_t count) {
  Payload payload;
  // Schemas with numbers of the program's own choice are not looked up: the engine has none.
  if (data == nullptr || count == 0 || data->payload == nullptr || data->size == SIZE_MAX || data->schemaId <= kFirstSchema) {
    return payload;
  }
  payload.schema = static_cast<std::uint32_t>(data->schemaId - kFirstSchema);
  std::memcpy(payload.bytes.data(), data->payload, std::min(data->size, Payload::kMostBytes));
  return payload;
}
#endif

Payload PayloadOf(const nvtxEventAttributes_t* event) {
  if (event == nullptr) return {};
  switch (event->payloadType) {
    case NVTX_PAYLOAD_TYPE_UNSIGNED_INT64:
      return Number(FieldType::kUInt64, event->payload.ullValue);
    case NVTX_PAYLOAD_TYPE_INT64:
      return Number(FieldType::kInt64, event->payload.llValue);
    case NVTX_PAYLOAD_TYPE_DOUBLE:
      return Number(FieldType::kDouble, event->payload.dValue);
    case NVTX_PAYLOAD_TYPE_UNSIGNED_INT32:
      return Number(FieldType::kUInt32, event->payload.uiValue);
    case NVTX_PAYLOAD_TYPE_INT32:
      return Number(FieldType::kInt32, event->payload.iValue);
    case NVTX_PAYLOAD_TYPE_FLOAT:
      return Number(FieldType::kFloat, event->payload.fValue);
#ifdef NVTX_PAYLOAD_TYPE_EXT
    case NVTX_PAYLOAD_TYPE_EXT:
      return FirstOf(reinterpret_cast<const nvtxPayloadData_t*>(static_cast<std::uintptr_t>(event->payload.ullValue)),
                     event->reserved0 > 0 ? static_cast<std::size_t>(event->reserved0) : 0);
#endif
    default:
      return {};
  }
}

int PushName(std::uint32_t domain, NameId name, const Payload& payload = {}) {
  int level = 0;
  Recorder::Get().Push(domain, name, payload, &level);
  return level;
}

int PopFrom(std::uint32_t domain, const Payload& payload = {}) {
  int level = 0;
  Recorder::Get().Pop(domain, payload, &level);
  return level;
}

nvtxDomainHandle_t NVTX_API DomainCreateA(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(std::uintptr_t{Recorder::Get().AddDomain(name == nullptr ? "" : name)});
}
nvtxDomainHandle_t NVTX_API DomainCreateW(const wchar_t* name) { return DomainCreateA(Narrow(name).c_str()); }
nvtxStringHandle_t NVTX_API RegisterA(nvtxDomainHandle_t domain, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(
      std::uintptr_t{Recorder::Get().Name(DomainOf(domain), text == nullptr ? "" : text)});
}
nvtxStringHandle_t NVTX_API RegisterW(nvtxDomainHandle_t domain, const wchar_t* text) {
  return RegisterA(domain, Narrow(text).c_str());
}
int NVTX_API DomainPush(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  return PushName(DomainOf(domain), NameOf(DomainOf(domain), event), PayloadOf(event));
}
int NVTX_API DomainPop(nvtxDomainHandle_t domain) { return PopFrom(DomainOf(domain)); }
int NVTX_API PushEx(const nvtxEventAttributes_t* event) { return PushName(0, NameOf(0, event), PayloadOf(event)); }
int NVTX_API PushA(const char* text) { return PushName(0, Recorder::Get().Name(0, text == nullptr ? "" : text)); }
int NVTX_API PushW(const wchar_t* text) { return PushName(0, Recorder::Get().Name(0, Narrow(text))); }
int NVTX_API Pop() { return PopFrom(0); }

#ifdef NVTX_PAYLOAD_TYPE_EXT
/// Sizes and numbers of the types that a Field can have; size 0: another one.
std::pair<std::size_t, FieldType> TypeOf(std::uint64_t type) {
  switch (type) {
    case NVTX_PAYLOAD_ENTRY_TYPE_INT:
    case NVTX_PAYLOAD_ENTRY_TYPE_INT32:
      return {4, FieldType::kInt32};
    case NVTX_PAYLOAD_ENTRY_TYPE_UINT:
    case NVTX_PAYLOAD_ENTRY_TYPE_UINT32:
      return {4, FieldType::kUInt32};
    case NVTX_PAYLOAD_ENTRY_TYPE_LONG:
    case NVTX_PAYLOAD_ENTRY_TYPE_LONGLONG:
    case NVTX_PAYLOAD_ENTRY_TYPE_INT64:
      return {8, FieldType::kInt64};
    case NVTX_PAYLOAD_ENTRY_TYPE_ULONG:
    case NVTX_PAYLOAD_ENTRY_TYPE_ULONGLONG:
    case NVTX_PAYLOAD_ENTRY_TYPE_UINT64:
    case NVTX_PAYLOAD_ENTRY_TYPE_SIZE:
      return {8, FieldType::kUInt64};
    case NVTX_PAYLOAD_ENTRY_TYPE_FLOAT:
    case NVTX_PAYLOAD_ENTRY_TYPE_FLOAT32:
      return {4, FieldType::kFloat};
    case NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE:
    case NVTX_PAYLOAD_ENTRY_TYPE_FLOAT64:
      return {8, FieldType::kDouble};
    default:
      return {0, FieldType::kInt32};
  }
}

std::uint64_t NVTX_API RegisterSchema(nvtxDomainHandle_t /*domain*/, const nvtxPayloadSchemaAttr_t* schema) {
  constexpr std::uint64_t kNeeded = NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES;
  if (schema == nullptr || (schema->fieldMask & kNeeded) != kNeeded || schema->entries == nullptr) return 0;
  Schema fields;
  std::size_t end = 0;
  for (std::size_t i = 0; i < schema->numEntries; ++i) {
    const nvtxPayloadSchemaEntry_t& entry = schema->entries[i];
    const auto [size, type] = TypeOf(entry.type);
    // Past a text or an array nobody knows where a field without an offset is: what comes then is left out.
    if (size == 0 || entry.flags != 0) break;
    const std::size_t offset = i == 0 || entry.offset != 0 ? entry.offset : (end + size - 1) / size * size;
    if (offset > Payload::kMostBytes) break;
    fields.push_back({entry.name == nullptr ? "" : entry.name, type, offset});
    end = offset + size;
  }
  return kFirstSchema + Recorder::Get().AddSchema(std::move(fields));
}

int NVTX_API PushPayload(nvtxDomainHandle_t domain, const nvtxPayloadData_t* data, size_t count) {
  return PushName(DomainOf(domain), Recorder::Get().Name(DomainOf(domain), ""), FirstOf(data, count));
}
int NVTX_API PopPayload(nvtxDomainHandle_t domain, const nvtxPayloadData_t* data, size_t count) {
  return PopFrom(DomainOf(domain), FirstOf(data, count));
}
#endif

void ReportAtExit() {
  static std::once_flag once;
  std::call_once(once, [] {
    first_pid = getpid();
    Recorder::Get();
    std::atexit(WriteReports);
  });
}

template <typename Function>
void Install(NvtxFunctionTable table, unsigned size, unsigned id, Function* function) {
  if (id < size && table[id] != nullptr) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace
}  // namespace moesaic::profiling::collector

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  namespace collector = moesaic::profiling::collector;
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr) return 0;
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  collector::Install(table, size, NVTX_CBID_CORE_RangePushEx, &collector::PushEx);
  collector::Install(table, size, NVTX_CBID_CORE_RangePushA, &collector::PushA);
  collector::Install(table, size, NVTX_CBID_CORE_RangePushW, &collector::PushW);
  collector::Install(table, size, NVTX_CBID_CORE_RangePop, &collector::Pop);
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  collector::Install(table, size, NVTX_CBID_CORE2_DomainCreateA, &collector::DomainCreateA);
  collector::Install(table, size, NVTX_CBID_CORE2_DomainCreateW, &collector::DomainCreateW);
  collector::Install(table, size, NVTX_CBID_CORE2_DomainRegisterStringA, &collector::RegisterA);
  collector::Install(table, size, NVTX_CBID_CORE2_DomainRegisterStringW, &collector::RegisterW);
  collector::Install(table, size, NVTX_CBID_CORE2_DomainRangePushEx, &collector::DomainPush);
  collector::Install(table, size, NVTX_CBID_CORE2_DomainRangePop, &collector::DomainPop);
  collector::ReportAtExit();
  return 1;
}

#ifdef NVTX_PAYLOAD_TYPE_EXT
/// The same for extensions of NVTX: of payloads alone.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t* module) {
  namespace collector = moesaic::profiling::collector;
  if (module == nullptr || module->moduleId != NVTX_EXT_PAYLOAD_MODULEID || module->segmentsCount == 0) return 0;
  const auto install = [slots = module->segments[0].functionSlots, count = module->segments[0].slotCount](auto id,
                                                                                                          auto* function) {
    if (static_cast<std::size_t>(id) < count) slots[id] = reinterpret_cast<std::intptr_t>(function);
  };
  install(NVTX3EXT_CBID_nvtxPayloadSchemaRegister, &collector::RegisterSchema);
  install(NVTX3EXT_CBID_nvtxRangePushPayload, &collector::PushPayload);
  install(NVTX3EXT_CBID_nvtxRangePopPayload, &collector::PopPayload);
  collector::ReportAtExit();
  return 1;
}
#endif
