// What the collector keeps of the ranges that it is told of: names, one buffer of records a thread, the open ranges of each.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace moesaic::profiling::collector {

/// What a range said of itself beside its name: some fields in binary, as NVTX's payload extension describes them. Other
/// payloads, single numbers, have one field without a name.
struct Payload {
  static constexpr std::size_t kMostBytes = 24;

  std::uint32_t schema = 0;  ///< of Recorder::AddSchema; 0: no payload
  std::array<std::byte, kMostBytes> bytes{};
};

enum class FieldType : std::uint8_t { kInt32, kUInt32, kInt64, kUInt64, kFloat, kDouble };

struct Field {
  std::string name;
  FieldType type;
  std::size_t offset;
};
using Schema = std::vector<Field>;

/// A field's value.
double ValueOf(const Field& field, const Payload& payload);

/// A name as reports show it: "domain:text", and ":text" in the default domain.
using NameId = std::uint32_t;

struct RangeRecord {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::uint64_t id;
  std::uint64_t parent;  ///< the range of the same thread and domain around it; 0: none
  NameId name;
  std::uint32_t level;  ///< ranges of the same thread and domain around it
  Payload payload;
};

/// Counts of what could not be recorded.
struct Losses {
  std::int64_t over_capacity = 0;    ///< closed after the memory for records was used up
  std::int64_t unbalanced_pops = 0;  ///< without an open range
  std::int64_t too_deep = 0;         ///< more than kMaxDepth were open on the thread
  std::int64_t unfinished = 0;       ///< still open when the report was made
};

struct Collected {
  std::vector<std::string> names;
  std::vector<Schema> schemas;  ///< entry i: of payloads with the schema i; entry 0: no fields
  struct Thread {
    int os_id;
    std::vector<RangeRecord> ranges;  ///< in the order in which they ended
  };
  std::vector<Thread> threads;
  Losses losses;
};

class ThreadRecorder;

class Recorder {
 public:
  static constexpr std::size_t kMaxDepth = 1024;
  static constexpr std::size_t kMaxNames = 1 << 16;
  static constexpr std::size_t kMaxSchemas = 1 << 12;

  /// The process's; never destroyed. Its capacity is MOESAIC_NVTX_CAPACITY ranges, by default 4,194,304 (288 MiB).
  static Recorder& Get();

  std::uint32_t AddDomain(std::string_view name);
  /// Interns a name; past kMaxNames all are "(other)".
  NameId Name(std::uint32_t domain, std::string_view text);

  /// Past kMaxSchemas, or with fields behind Payload::kMostBytes, those are left out. Equal schemas have equal numbers.
  std::uint32_t AddSchema(Schema fields);

  void Push(std::uint32_t domain, NameId name, const Payload& payload, int* level);
  /// @param payload  counts where the range was pushed without one
  void Pop(std::uint32_t domain, const Payload& payload, int* level);

  /// Any thread, at any time.
  Collected Collect();

 private:
  friend class ThreadRecorder;
  Recorder();
  ThreadRecorder* Own();
  void AfterForkInChild();

  struct State;
  State* state_;
};

}  // namespace moesaic::profiling::collector
