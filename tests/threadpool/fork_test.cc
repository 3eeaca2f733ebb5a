// fork(): the child has a working pool, whatever the parent was doing.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/pool.h"

namespace moesaic::threadpool {
namespace {

class Fork : public BothSources {
 protected:
  void SetUp() override {
    if (MOESAIC_TSAN) GTEST_SKIP() << "ThreadSanitizer ends a child that starts threads after a fork of several";
  }
};
MOESAIC_BOTH_SOURCES(Fork);

bool Works(Pool& pool) {
  std::vector<int> calls(500);
  pool.ParallelFor(500, [&](std::int64_t i, int) { ++calls[i]; });
  for (const int count : calls) {
    if (count != 1) return false;
  }
  return true;
}

/// Under AddressSanitizer, waits. A run does not wait for threads that are still starting, and these allocate; that allocator,
/// unlike glibc's, hands its locks to a child as they are.
void LetThreadsStart() {
#if defined(__SANITIZE_ADDRESS__)
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
#endif
}

/// Runs the check in a child, which an alarm ends if it hangs.
void ExpectInChild(const std::function<bool()>& check) {
  LetThreadsStart();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(30);
    _exit(check() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_FALSE(WIFSIGNALED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_P(Fork, AChildHasAWorkingPool) {
  Pool used(3, GetParam()), unused(2, GetParam());
  ASSERT_TRUE(Works(used));
  ExpectInChild([&] {
    bool good = used.num_threads() == 3 && used.source() == ThreadSource::kOwn && unused.source() == ThreadSource::kOwn;
    for (int round = 0; round < 20; ++round) good = good && Works(used) && Works(unused) && Works(Pool::Default());
    used.SetSource(ThreadSource::kOpenMp);
    good = good && used.source() == ThreadSource::kOwn && Works(used);
    used.SetNumThreads(5);
    good = good && used.num_threads() == 5 && Works(used);
    Pool made_here(2, GetParam());
    return good && made_here.source() == ThreadSource::kOwn && Works(made_here);
  });
  EXPECT_EQ(used.source(), GetParam());
  EXPECT_TRUE(Works(used));
}

TEST_P(Fork, AGrandchildToo) {
  Pool pool(3, GetParam());
  ASSERT_TRUE(Works(pool));
  ExpectInChild([&] {
    if (!Works(pool)) return false;
    LetThreadsStart();
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(Works(pool) ? 0 : 1);
    int status = 1;
    return waitpid(grandchild, &status, 0) == grandchild && status == 0 && Works(pool);
  });
}

// A child that is forked while another thread allocates hangs in the allocator of gcc 12's AddressSanitizer, pool or no pool.
#if defined(__SANITIZE_ADDRESS__)
#define SKIP_WHERE_THE_ALLOCATOR_IS_NOT_FORK_SAFE() \
  GTEST_SKIP() << "AddressSanitizer's allocator does not survive a fork while another thread allocates"
#else
#define SKIP_WHERE_THE_ALLOCATOR_IS_NOT_FORK_SAFE() static_cast<void>(0)
#endif

TEST_P(Fork, WhileAnotherThreadRuns) {
  SKIP_WHERE_THE_ALLOCATOR_IS_NOT_FORK_SAFE();
  Pool pool(3, GetParam());
  std::atomic<bool> stop{false}, failed{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      while (!stop) {
        if (!Works(pool)) failed = true;
      }
    });
  }
  for (int round = 0; round < 25; ++round) ExpectInChild([&] { return Works(pool); });
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_FALSE(failed);
}

TEST_P(Fork, WhileAnotherThreadResizes) {
  SKIP_WHERE_THE_ALLOCATOR_IS_NOT_FORK_SAFE();
  Pool pool(2, GetParam());
  std::atomic<bool> stop{false};
  std::thread resizer([&] {
    for (int n = 1; !stop; n = n % 4 + 1) {
      pool.SetNumThreads(n);
      Works(pool);
    }
  });
  for (int round = 0; round < 25; ++round) ExpectInChild([&] { return Works(pool); });
  stop = true;
  resizer.join();
}

TEST_P(Fork, DuringATurn) {
  Pool pool(2, GetParam());
  ASSERT_TRUE(Works(pool));
  {
    const Pool::Turn turn(pool);
    ExpectInChild([&] { return Works(pool); });
  }
  std::optional<Pool::Turn> turn(pool);
  LetThreadsStart();
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    turn.reset();  // a child may end the turn that it was born with
    const bool good = Works(pool);
    std::thread([&] { _exit(good && Works(pool) ? 0 : 1); }).join();
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  turn.reset();
  EXPECT_TRUE(Works(pool));
}

TEST_P(Fork, InsideATask) {
  Pool pool(2, GetParam());
  std::atomic<int> status{-1};
  pool.ParallelFor(4, [&](std::int64_t i, int) {
    if (i != 2) return;
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      _exit(Works(pool) ? 0 : 1);  // inside a task: on this thread alone
    }
    int result = 1;
    waitpid(child, &result, 0);
    status = result;
  });
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Works(pool));
}

}  // namespace
}  // namespace moesaic::threadpool
