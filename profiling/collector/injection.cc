// The collector as NVTX sees it: NVTX_INJECTION64_PATH names this library, and each copy of the NVTX headers in the process
// calls InitializeInjectionNvtx2 once.
//
// MOESAIC_NVTX_OUTPUT is where the reports go when the process ends; "%p" in it becomes the process id (a forked child without
// it adds its own). NAME.txt and NAME.csv are the summary, and with MOESAIC_NVTX_TRACE=1 NAME.trace.csv lists every range.
// Default: moesaic_nvtx.%p. A process in which no range was opened writes nothing.
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>

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
      return collected.losses.unbalanced_pops == 0 && collected.losses.unfinished == 0;
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

int PushName(std::uint32_t domain, NameId name) {
  int level = 0;
  Recorder::Get().Push(domain, name, &level);
  return level;
}

int PopFrom(std::uint32_t domain) {
  int level = 0;
  Recorder::Get().Pop(domain, &level);
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
  return PushName(DomainOf(domain), NameOf(DomainOf(domain), event));
}
int NVTX_API DomainPop(nvtxDomainHandle_t domain) { return PopFrom(DomainOf(domain)); }
int NVTX_API PushEx(const nvtxEventAttributes_t* event) { return PushName(0, NameOf(0, event)); }
int NVTX_API PushA(const char* text) { return PushName(0, Recorder::Get().Name(0, text == nullptr ? "" : text)); }
int NVTX_API PushW(const wchar_t* text) { return PushName(0, Recorder::Get().Name(0, Narrow(text))); }
int NVTX_API Pop() { return PopFrom(0); }

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
  static std::once_flag once;
  std::call_once(once, [] {
    collector::first_pid = getpid();
    collector::Recorder::Get();
    std::atexit(collector::WriteReports);
  });
  return 1;
}
