#include "profiling/collector/recorder.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "profiling/clock.h"

namespace moesaic::profiling::collector {
namespace {

constexpr std::int64_t kChunk = 4096;
constexpr std::int64_t kDefaultCapacity = 1 << 22;

struct Open {
  std::int64_t begin_ns;
  std::uint64_t id;
  NameId name;
  std::uint32_t domain;
  Payload payload;
};

std::size_t SizeOf(FieldType type) {
  return type == FieldType::kInt32 || type == FieldType::kUInt32 || type == FieldType::kFloat ? 4 : 8;
}

std::int64_t CapacityFromEnvironment() {
  const char* text = std::getenv("MOESAIC_NVTX_CAPACITY");
  const long long wanted = text == nullptr ? 0 : std::strtoll(text, nullptr, 10);
  return wanted > 0 ? wanted : kDefaultCapacity;
}

template <typename T>
double Load(const std::byte* place) {
  T value;
  std::memcpy(&value, place, sizeof value);
  return static_cast<double>(value);
}

}  // namespace

double ValueOf(const Field& field, const Payload& payload) {
  const std::byte* place = payload.bytes.data() + field.offset;
  switch (field.type) {
    case FieldType::kInt32:
      return Load<std::int32_t>(place);
    case FieldType::kUInt32:
      return Load<std::uint32_t>(place);
    case FieldType::kInt64:
      return Load<std::int64_t>(place);
    case FieldType::kUInt64:
      return Load<std::uint64_t>(place);
    case FieldType::kFloat:
      return Load<float>(place);
    case FieldType::kDouble:
      return Load<double>(place);
  }
  return 0;
}

// Written by its thread alone. Chunks are linked, and never move: a reader follows them as far as `count` says.
class ThreadRecorder {
 public:
  struct Chunk {
    std::array<RangeRecord, kChunk> records;
    std::unique_ptr<Chunk> next;
  };

  explicit ThreadRecorder(std::uint64_t number_) : number(number_), os_id(static_cast<int>(syscall(SYS_gettid))) {}

