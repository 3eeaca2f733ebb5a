// Many random graphs from several callers at once: dependencies, exceptions that cancel what follows, nested calls, other
// pools, changes of the number of threads. Under ThreadSanitizer this is the proof of the pool's synchronisation;
// MOESAIC_TEST_GRAPHS says how many (default 10,000).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

int NumGraphs() {
  const char* text = std::getenv("MOESAIC_TEST_GRAPHS");
  return text != nullptr ? static_cast<int>(std::strtol(text, nullptr, 10)) : 10000;
}

struct Failure {
  const void* graph;
  int task;
};

/// One random graph of one caller. Its plain ints are written by one task and read by those behind it: a missing ordering is a
/// data race that ThreadSanitizer reports.
class RandomGraph {
 public:
  RandomGraph(std::mt19937& random, Pool& pool, Pool& other) : pool_(pool), other_(other) {
    const int tasks = 1 + static_cast<int>(random() % (random() % 8 == 0 ? 400 : 30));
    before_.resize(tasks);
    ended_.resize(tasks);
    kind_.resize(tasks);
    for (int i = 0; i < tasks; ++i) {
      graph_.Add(&RandomGraph::Task, this, i);
      const int draw = static_cast<int>(random() % 64);
      kind_[i] = draw == 0 ? Kind::kNested : draw == 1 ? Kind::kOtherPool : draw == 2 ? Kind::kLong : Kind::kShort;
    }
    const int edges = tasks > 1 ? static_cast<int>(random() % (2 * tasks)) : 0;
    const bool upwards = random() % 2 == 0;  // the pool checks other graphs for cycles
    for (int i = 0; i < edges; ++i) {
      int a = static_cast<int>(random() % tasks), b = static_cast<int>(random() % tasks);
      if (a == b) continue;
      if ((a > b) == upwards) std::swap(a, b);
      graph_.AddEdge(a, b);
      before_[b].push_back(a);
    }
    thrower_ = random() % 4 == 0 ? static_cast<int>(random() % tasks) : -1;
  }

  /// Runs it with a task that throws, if it has one, and then without. The number of mistakes.
  int Run() {
    if (thrower_ >= 0) {
      Clear();
      try {
        pool_.Run(graph_);
        ++mistakes_;  // nothing thrown
      } catch (const Failure& failure) {
        if (failure.graph != this || failure.task != thrower_ || ended_[thrower_] != 0) ++mistakes_;
      }
      thrower_ = -1;
    }
    Clear();
    pool_.Run(graph_);
    return mistakes_ + static_cast<int>(std::count(ended_.begin(), ended_.end(), 0));
  }

 private:
  enum class Kind { kShort, kLong, kNested, kOtherPool };

  void Clear() { std::fill(ended_.begin(), ended_.end(), 0); }

  static void Task(void* context, std::int64_t index, int worker) {
    static_cast<RandomGraph*>(context)->Execute(index, worker);
  }

  void Execute(std::int64_t index, int worker) {
    // A predecessor that threw has not ended, and then nothing behind it may start.
    if (ended_[index] != 0) ++mistakes_;
    for (const int before : before_[index]) mistakes_ += ended_[before] == 0 ? 1 : 0;
    if (index == thrower_) throw Failure{this, thrower_};
    std::atomic<int> inner{0};
    switch (kind_[index]) {
      case Kind::kShort:
        break;
      case Kind::kLong:
        for (int i = 0; i < 2000; ++i) inner.fetch_add(1, std::memory_order_relaxed);
        break;
      case Kind::kNested:
        pool_.ParallelFor(3, [&](std::int64_t, int nested) { inner += nested == worker ? 1 : 0; });
        if (inner != 3) ++mistakes_;
        break;
      case Kind::kOtherPool:
        try {
          other_.ParallelFor(4, [&](std::int64_t i, int) {
            ++inner;
            if (i == 2) throw 7;
          });
          ++mistakes_;
        } catch (int seven) {
          if (seven != 7 || inner < 1) ++mistakes_;
        }
        break;
    }
    ended_[index] = 1;
  }

  Pool& pool_;
  Pool& other_;
  TaskGraph graph_;
  std::vector<std::vector<int>> before_;
  std::vector<int> ended_;
  std::vector<Kind> kind_;
  int thrower_ = -1;
  std::atomic<int> mistakes_{0};
};

class RandomGraphs : public BothSources {};
MOESAIC_BOTH_SOURCES(RandomGraphs);

TEST_P(RandomGraphs, FromSeveralCallers) {
  constexpr int kCallers = 3;
  // Libgomp starts a new team for every caller: a tenth of the graphs there.
  const int graphs = std::max(1, NumGraphs() / (GetParam() == ThreadSource::kOwn ? 1 : 10));
  Pool pool(3, GetParam()), other(2);
  std::atomic<int> left{graphs}, mistakes{0};
  std::vector<std::thread> callers;
  for (int me = 0; me < kCallers; ++me) {
    callers.emplace_back([&, me] {
      std::mt19937 random(100 + me);
      for (int i; (i = left.fetch_sub(1)) > 0;) {
        mistakes += RandomGraph(random, pool, other).Run();
        if (me == 0 && random() % 64 == 0) pool.SetNumThreads(1 + static_cast<int>(random() % 5));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(mistakes, 0);
}

TEST_P(RandomGraphs, PoolsThatComeAndGo) {
  std::mt19937 random(3);
  Pool other(2);
  for (int i = 0; i < std::max(1, NumGraphs() / 20); ++i) {
    Pool pool(1 + static_cast<int>(random() % 4), GetParam());
    EXPECT_EQ(RandomGraph(random, pool, other).Run(), 0);
  }
}

}  // namespace
}  // namespace moesaic::threadpool
