// A minimal NVTX tool: writes one line for each push and pop of each domain to the file named by NVTX_RECORDER_OUTPUT.
//
//   domain moesaic | category 1 forward | push D3_gemm backward | pop
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Domain {
  std::string name;
  std::map<std::uint32_t, std::string> categories;
};

std::mutex mutex;
std::deque<Domain> domains;       // stable addresses: they are the handles
std::deque<std::string> strings;  // likewise

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

int NVTX_API Push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const std::lock_guard lock(mutex);
  const bool registered = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  Write("push " + ToDomain(domain).name + " " + ToDomain(domain).categories[event->category] + " " +
        (registered ? *reinterpret_cast<std::string*>(event->message.registered) : "(not registered)"));
  return 0;
}

int NVTX_API Pop(nvtxDomainHandle_t domain) {
  const std::lock_guard lock(mutex);
  Write("pop " + ToDomain(domain).name);
  return 0;
}

void NVTX_API Mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const std::lock_guard lock(mutex);
  Write("mark " + ToDomain(domain).name + " " + ToDomain(domain).categories[event->category] + " " +
        *reinterpret_cast<std::string*>(event->message.registered) + " " +
        std::to_string(static_cast<long>(event->payload.dValue)));
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
  Install(table, size, NVTX_CBID_CORE2_DomainMarkEx, &Mark);
  return 1;
}
