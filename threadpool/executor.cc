#include "threadpool/executor.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "profiling/calls.h"
#include "profiling/nvtx.h"
#include "profiling/range.h"

namespace moesaic::threadpool {
namespace {

// A wake-up costs the waker two microseconds (on some guests twenty) and the sleeper twenty to ninety, which is what each level
// of a tree of wake-ups takes: so one lane wakes many, and where there are more, those who were woken and see work wake the
// rest. (16 threads of a virtual machine, until all are up: 180 us two at a time, 130 four, 120 eight, 100 all at once.)
constexpr std::int64_t kWakesAtOnce = 16;

// Looks in vain, each with a pause and some 0.1 to 0.5 us long, before a lane takes work from another node: longer than lanes
// there need to find it, shorter than a task.
constexpr int kLooksBeforeOtherNodes = 64;

}  // namespace

thread_local const WorkerFrame* WorkerFrame::innermost = nullptr;

int WorkerFrame::WorkerOf(const void* pool) {
  for (const WorkerFrame* frame = innermost; frame != nullptr; frame = frame->outer_) {
    if (frame->pool_ == pool) return frame->worker_;
  }
  return -1;
}

Executor::Executor(const void* pool, int lanes, bool yield, int nodes)
    : pool_(pool), yield_(yield), lanes_(lanes), nodes_(lanes), queues_(static_cast<std::size_t>(nodes) + 1) {}

void Executor::StartClock() {
  const bool was_timed = timed_;
  timed_ = profiling::TimersEnabled();
  if (!timed_ && !was_timed) return;
  for (Lane& lane : lanes_) lane.clock.Restart(timed_);
  clock_start_ns_ = profiling::Now();
}

void Executor::StopClock() {
  if (!timed_) return;
  profiling::PoolTotals run;
  run.runs = 1;
  run.tasks = job_.size();
  run.wall_ns = profiling::Now() - clock_start_ns_;
  run.lane_ns = run.wall_ns * lanes();
  run.least_busy_ns = std::numeric_limits<std::int64_t>::max();
  for (const Lane& lane : lanes_) {
    const std::int64_t busy = lane.clock.ns(LaneClock::kBusy);
    run.busy_ns += busy;
    run.least_busy_ns = std::min(run.least_busy_ns, busy);
    run.most_busy_ns = std::max(run.most_busy_ns, busy);
    run.stealing_ns += lane.clock.ns(LaneClock::kStealing);
    run.waiting_ns += lane.clock.ns(LaneClock::kWaiting);
    run.steals += lane.clock.steals();
    run.parks += lane.clock.parks();
  }
  run.parked_ns = run.lane_ns - run.busy_ns - run.stealing_ns - run.waiting_ns;
  profiling::AddPoolRun(run);
}

void Executor::Start(bool helpers_stay) {
  helpers_stay_ = helpers_stay;
  group_ = profiling::GroupScope::Current();
  const std::int64_t roots = job_.num_roots();
  // Several indices of a range at once: fewer trips to the shared counter; at most 1/16 of a lane's share, for balance.
  chunk_ = job_.is_range() ? std::clamp<std::int64_t>(roots / (16 * lanes()), 1, 64) : 1;

  keeps_nodes_.store(job_.keeps_nodes(), std::memory_order_relaxed);
  LayOutQueues();
  for (const TaskId root : job_.node_roots()) PushQueue(QueueOf(job_.node(root)), root);

  remaining_.store(job_.size(), std::memory_order_relaxed);
  end_root_.store(0, std::memory_order_relaxed);
  next_root_.store(0, std::memory_order_relaxed);
  end_root_.store(roots, std::memory_order_seq_cst);
}

// The shared queue has a place for every task that is no root, the others one for every task of their node.
void Executor::LayOutQueues() {
  for (Queue& queue : queues_) {
    const std::int64_t used = queue.end.load(std::memory_order_relaxed);
    for (std::int64_t i = 0; i < used; ++i) places_[queue.first + i].store(Deque::kNone, std::memory_order_relaxed);
    queue.end.store(0, std::memory_order_relaxed);
    queue.begin.store(0, std::memory_order_relaxed);
    queue.first = 0;
  }
  std::int64_t needed = job_.size() - job_.num_roots();
  if (needed <= Deque::kCapacity && !job_.any_in_turn()) return;
  if (job_.any_node()) {
    for (TaskId task = 0; task < job_.size(); ++task) {
      Queue& queue = QueueOf(job_.node(task));
      if (&queue != queues_.data()) ++queue.first;  // a count, for now
    }
    for (std::size_t i = 1; i < queues_.size(); ++i) needed += std::exchange(queues_[i].first, needed);
  }
  if (num_places_ >= needed) return;
  places_ = std::make_unique<std::atomic<TaskId>[]>(needed);
  num_places_ = needed;
  for (std::int64_t i = 0; i < needed; ++i) places_[i].store(Deque::kNone, std::memory_order_relaxed);
}

void Executor::OpenToHelpers() {
  open_.store(1, std::memory_order_seq_cst);
  WakeFor(0, job_.num_roots() - 1);
  if (!job_.any_node()) return;
  for (int node = 0; node < nodes_with_queue(); ++node) {
    WakeNode(0, QueueOf(node).size(), node);
  }
}

void Executor::CloseToHelpers() {
  open_.store(0, std::memory_order_seq_cst);
  for (std::size_t i = 1; i < lanes_.size(); ++i) {
    std::atomic<std::uint32_t>& inside = lanes_[i].inside;
    Spin spin(yield_);
    while (inside.load(std::memory_order_seq_cst) != 0) {
      if (spin.Once()) continue;
      std::uint32_t expected = 1;
      inside.compare_exchange_strong(expected, 2, std::memory_order_seq_cst);
      if (expected != 0) FutexWait(inside, 2);
    }
  }
}

void Executor::RunUntilDone(int lane, int worker) {
  Spin spin(yield_, Spin::kLimitInJob);
  for (;;) {
    Work(lane, worker);
    LaneClock& clock = lanes_[lane].clock;
    if (Done()) {
      clock.Enter(LaneClock::kAway);
      return;
    }
    clock.Enter(LaneClock::kWaiting);
    num_searching_.fetch_add(1, std::memory_order_seq_cst);
    spin.Restart();
    while (!Done() && !HasWork(lane)) {
      if (spin.Once()) continue;
      num_searching_.fetch_sub(1, std::memory_order_seq_cst);
      clock.Enter(LaneClock::kParked);
      static std::atomic<const profiling::nvtx::Event*> parked_event{nullptr};
      const profiling::nvtx::ToolRange parked(parked_event, "pool_parked", "pool");
      Park(lane, [this, lane] { return Done() || HasWork(lane); });
      clock.Enter(LaneClock::kWaiting);
      num_searching_.fetch_add(1, std::memory_order_seq_cst);
      spin.Restart();
    }
    num_searching_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

bool Executor::WaitForWork(int lane) {
  const auto stopped = [this] { return stop_.load(std::memory_order_seq_cst); };
  num_searching_.fetch_add(1, std::memory_order_seq_cst);
  Spin between(yield_), in_job(yield_, Spin::kLimitInJob);
  while (!stopped()) {
    const bool open = open_.load(std::memory_order_acquire) != 0;
    if (open && HasWork(lane)) break;
    (open ? between : in_job).Restart();
    if ((open ? in_job : between).Once()) continue;
    num_searching_.fetch_sub(1, std::memory_order_seq_cst);
    Park(lane, [&] { return stopped() || HasWork(lane); });
    num_searching_.fetch_add(1, std::memory_order_seq_cst);
    between.Restart();
    in_job.Restart();
  }
  num_searching_.fetch_sub(1, std::memory_order_seq_cst);
  return !stopped();
}

void Executor::Help(int lane) {
  std::atomic<std::uint32_t>& inside = lanes_[lane].inside;
  // Announce, then look: CloseToHelpers() closes, then looks. One of the two sees the other.
  inside.store(1, std::memory_order_seq_cst);
  if (open_.load(std::memory_order_seq_cst) != 0) {
    WakeFor(lane, end_root_.load(std::memory_order_relaxed) - next_root_.load(std::memory_order_relaxed) - 1);
    const int node = nodes_[lane].load(std::memory_order_relaxed);
    if (const Queue& queue = QueueOf(node); job_.any_node()) WakeNode(lane, queue.size() - 1, node);
    Work(lane, lane);
    lanes_[lane].clock.Enter(LaneClock::kAway);
  }
  if (inside.exchange(0, std::memory_order_seq_cst) == 2) FutexWake(inside, 1);
}

void Executor::Stop() {
  stop_.store(true, std::memory_order_seq_cst);
  for (int lane = 0; lane < lanes(); ++lane) Unpark(lane);
}

void Executor::Work(int index, int worker) {
  const WorkerFrame frame(pool_, worker);
  const profiling::GroupScope group(group_);
  Lane& lane = lanes_[index];
  if (timed_ || profiling::nvtx::Active()) profiling::SetThreadLane(index);
  if (job_.is_range()) {
    lane.clock.Enter(LaneClock::kBusy);
    const std::int64_t end = job_.size();
    while (next_root_.load(std::memory_order_relaxed) < end) {
      const std::int64_t begin = next_root_.fetch_add(chunk_, std::memory_order_seq_cst);
      if (begin >= end) break;
      const std::int64_t chunk_end = std::min(begin + chunk_, end);
      job_.CallRange(begin, chunk_end, worker);
      lane.ended += chunk_end - begin;
    }
    ReportEnded(lane);
    return;
  }
  for (;;) {
    lane.clock.Enter(LaneClock::kStealing);
    TaskId task = NextTask(index);
    if (task == Deque::kNone) return;
    lane.clock.Enter(LaneClock::kBusy);
    while (task != Deque::kNone) task = Execute(index, task, worker);
  }
}

TaskId Executor::NextTask(int index) {
  Lane& lane = lanes_[index];
  TaskId task = lane.deque.Pop();
  if (task != Deque::kNone) return task;
  const std::int64_t roots = job_.num_roots();
  if (next_root_.load(std::memory_order_relaxed) < roots) {
    const std::int64_t i = next_root_.fetch_add(1, std::memory_order_seq_cst);
    if (i < roots) return job_.root(i);
  }
  const int node = nodes_[index].load(std::memory_order_relaxed);
  if (Queue& own = QueueOf(node); &own != queues_.data()) task = PopQueue(own);
  if (task == Deque::kNone) {
    task = PopQueue(queues_.front());
    // Whoever queues more than it wakes lanes for leaves the rest to those: each who takes one wakes others.
    if (task != Deque::kNone) WakeFor(index, queues_.front().size());
  }
  if (task == Deque::kNone) {
    ReportEnded(lane);
    task = Steal(index, true);
  }
  if (task == Deque::kNone) {
    if (job_.any_node() && ++lane.looks < kLooksBeforeOtherNodes) {
      CpuPause();
      return task;
    }
    task = TakeFromOtherNodes(index);
  }
  lane.looks = 0;
  return task;
}

TaskId Executor::TakeFromOtherNodes(int index) {
  const int own = nodes_[index].load(std::memory_order_relaxed);
  for (int k = 1; k <= nodes_with_queue(); ++k) {
    const int node = (own + k) % nodes_with_queue();
    if (!MayTake(index, node)) continue;
    const TaskId task = PopQueue(QueueOf(node));
    if (task != Deque::kNone) return task;
  }
  return Steal(index, false);
}

bool Executor::MayTake(int lane, int node) const {
  if (!keeps_nodes_.load(std::memory_order_relaxed) || nodes_[lane].load(std::memory_order_relaxed) == node) return true;
  return std::none_of(nodes_.begin(), nodes_.end(),
                      [node](const std::atomic<int>& other) { return other.load(std::memory_order_relaxed) == node; });
}

TaskId Executor::Steal(int index, bool near) {
  Lane& lane = lanes_[index];
  const int count = lanes();
  const int node = nodes_[index].load(std::memory_order_relaxed);
  // Start somewhere else each time, so that thieves do not queue up at one victim.
  lane.victim = lane.victim * 1664525u + 1013904223u + static_cast<std::uint32_t>(index);
  const int start = static_cast<int>((lane.victim >> 8) % static_cast<std::uint32_t>(count));
  for (int k = 0; k < count; ++k) {
    const int victim = start + k < count ? start + k : start + k - count;
    if (victim == index || (nodes_[victim].load(std::memory_order_relaxed) == node) != near) continue;
    const TaskId task = lanes_[victim].deque.Steal();
    if (task == Deque::kNone) continue;
    lane.clock.Stole(victim);
    if (!lanes_[victim].deque.empty()) WakeFor(index, 1);
    return task;
  }
  return Deque::kNone;
}

TaskId Executor::Execute(int index, TaskId task, int worker) {
  Lane& lane = lanes_[index];
  job_.Call(task, worker);
  ++lane.ended;
  TaskId next = Deque::kNone;
  std::int64_t pushed = 0;
  job_.End(task, [&](TaskId successor) {
    if (job_.in_turn(successor)) {
      const int node = job_.node(successor);
      PushQueue(QueueOf(node), successor);
      ++pushed;
      if (node >= 0) WakeNode(index, 1, node);
    } else if (next == Deque::kNone) {
      next = successor;
    } else {
      Push(lane, successor);
      ++pushed;
    }
  });
  if (pushed == 0) return next;
  lane.clock.Queued(lane.deque.size());
  WakeFor(index, pushed);
  return next;
}

void Executor::Push(Lane& lane, TaskId task) {
  if (!lane.deque.Push(task)) PushQueue(queues_.front(), task);
}

void Executor::PushQueue(Queue& queue, TaskId task) {
  const std::int64_t place = queue.end.fetch_add(1, std::memory_order_seq_cst);
  places_[queue.first + place].store(task, std::memory_order_release);
}

TaskId Executor::PopQueue(Queue& queue) {
  std::int64_t begin = queue.begin.load(std::memory_order_relaxed);
  while (begin < queue.end.load(std::memory_order_acquire)) {
    const TaskId task = places_[queue.first + begin].load(std::memory_order_acquire);
    if (task == Deque::kNone) break;  // its place is taken but not yet written
    if (queue.begin.compare_exchange_weak(begin, begin + 1, std::memory_order_seq_cst)) return task;
  }
  return Deque::kNone;
}

// The count of all tasks is shared by all lanes: each adds up its own and hands them in when it runs out of work.
void Executor::ReportEnded(Lane& lane) {
  if (lane.ended == 0) return;
  const std::int64_t ended = lane.ended;
  lane.ended = 0;
  if (remaining_.fetch_sub(ended, std::memory_order_seq_cst) != ended) return;
  const int waiting = helpers_stay_ ? lanes() : 1;
  for (int i = 0; i < waiting; ++i) Unpark(i);
}

// Whoever adds work first publishes it and then looks for sleepers; a lane first announces that it sleeps and then looks for
// work. All four are sequentially consistent, so that no work is left lying with everyone asleep.
bool Executor::HasWork(int lane) const {
  if (next_root_.load(std::memory_order_seq_cst) < end_root_.load(std::memory_order_seq_cst)) return true;
  if (!queues_.front().empty()) return true;
  for (int node = 0; node < nodes_with_queue(); ++node) {
    if (!queues_[node + 1].empty() && MayTake(lane, node)) return true;
  }
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return !lane.deque.empty(); });
}

template <typename Ready>
void Executor::Park(int index, Ready ready) {
  std::atomic<std::uint32_t>& parked = lanes_[index].parked;
  num_parked_.fetch_add(1, std::memory_order_seq_cst);  // first: it never counts fewer than there are
  parked.store(1, std::memory_order_seq_cst);
  if (ready()) {
    if (parked.exchange(0, std::memory_order_seq_cst) == 1) num_parked_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  while (parked.load(std::memory_order_acquire) == 1) FutexWait(parked, 1);
}

bool Executor::Unpark(int index) {
  std::atomic<std::uint32_t>& parked = lanes_[index].parked;
  std::uint32_t expected = 1;
  if (parked.load(std::memory_order_seq_cst) != 1) return false;
  if (!parked.compare_exchange_strong(expected, 0, std::memory_order_seq_cst)) return false;
  num_parked_.fetch_sub(1, std::memory_order_relaxed);
  FutexWake(parked, 1);
  return true;
}

// Wakes sleepers for `tasks` new tasks, less the lanes that are looking for work already: those either find it or look again
// before they sleep.
void Executor::WakeFor(int lane, std::int64_t tasks) {
  if (num_parked_.load(std::memory_order_seq_cst) == 0) return;
  std::int64_t wakes = std::min(tasks - num_searching_.load(std::memory_order_seq_cst), kWakesAtOnce);
  for (int k = 1; k < lanes() && wakes > 0; ++k) {
    if (Unpark((lane + k) % lanes())) --wakes;  // neighbours are near: lanes are ordered by core
  }
}

// Lanes that are looking for work already may be on other nodes: not counted.
void Executor::WakeNode(int lane, std::int64_t tasks, int node) {
  if (num_parked_.load(std::memory_order_seq_cst) == 0) return;
  std::int64_t wakes = std::min(tasks, kWakesAtOnce);
  for (int k = 1; k < lanes() && wakes > 0; ++k) {
    const int other = (lane + k) % lanes();
    if (nodes_[other].load(std::memory_order_relaxed) == node && Unpark(other)) --wakes;
  }
}

}  // namespace moesaic::threadpool
