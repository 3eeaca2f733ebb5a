// A minimal NVTX tool: writes one line for each push and pop of each domain to the file named by NVTX_RECORDER_OUTPUT.
//
//   domain moesaic | push moesaic backward D3_gemm <payload> | pop moesaic
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct Domain {
  std::string name;
  std::map<std::uint32_t, std::string> categories;
};

std::mutex mutex;
std::deque<Domain> domains;       // stable addresses: they are the handles
std::deque<std::string> strings;  // likewise
std::vector<std::vector<nvtxPayloadSchemaEntry_t>> schemas;

void Write(const std::string& line) {
  static FILE* file = std::fopen(std::getenv("NVTX_RECORDER_OUTPUT"), "w");
  std::fprintf(file, "%s\n", line.c_str());
  std::fflush(file);
}

Domain& ToDomain(nvtxDomainHandle_t handle) { return *reinterpret_cast<Domain*>(handle); }

nvtxDomainHandle_t NVTX_API DomainCreate(const char* name) {
  const std::lock_guard lock(mutex);
  Write(std::string("domain ") + name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domains.emplace_back(Domain{name, {}}));
}

void NVTX_API NameCategory(nvtxDomainHandle_t domain, std::uint32_t category, const char* name) {
  const std::lock_guard lock(mutex);
  ToDomain(domain).categories[category] = name;
}

nvtxStringHandle_t NVTX_API RegisterString(nvtxDomainHandle_t /*domain*/, const char* text) {
  const std::lock_guard lock(mutex);
  return reinterpret_cast<nvtxStringHandle_t>(&strings.emplace_back(text));
}

// The fields of a payload, each after a space.
std::string PayloadOf(const nvtxEventAttributes_t* event) {
  if (event->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64)
    return std::string(" ").append(std::to_string(event->payload.ullValue));
  if (event->payloadType != NVTX_PAYLOAD_TYPE_EXT) return "";
  const auto* data = reinterpret_cast<const nvtxPayloadData_t*>(static_cast<std::uintptr_t>(event->payload.ullValue));
  std::string text;
  for (const nvtxPayloadSchemaEntry_t& entry : schemas.at(data->schemaId - 1)) {
    const char* place = static_cast<const char*>(data->payload) + entry.offset;
    std::int32_t whole = 0;
    double number = 0;
    if (entry.type == NVTX_PAYLOAD_ENTRY_TYPE_INT32) number = *static_cast<std::int32_t*>(std::memcpy(&whole, place, 4));
    if (entry.type == NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE) std::memcpy(&number, place, 8);
    text.append(" ").append(std::to_string(static_cast<long>(number)));
  }
  return text;
}

std::uint64_t NVTX_API RegisterSchema(nvtxDomainHandle_t /*domain*/, const nvtxPayloadSchemaAttr_t* schema) {
  const std::lock_guard lock(mutex);
  schemas.emplace_back(schema->entries, schema->entries + schema->numEntries);
  return schemas.size();
}

int NVTX_API Push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const std::lock_guard lock(mutex);
  const bool registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  Write("push " + ToDomain(domain).name + " " + ToDomain(domain).categories[event->category] + " " +
        (registered ? *reinterpret_cast<std::string*>(event->message.registered) : "(not registered)") + PayloadOf(event));
  return 0;
}

int NVTX_API Pop(nvtxDomainHandle_t domain) {
  const std::lock_guard lock(mutex);
  Write("pop " + ToDomain(domain).name);
  return 0;
}

template <typename Function>
void Install(NvtxFunctionTable table, unsigned size, unsigned id, Function* function) {
  if (id < size && table[id] != nullptr) {
    *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  }
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
    return 0;
  }
  Install(table, size, NVTX_CBID_CORE2_DomainCreateA, &DomainCreate);
  Install(table, size, NVTX_CBID_CORE2_DomainNameCategoryA, &NameCategory);
  Install(table, size, NVTX_CBID_CORE2_DomainRegisterStringA, &RegisterString);
  Install(table, size, NVTX_CBID_CORE2_DomainRangePushEx, &Push);
  Install(table, size, NVTX_CBID_CORE2_DomainRangePop, &Pop);
  return 1;
}

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t* module) {
  if (module->moduleId != NVTX_EXT_PAYLOAD_MODULEID || std::getenv("NVTX_RECORDER_PAYLOADS") != std::string_view("yes"))
    return 0;
  module->segments->functionSlots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] = reinterpret_cast<std::intptr_t>(&RegisterSchema);
  return 1;
}
