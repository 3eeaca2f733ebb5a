#include "profiling/calls.h"

#include <pthread.h>

#include <mutex>
#include <set>
#include <utility>

#include "profiling/clock.h"
#include "profiling/range.h"

namespace moesaic::profiling {
namespace {

constexpr std::size_t kMostCalls = 1 << 16;

struct State {
  std::mutex mutex;
  PoolTotals pool;
  CallSnapshot calls;
  std::int64_t resets = 0;
  std::set<std::pair<int, CallKind>> seen;  // since the process began

  static State& Get() {
    static State& state = *[] {
      pthread_atfork([] { Get().mutex.lock(); }, [] { Get().mutex.unlock(); }, [] { Get().mutex.unlock(); });
      return new State;
    }();
    return state;
  }
};

thread_local PoolTotals own_pool;  // runs that this thread waited for
thread_local std::int64_t entry_ns = 0;
thread_local std::int64_t own_jobs = 0, own_job_slots = 0, own_job_tasks = 0;

// The last call that this thread recorded: its place, and the resets before it; -1: none.
struct LastCall {
  std::int64_t place = -1;
  std::int64_t resets = 0;
};
thread_local LastCall last_call;

template <typename Operation>
void Combine(PoolTotals& a, const PoolTotals& b, Operation operation) {
  operation(a.runs, b.runs);
  operation(a.tasks, b.tasks);
  operation(a.steals, b.steals);
  operation(a.parks, b.parks);
  operation(a.wall_ns, b.wall_ns);
  operation(a.lane_ns, b.lane_ns);
  operation(a.busy_ns, b.busy_ns);
  operation(a.stealing_ns, b.stealing_ns);
  operation(a.waiting_ns, b.waiting_ns);
  operation(a.parked_ns, b.parked_ns);
  operation(a.least_busy_ns, b.least_busy_ns);
  operation(a.most_busy_ns, b.most_busy_ns);
}

}  // namespace

PoolTotals& PoolTotals::operator+=(const PoolTotals& other) {
  Combine(*this, other, [](std::int64_t& a, std::int64_t b) { a += b; });
  return *this;
}

PoolTotals PoolTotals::operator-(const PoolTotals& other) const {
  PoolTotals difference = *this;
  Combine(difference, other, [](std::int64_t& a, std::int64_t b) { a -= b; });
  return difference;
}

void AddPoolRun(const PoolTotals& run) {
  own_pool += run;
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  state.pool += run;
}

PoolTotals PoolSnapshot() {
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  return state.pool;
}

CallTimer::CallTimer(CallKind kind, int layer) : timed_(TimersEnabled()) {
  const std::int64_t entry = std::exchange(entry_ns, 0);
  if (!timed_) return;
  record_.kind = kind;
  record_.layer = layer;
  record_.begin_ns = entry != 0 ? entry : Now();
  record_.pool = own_pool;
  own_jobs = 0;
}

void CallTimer::EngineBegins() {
  if (!timed_) return;
  {
    State& state = State::Get();
    const std::lock_guard lock(state.mutex);
    record_.first = !state.seen.contains({record_.layer, record_.kind});
  }
  group_.emplace(GroupOfCalls(record_.layer, record_.first));
  record_.engine_begin_ns = Now();
}

void CallTimer::EngineEnds(std::int64_t tokens, int threads) {
  if (!timed_) return;
  record_.engine_end_ns = Now();
  group_.reset();
  record_.tokens = tokens;
  record_.threads = threads;
  record_.jobs = own_jobs;
  record_.job_slots = own_job_slots;
  record_.job_tasks = own_job_tasks;
  record_.pool = own_pool - record_.pool;
  ended_ = true;
}

CallTimer::~CallTimer() {
  if (!ended_) return;  // not timed, or the call was refused
  record_.end_ns = Now();
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  state.seen.emplace(record_.layer, record_.kind);
  if (state.calls.calls.size() == kMostCalls) {
    ++state.calls.dropped;
  } else {
    state.calls.calls.push_back(record_);
    last_call = {static_cast<std::int64_t>(state.calls.calls.size()) - 1, state.resets};
  }
}

void MarkEntry() {
  entry_ns = TimersEnabled() ? Now() : 0;
  last_call.place = -1;
}

void MarkExit() {
  const LastCall last = std::exchange(last_call, {});
  if (last.place < 0) return;
  const std::int64_t now = Now();
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  if (last.resets == state.resets) state.calls.calls[static_cast<std::size_t>(last.place)].end_ns = now;
}

void NoteJobs(std::int64_t jobs, std::int64_t slots, std::int64_t tasks) {
  own_jobs = jobs;
  own_job_slots = slots;
  own_job_tasks = tasks;
}

CallSnapshot Calls() {
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  return state.calls;
}

void ResetCalls() {
  State& state = State::Get();
  const std::lock_guard lock(state.mutex);
  state.pool = {};
  state.calls = {};
  ++state.resets;
}

}  // namespace moesaic::profiling