  void Append(const RangeRecord& record, std::atomic<std::int64_t>& free) {
    const std::int64_t n = count.load(std::memory_order_relaxed);
    if (n % kChunk == 0) {
      // Capacity is handed out by the chunk, so that threads share no counter from range to range.
      std::unique_ptr<Chunk> chunk;
      if (free.fetch_sub(kChunk, std::memory_order_relaxed) >= kChunk) chunk.reset(new (std::nothrow) Chunk);
      if (!chunk) {
        free.fetch_add(kChunk, std::memory_order_relaxed);
        lost.store(lost.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        return;
      }
      Chunk* raw = chunk.get();
      (last == nullptr ? first : last->next) = std::move(chunk);
      last = raw;
    }
    last->records[n % kChunk] = record;
    count.store(n + 1, std::memory_order_release);
  }

  const std::uint64_t number;
  const int os_id;
  std::unique_ptr<Chunk> first;
  Chunk* last = nullptr;
  std::atomic<std::int64_t> count{0};
  std::atomic<std::int64_t> lost{0};
  std::atomic<std::int64_t> unbalanced{0};
  std::atomic<std::int64_t> too_deep{0};
  std::atomic<std::int64_t> open{0};
  std::uint64_t next_id = 0;
  std::vector<Open> stack;
  std::unordered_map<std::uint32_t, std::int64_t> skipped;  // by domain: pushes that were too deep, whose pops are awaited
};

struct Recorder::State {
  std::mutex mutex;
  std::atomic<std::int64_t> free{CapacityFromEnvironment()};
  std::vector<std::string> domains{""};
  std::deque<std::string> names{"(other)"};
  std::atomic<NameId> name_count{1};
  std::unordered_map<std::string_view, NameId> ids;
  std::vector<Schema> schemas{{}};
  std::vector<ThreadRecorder*> threads;  // also of threads that have ended; never freed: the process is ending when they go
  std::uint64_t thread_count = 0;
};

namespace {
thread_local ThreadRecorder* own = nullptr;
}

Recorder::Recorder() : state_(new State) {}

Recorder& Recorder::Get() {
  static Recorder& recorder = *[] {
    auto* made = new Recorder;
    pthread_atfork([] { Get().state_->mutex.lock(); }, [] { Get().state_->mutex.unlock(); },
                   [] {
                     Get().AfterForkInChild();
                     Get().state_->mutex.unlock();
                   });
    return made;
  }();
  return recorder;
}

// The child reports what it does itself: the parent's records are the parent's. Ranges open around fork() stay open in both.
void Recorder::AfterForkInChild() {
  ThreadRecorder* parent = own;
  own = nullptr;
  state_->threads.clear();
  state_->free.store(CapacityFromEnvironment(), std::memory_order_relaxed);
  if (parent == nullptr) return;
  own = new ThreadRecorder(state_->thread_count++);
  own->stack = parent->stack;
  own->skipped = parent->skipped;
  own->open.store(static_cast<std::int64_t>(own->stack.size()), std::memory_order_relaxed);
  state_->threads.push_back(own);
}

ThreadRecorder* Recorder::Own() {
  if (own == nullptr) {
    const std::lock_guard lock(state_->mutex);
    own = new ThreadRecorder(state_->thread_count++);
    own->stack.reserve(64);
    state_->threads.push_back(own);
  }
  return own;
}

std::uint32_t Recorder::AddDomain(std::string_view name) {
  const std::lock_guard lock(state_->mutex);
  for (std::size_t i = 1; i < state_->domains.size(); ++i) {
    if (state_->domains[i] == name) return static_cast<std::uint32_t>(i);
  }
  if (state_->domains.size() == kMaxNames) return 0;
  state_->domains.emplace_back(name);
  return static_cast<std::uint32_t>(state_->domains.size() - 1);
}

NameId Recorder::Name(std::uint32_t domain, std::string_view text) {
  const std::lock_guard lock(state_->mutex);
  if (domain >= state_->domains.size()) domain = 0;
  std::string full = state_->domains[domain] + ":" + std::string(text);
  if (const auto known = state_->ids.find(full); known != state_->ids.end()) return known->second;
  if (state_->names.size() == kMaxNames) return 0;
  const std::string& kept = state_->names.emplace_back(std::move(full));
  state_->name_count.store(static_cast<NameId>(state_->names.size()), std::memory_order_release);
  return state_->ids.emplace(kept, static_cast<NameId>(state_->names.size() - 1)).first->second;
}

std::uint32_t Recorder::AddSchema(Schema fields) {
  std::erase_if(fields, [](const Field& field) { return field.offset + SizeOf(field.type) > Payload::kMostBytes; });
  const auto same = [&](const Schema& other) {
    return std::equal(other.begin(), other.end(), fields.begin(), fields.end(), [](const Field& a, const Field& b) {
      return a.name == b.name && a.type == b.type && a.offset == b.offset;
    });
  };
  const std::lock_guard lock(state_->mutex);
  const auto known = std::find_if(state_->schemas.begin(), state_->schemas.end(), same);
  if (known != state_->schemas.end()) return static_cast<std::uint32_t>(known - state_->schemas.begin());
  if (state_->schemas.size() == kMaxSchemas) return 0;
  state_->schemas.push_back(std::move(fields));
  return static_cast<std::uint32_t>(state_->schemas.size() - 1);
}

void Recorder::Push(std::uint32_t domain, NameId name, const Payload& payload, int* level) {
  if (name >= state_->name_count.load(std::memory_order_acquire)) name = 0;  // a handle that is none
  ThreadRecorder& thread = *Own();
  int depth = 0;
  for (const Open& open : thread.stack) depth += open.domain == domain;
  *level = depth;
  if (thread.stack.size() == kMaxDepth) {
    ++thread.skipped[domain];
    thread.too_deep.store(thread.too_deep.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return;
  }
  const std::uint64_t id = thread.number << 40 | ++thread.next_id;
  thread.open.store(static_cast<std::int64_t>(thread.stack.size()) + 1, std::memory_order_relaxed);
  thread.stack.push_back({0, id, name, domain, payload});
  thread.stack.back().begin_ns = Now();  // last: the collector's own time is not the range's
}

void Recorder::Pop(std::uint32_t domain, const Payload& payload, int* level) {
  const std::int64_t end_ns = Now();
  ThreadRecorder& thread = *Own();
  *level = -1;
  if (!thread.skipped.empty()) {
    if (const auto deep = thread.skipped.find(domain); deep != thread.skipped.end()) {
      if (--deep->second == 0) thread.skipped.erase(deep);
      return;
    }
  }
  // Each domain has a stack of its own; they lie in one, and the innermost of this domain is nearly always the last.
  std::size_t place = thread.stack.size();
  while (place > 0 && thread.stack[place - 1].domain != domain) --place;
  if (place == 0) {
    thread.unbalanced.store(thread.unbalanced.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return;
  }
  const Open open = thread.stack[place - 1];
  thread.stack.erase(thread.stack.begin() + static_cast<std::ptrdiff_t>(place) - 1);
  thread.open.store(static_cast<std::int64_t>(thread.stack.size()), std::memory_order_relaxed);
  RangeRecord record{open.begin_ns, end_ns, open.id, 0, open.name, 0, open.payload.schema != 0 ? open.payload : payload};
  for (std::size_t i = 0; i + 1 < place; ++i) {
    if (thread.stack[i].domain != domain) continue;
    record.parent = thread.stack[i].id;
    ++record.level;
  }
  *level = static_cast<int>(record.level);
  thread.Append(record, state_->free);
}

Collected Recorder::Collect() {
  const std::lock_guard lock(state_->mutex);
  Collected result;
  result.names.assign(state_->names.begin(), state_->names.end());
  result.schemas = state_->schemas;
  for (const ThreadRecorder* thread : state_->threads) {
    Collected::Thread& copy = result.threads.emplace_back();
    copy.os_id = thread->os_id;
    const std::int64_t count = thread->count.load(std::memory_order_acquire);
    copy.ranges.reserve(static_cast<std::size_t>(count));
    const ThreadRecorder::Chunk* chunk = thread->first.get();
    for (std::int64_t i = 0; i < count; ++i) {
      if (i > 0 && i % kChunk == 0) chunk = chunk->next.get();
      copy.ranges.push_back(chunk->records[i % kChunk]);
    }
    result.losses.over_capacity += thread->lost.load(std::memory_order_relaxed);
    result.losses.unbalanced_pops += thread->unbalanced.load(std::memory_order_relaxed);
    result.losses.too_deep += thread->too_deep.load(std::memory_order_relaxed);
    result.losses.unfinished += thread->open.load(std::memory_order_relaxed);
  }
  return result;
}

}  // namespace moesaic::profiling::collector
