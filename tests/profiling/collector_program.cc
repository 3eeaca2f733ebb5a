// Opens NVTX ranges in the way that the first argument names; test_nvtx_collector.py looks at what the collector reports.
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
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

// The first field of a list of numbers and texts, as NVTX's payload extension describes them.
nvtxPayloadSchemaEntry_t Entry(std::uint64_t type, const char* name, std::uint64_t offset = 0, std::uint64_t flags = 0) {
  nvtxPayloadSchemaEntry_t entry{};
  entry.type = type;
  entry.name = name;
  entry.offset = offset;
  entry.flags = flags;
  return entry;
}

std::uint64_t Register(nvtxDomainHandle_t domain, const std::vector<nvtxPayloadSchemaEntry_t>& entries) {
  nvtxPayloadSchemaAttr_t schema{};
  schema.fieldMask =
      NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES;
  schema.type = NVTX_PAYLOAD_SCHEMA_TYPE_STATIC;
  schema.entries = entries.data();
  schema.numEntries = entries.size();
  return nvtxPayloadSchemaRegister(domain, &schema);
}

void PushWith(nvtxDomainHandle_t domain, const char* name, std::uint64_t schema, const void* data, std::size_t size,
              std::int32_t count = 1) {
  nvtxEventAttributes_t attributes = Attributes(nvtxDomainRegisterStringA(domain, name));
  const nvtxPayloadData_t payload{schema, size, data};
  attributes.payloadType = NVTX_PAYLOAD_TYPE_EXT;
  attributes.reserved0 = count;
  attributes.payload.ullValue = reinterpret_cast<std::uintptr_t>(&payload);
  nvtxDomainRangePushEx(domain, &attributes);
}

void Payloads() {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("payloads");
  struct {
    std::int32_t a = -7;
    double b = 1.5;
    float c = 0.25f;
    char text[100] = "behind it nobody looks";
  } data;
  const std::uint64_t schema =
      Register(domain, {Entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "a"), Entry(NVTX_PAYLOAD_ENTRY_TYPE_DOUBLE, "b"),
                        Entry(NVTX_PAYLOAD_ENTRY_TYPE_FLOAT, "c", offsetof(decltype(data), c)),
                        Entry(NVTX_PAYLOAD_ENTRY_TYPE_CSTRING, "text"), Entry(NVTX_PAYLOAD_ENTRY_TYPE_INT32, "unknown place")});
  PushWith(domain, "fields", schema, &data, sizeof data);
  nvtxDomainRangePop(domain);
  PushWith(domain, "cut off", schema, &data, 4);
  nvtxDomainRangePop(domain);
  PushWith(domain, "no data", schema, nullptr, sizeof data);
  nvtxDomainRangePop(domain);
  PushWith(domain, "no payloads", schema, &data, sizeof data, -1);
  nvtxDomainRangePop(domain);
  PushWith(domain, "unknown size", schema, &data, SIZE_MAX);
  nvtxDomainRangePop(domain);
  PushWith(domain, "unknown schema", schema + 77, &data, sizeof data);
  nvtxDomainRangePop(domain);
  if (nvtxPayloadSchemaRegister(domain, nullptr) != 0) std::exit(9);
  nvtxEventAttributes_t number = Attributes(nvtxDomainRegisterStringA(domain, "a number"));
  number.payloadType = NVTX_PAYLOAD_TYPE_DOUBLE;
  number.payload.dValue = 2.5;
  nvtxDomainRangePushEx(domain, &number);
  nvtxDomainRangePop(domain);
  // Known at the end only; and more ends than beginnings.
  const nvtxPayloadData_t late{schema, sizeof data, &data};
  nvtxEventAttributes_t plain = Attributes(nvtxDomainRegisterStringA(domain, "at its end"));
  nvtxDomainRangePushEx(domain, &plain);
  nvtxRangePopPayload(domain, &late, 1);
  nvtxRangePopPayload(domain, &late, 1);
  nvtxRangePushPayload(domain, &late, 1);
  nvtxRangePopPayload(domain, nullptr, 0);
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
  if (way == "payloads") Payloads();
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
