// Opens NVTX ranges in the way that the first argument names; test_nvtx_collector.py looks at what the collector reports.
#include <nvtx3/nvToolsExt.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

nvtxEventAttributes_t Attributes(nvtxStringHandle_t name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = name;
  return attributes;
}

void Many(int threads, int each) {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("many");
  std::vector<nvtxEventAttributes_t> names;
  for (const char* name : {"a", "b, quoted \"c\"", "d"}) names.push_back(Attributes(nvtxDomainRegisterStringA(domain, name)));
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      for (int i = 0; i < each; i += 2) {
        nvtxDomainRangePushEx(domain, &names[static_cast<std::size_t>(i) % 3]);
        nvtxRangePushA("inner");
        nvtxRangePop();
        nvtxDomainRangePop(domain);
      }
    });
  }
  for (std::thread& thread : all) thread.join();
}

void Malformed() {
  nvtxRangePop();
  nvtxDomainHandle_t domain = nvtxDomainCreateA("odd");
  nvtxDomainRangePop(domain);
  nvtxRangePushA("left open");
  nvtxEventAttributes_t nameless{};
  nvtxDomainRangePushEx(domain, &nameless);
  nvtxDomainRangePop(domain);
  nvtxEventAttributes_t wrong = Attributes(reinterpret_cast<nvtxStringHandle_t>(std::uintptr_t{123456789}));
  nvtxDomainRangePushEx(domain, &wrong);
  nvtxDomainRangePop(domain);
  nvtxRangePushA(nullptr);
  nvtxRangePop();
  nvtxRangePushW(L"w\u00efde");
  nvtxRangePop();
  // Crossing pops of two domains: each closes its own.
  nvtxRangePushA("outer");
  nvtxEventAttributes_t crossing = Attributes(nvtxDomainRegisterStringA(domain, "crossing"));
  nvtxDomainRangePushEx(domain, &crossing);
  nvtxRangePop();
  nvtxDomainRangePop(domain);
  for (int i = 0; i < 3000; ++i) nvtxRangePushA("deep");
  for (int i = 0; i < 3000; ++i) nvtxRangePop();
}

void Forked() {
  nvtxRangePushA("around");
  nvtxRangePushA("parent");
  nvtxRangePop();
  const pid_t child = fork();
  if (child == 0) {
    nvtxRangePushA("child");
    nvtxRangePop();
    nvtxRangePop();
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  nvtxRangePop();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view way = argc > 1 ? argv[1] : "";
  if (way == "many") Many(std::stoi(argv[2]), std::stoi(argv[3]));
  if (way == "malformed") Malformed();
  if (way == "fork") Forked();
  if (way == "exit") {  // in a range, with a thread that is inside one too
    std::thread([] {
      for (;;) {
        nvtxRangePushA("endless");
        nvtxRangePop();
      }
    }).detach();
    nvtxRangePushA("done");
    usleep(20000);
    nvtxRangePop();
    nvtxRangePushA("open at exit");
    std::exit(3);
  }
  return 0;
}
