#include "threadpool/pool.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "profiling/nvtx.h"
#include "threadpool/affinity.h"
#include "threadpool/executor.h"
#include "threadpool/fork_guard.h"
#include "threadpool/openmp_region.h"
#include "threadpool/own_threads.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {
namespace {

constexpr int kMaxThreads = 4096;

int CheckThreads(const char* name, int n) {
  if (n < 1 || n > kMaxThreads) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(n) +
                                " threads, expected 1 <= n <= " + std::to_string(kMaxThreads));
  }
  return n;
}

/// MOESAIC_NUM_THREADS if it is set and not empty, else the cores this process may use.
int DefaultThreads(const Topology* machine) {
  const char* text = std::getenv("MOESAIC_NUM_THREADS");
  if (text == nullptr || *text == '\0')
    return std::min((machine != nullptr ? *machine : Topology::Host()).UsableCores(), kMaxThreads);
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [parsed, error] = std::from_chars(text, end, n);
  if (error != std::errc() || parsed != end || n < 1 || n > kMaxThreads) {
    throw std::invalid_argument("MOESAIC_NUM_THREADS: '" + std::string(text) + "', expected a whole number from 1 to " +
                                std::to_string(kMaxThreads));
  }
  return n;
}

/// CPUs between which this process's threads really have to share their time.
int HostPus() {
  const Topology& topology = Topology::Host();
  if (topology.is_host) return topology.UsablePus();
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

class Pool::Impl : public ForkListener {
 public:
  Impl(int num_threads, ThreadSource source, const Topology* machine)
      : num_threads_(num_threads == 0 ? DefaultThreads(machine) : CheckThreads("num_threads", num_threads)),
        source_(InForkedChild() ? ThreadSource::kOwn : source) {
    if (machine != nullptr) machine_ = *machine;
  }

  const Topology& topology() const { return machine_ ? *machine_ : Topology::Host(); }
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
  ThreadSource source() const { return source_.load(std::memory_order_relaxed); }

  void SetNumThreads(int n) {
    RequireOutside("SetNumThreads");
    const Turn turn(*this);
    if (n == num_threads()) return;
    team_.reset();
    num_threads_.store(n, std::memory_order_relaxed);
  }

  void SetSource(ThreadSource source) {
    RequireOutside("SetSource");
    const Turn turn(*this);
    if (InForkedChild()) source = ThreadSource::kOwn;
    if (source == this->source()) return;
    team_.reset();
    source_.store(source, std::memory_order_relaxed);
  }

  /// prepare(job) says what to run.
  template <typename Prepare>
  void Run(Prepare prepare) {
    if (const int worker = WorkerFrame::WorkerOf(this); worker >= 0) {
      Executor alone(this, 1, false);
      prepare(alone.job());
      alone.Start(false);
      alone.RunUntilDone(0, worker);
      alone.job().RethrowFailure();
      return;
    }
    const Turn turn(*this);
    static std::atomic<const profiling::nvtx::Event*> run_event{nullptr};
    const profiling::nvtx::ToolRange run(run_event, "pool_run", "pool");
    Executor& executor = Team();
    Job& job = executor.job();
    prepare(job);
    executor.StartClock();
    if (executor.lanes() == 1 || (job.size() == 1 && !job.keeps_nodes())) {
      executor.Start(false);
      executor.RunUntilDone(0, 0);
    } else if (source() == ThreadSource::kOpenMp) {
      executor.Start(true);
      RunInOpenMpRegion(executor, topology());
    } else {
      if (!team_->threads) team_->threads.emplace(executor, topology());
      std::optional<StayOnNode> stay;  // the other threads are pinned
      if (job.keeps_nodes() && topology().is_host) stay.emplace(topology());
      team_->threads->MakeRoomForCaller();
      executor.Start(false);
      executor.OpenToHelpers();
      executor.RunUntilDone(0, 0);
      executor.CloseToHelpers();
    }
    executor.StopClock();
    job.RethrowFailure();
  }

  // Only the forking thread is here. The parent's threads are gone, and another thread may have been in the middle of a run:
  // its state is left as it is, never touched again, and a new one is made on the next run.
  void AfterForkInChild() override {
    new (&turn_) TurnLock;
    if (Turn::Holds(*this)) turn_.lock();  // the forking thread's, which it will end
    abandoned_ = team_.release();
    source_.store(ThreadSource::kOwn, std::memory_order_relaxed);
  }

 private:
  friend class Turn;
  struct TeamState {
    TeamState(const void* pool, int lanes, int nodes) : executor(pool, lanes, lanes > HostPus(), nodes) {}
    Executor executor;
    std::optional<OwnThreads> threads;  // made by the first run that needs them
  };

  Executor& Team() {
    if (!team_) team_ = std::make_unique<TeamState>(this, num_threads(), static_cast<int>(topology().nodes.size()));
    return team_->executor;
  }

  void RequireOutside(const char* function) const {
    if (WorkerFrame::WorkerOf(this) < 0) return;
    throw std::logic_error(std::string(function) + ": called in a task of this pool, which it would have to wait for");
  }

  TurnLock turn_;  // guards all of a run, and the changes between runs
  std::atomic<int> num_threads_;
  std::atomic<ThreadSource> source_;
  std::optional<Topology> machine_;  // none: the host
  std::unique_ptr<TeamState> team_;
  TeamState* abandoned_ = nullptr;  // keeps it reachable for leak checkers
};

thread_local const Pool::Turn* Pool::Turn::innermost = nullptr;

bool Pool::Turn::Holds(const Impl& pool) {
  for (const Turn* turn = innermost; turn != nullptr; turn = turn->outer_) {
    if (turn->locks_ && &turn->pool_ == &pool) return true;
  }
  return false;
}

Pool::Turn::Turn(Impl& pool) : pool_(pool), locks_(WorkerFrame::WorkerOf(&pool) < 0 && !Holds(pool)), outer_(innermost) {
  if (locks_) pool_.turn_.lock();
  innermost = this;
}

Pool::Turn::Turn(Pool& pool) : Turn(*pool.impl_) {}

Pool::Turn::~Turn() {
  innermost = outer_;
  if (locks_) pool_.turn_.unlock();
}

Pool::Pool(int num_threads, ThreadSource source) : impl_(std::make_unique<Impl>(num_threads, source, nullptr)) {}

Pool::Pool(int num_threads, ThreadSource source, const Topology& machine)
    : impl_(std::make_unique<Impl>(num_threads, source, &machine)) {}

Pool::~Pool() = default;

Pool& Pool::Default() {
  // Never destroyed: its threads sleep when the process ends, and other static objects may still use it then.
  static std::atomic<Pool*> pool{nullptr};
  if (Pool* made = pool.load(std::memory_order_acquire)) return *made;
  const std::lock_guard lock(ProcessMutex());
  if (pool.load(std::memory_order_relaxed) == nullptr) pool.store(new Pool, std::memory_order_release);
  return *pool.load(std::memory_order_relaxed);
}

int Pool::num_threads() const { return impl_->num_threads(); }

void Pool::SetNumThreads(int n) { impl_->SetNumThreads(CheckThreads("n", n)); }

const Topology& Pool::topology() const { return impl_->topology(); }

ThreadSource Pool::source() const { return impl_->source(); }

void Pool::SetSource(ThreadSource source) { impl_->SetSource(source); }

void Pool::Run(const TaskGraph& graph) {
  if (graph.size() == 0) return;
  impl_->Run([&graph](Job& job) { job.Prepare(graph); });
}

void Pool::ParallelFor(std::int64_t count, TaskFunction function, void* context) {
  if (function == nullptr) throw std::invalid_argument("function: null, expected a function");
  if (count < 0) throw std::invalid_argument("count: " + std::to_string(count) + ", expected 0 or more");
  if (count == 0) return;
  impl_->Run([=](Job& job) { job.Prepare(count, function, context); });
}

}  // namespace moesaic::threadpool
