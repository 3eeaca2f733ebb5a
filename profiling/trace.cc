#include "profiling/trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

#include "profiling/nvtx.h"

namespace moesaic::profiling {

namespace internal {
std::atomic<bool> trace_enabled{false};
}

namespace {

constexpr std::size_t kMostEndedThreads = 256;

std::atomic<std::int64_t> trace_epoch{0};  // counts StartTrace()
std::atomic<std::int64_t> trace_capacity{kDefaultTraceCapacity};

// Written by its thread alone. Readers look at the epoch first: while it is that of the running trace, `events` stays where it
// is, and entries below `count` do not change.
struct Buffer {
  std::atomic<std::int64_t> epoch{0};
  std::atomic<std::int64_t> count{0};
  std::atomic<std::int64_t> dropped{0};
  std::atomic<int> lane{-1};
  std::int64_t capacity = 0;
  std::unique_ptr<Event[]> events;
  int os_id = 0;
  pthread_t thread{};

  void Restart(std::int64_t now_epoch) {
    const std::int64_t wanted = trace_capacity.load(std::memory_order_relaxed);
    epoch.store(0, std::memory_order_relaxed);
    if (wanted != capacity) {
      events.reset();
      capacity = 0;
      events.reset(new Event[static_cast<std::size_t>(wanted)]);
      capacity = wanted;
    }
    count.store(0, std::memory_order_relaxed);
    dropped.store(0, std::memory_order_relaxed);
    epoch.store(now_epoch, std::memory_order_release);
  }

  ThreadTrace Copy() const {
    ThreadTrace trace;
    trace.os_id = os_id;
    trace.lane = lane.load(std::memory_order_relaxed);
    trace.dropped = dropped.load(std::memory_order_relaxed);
    const std::int64_t n = count.load(std::memory_order_acquire);
    trace.events.assign(events.get(), events.get() + n);
    return trace;
  }
};

std::string NameOf(pthread_t thread) {
  char name[32] = "";
  pthread_getname_np(thread, name, sizeof name);
  return name;
}

struct Registry {
  std::mutex mutex;  // Restart() of a buffer, StartTrace() and ReadTrace() exclude one another
  std::vector<std::unique_ptr<Buffer>> threads;
  std::deque<ThreadTrace> ended;

  static Registry& Get() {
    static Registry& registry = *[] {
      pthread_atfork([] { Get().mutex.lock(); }, [] { Get().mutex.unlock(); }, [] { Get().mutex.unlock(); });
      return new Registry;
    }();
    return registry;
  }

  void EndThread(const Buffer* buffer) {
    const std::lock_guard lock(mutex);
    if (buffer->epoch.load(std::memory_order_relaxed) == trace_epoch.load(std::memory_order_relaxed)) {
      ended.push_back(buffer->Copy());
      ended.back().name = NameOf(buffer->thread);
      if (ended.size() > kMostEndedThreads) ended.pop_front();
    }
    std::erase_if(threads, [&](const auto& thread) { return thread.get() == buffer; });
  }
};

thread_local Buffer* own_buffer = nullptr;
thread_local bool thread_ended = false;
thread_local int own_lane = -1;

struct ThreadExit {
  ~ThreadExit() {
    thread_ended = true;
    Registry::Get().EndThread(std::exchange(own_buffer, nullptr));
  }
};

// The calling thread's buffer, emptied if it dates from an earlier trace. Null: none can be had.
Buffer* OwnBuffer() {
  const std::int64_t epoch = trace_epoch.load(std::memory_order_acquire);
  if (own_buffer != nullptr && own_buffer->epoch.load(std::memory_order_relaxed) == epoch) return own_buffer;
  if (thread_ended) return nullptr;
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  if (own_buffer == nullptr) {
    auto buffer = std::make_unique<Buffer>();
    buffer->os_id = static_cast<int>(syscall(SYS_gettid));
    buffer->thread = pthread_self();
    buffer->lane.store(own_lane, std::memory_order_relaxed);
    own_buffer = registry.threads.emplace_back(std::move(buffer)).get();
    static thread_local ThreadExit at_exit;
    (void)at_exit;
  }
  own_buffer->Restart(trace_epoch.load(std::memory_order_relaxed));
  return own_buffer;
}

}  // namespace

void StartTrace(std::int64_t capacity) {
  if (capacity < 1) throw std::invalid_argument("capacity: " + std::to_string(capacity) + " events, expected 1 or more");
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  registry.ended.clear();
  trace_capacity.store(capacity, std::memory_order_relaxed);
  trace_epoch.fetch_add(1, std::memory_order_release);
  internal::trace_enabled.store(true, std::memory_order_relaxed);
}

void StopTrace() { internal::trace_enabled.store(false, std::memory_order_relaxed); }

std::vector<ThreadTrace> ReadTrace() {
  Registry& registry = Registry::Get();
  const std::lock_guard lock(registry.mutex);
  std::vector<ThreadTrace> result(registry.ended.begin(), registry.ended.end());
  const std::int64_t epoch = trace_epoch.load(std::memory_order_relaxed);
  for (const auto& buffer : registry.threads) {
    if (epoch == 0 || buffer->epoch.load(std::memory_order_acquire) != epoch) continue;
    result.push_back(buffer->Copy());
    result.back().name = NameOf(buffer->thread);
  }
  return result;
}

void Record(const Event& event) noexcept {
  if (!TraceEnabled()) return;
  Buffer* buffer = nullptr;
  try {
    buffer = OwnBuffer();
  } catch (const std::bad_alloc&) {  // a trace may lack events; the work that it watches goes on
  }
  if (buffer == nullptr) return;
  const std::int64_t n = buffer->count.load(std::memory_order_relaxed);
  if (n == buffer->capacity) {
    buffer->dropped.store(buffer->dropped.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return;
  }
  buffer->events[n] = event;
  buffer->count.store(n + 1, std::memory_order_release);
}

void SetThreadLane(int lane) noexcept {
  if (lane != own_lane && nvtx::Active()) nvtx::NameThread(lane);
  own_lane = lane;
  if (own_buffer != nullptr) own_buffer->lane.store(lane, std::memory_order_relaxed);
}

}  // namespace moesaic::profiling
