// What a host may do to a process: few CPUs, CPUs taken away while it runs, no more threads, signals, threads that come and go.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/threadpool/sources.h"
#include "threadpool/affinity.h"
#include "threadpool/pool.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {
namespace {

class Conditions : public BothSources {};
MOESAIC_BOTH_SOURCES(Conditions);

bool Works(Pool& pool) {
  std::vector<int> calls(300);
  pool.ParallelFor(300, [&](std::int64_t i, int) { ++calls[i]; });
  for (const int count : calls) {
    if (count != 1) return false;
  }
  return true;
}

int ThreadsOfThisProcess() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) return static_cast<int>(std::strtol(line.c_str() + 8, nullptr, 10));
  }
  return -1;
}

void Bind(const std::vector<int>& cpus) {
  const CpuSet set(cpus);
  ASSERT_EQ(sched_setaffinity(0, set.bytes(), set.get()), 0);
}

bool RightOnOneCpu(ThreadSource source) {
  Bind({Topology::Discover().affinity.back()});
  unsetenv("MOESAIC_NUM_THREADS");
  Pool by_default(0, source), more(4, source);
  if (Topology::Host().UsableCores() != 1 || by_default.num_threads() != 1) return false;
  for (int round = 0; round < 50; ++round) {
    if (!Works(by_default) || !Works(more)) return false;
  }
  return true;
}

TEST_P(Conditions, OneCpu) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";  // in a new process, where Host() is not known yet
  EXPECT_EXIT(_exit(RightOnOneCpu(GetParam()) ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST_P(Conditions, CpusComeAndGo) {
  const std::vector<int> all = Topology::Host().affinity;
  Pool pool(static_cast<int>(all.size()), GetParam()), late(3, GetParam());
  for (int round = 0; round < 30; ++round) {
    Bind(round % 3 == 0 ? all : std::vector<int>{all[static_cast<std::size_t>(round) % all.size()]});
    ASSERT_TRUE(Works(pool));
    if (round > 10) {
      ASSERT_TRUE(Works(late));
    }
  }
}

TEST_P(Conditions, CallersByTheThousand) {
  Pool pool(2, GetParam());
  ASSERT_TRUE(Works(pool));
  const int threads = GetParam() == ThreadSource::kOwn && !MOESAIC_TSAN ? 2000 : 300;
  std::atomic<int> good{0};
  for (int i = 0; i < threads; i += 4) {
    std::vector<std::thread> callers;
    for (int k = 0; k < 4; ++k) callers.emplace_back([&] { good += Works(pool) ? 1 : 0; });
    for (std::thread& caller : callers) caller.join();
  }
  EXPECT_EQ(good, threads);
}

TEST(ConditionsOwn, PoolsByTheThousandLeaveNoThread) {
  {
    Pool first(2);  // ThreadSanitizer starts a thread of its own beside the first
    ASSERT_TRUE(Works(first));
  }
  const int before = ThreadsOfThisProcess();
  for (int i = 0; i < (MOESAIC_TSAN ? 200 : 1000); ++i) {
    Pool pool(3);
    ASSERT_TRUE(Works(pool));
  }
  // A joined thread may still be on its way out of the kernel's list.
  for (int wait = 0; wait < 1000 && ThreadsOfThisProcess() > before; ++wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(ThreadsOfThisProcess(), before);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The sanitizers map terabytes: no limit on addresses can be set there.
TEST(ConditionsOwn, NoMoreThreads) {
  Pool pool(200);
  const int before = ThreadsOfThisProcess();
  std::ifstream status("/proc/self/statm");
  rlim_t pages = 0;
  status >> pages;
  rlimit old;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &old), 0);
  // Room for some stacks of 8 MiB, not for 199.
  const rlimit tight{pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{200} << 20), old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  for (int round = 0; round < 3; ++round) {
    try {
      Works(pool);
      ADD_FAILURE() << "nothing thrown";
    } catch (const std::system_error& error) {
      EXPECT_NE(std::string(error.what()).find("of the pool"), std::string::npos) << error.what();
    }
  }
  for (int wait = 0; wait < 1000 && ThreadsOfThisProcess() > before; ++wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(ThreadsOfThisProcess(), before) << "threads that did start are left";
  pool.SetNumThreads(3);
  EXPECT_TRUE(Works(pool));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &old), 0);
  pool.SetNumThreads(200);
  EXPECT_TRUE(Works(pool));
}
#endif

std::atomic<int> g_signals{0};

#if defined(MOESAIC_SANITIZED)
constexpr std::size_t kSanitizerStack = 64 << 10;
#else
constexpr std::size_t kSanitizerStack = 0;
#endif

// Signals reach the caller's thread only (workers block them), interrupt its waits, and may use a stack of their own.
TEST_P(Conditions, SignalsDuringARun) {
  Pool pool(3, GetParam());
  ASSERT_TRUE(Works(pool));
  // The least that the kernel takes, and what sanitizers need besides.
  std::vector<char> memory(static_cast<std::size_t>(std::max(2048L, sysconf(_SC_MINSIGSTKSZ))) + kSanitizerStack);
  stack_t stack{memory.data(), 0, memory.size()}, old_stack;
  ASSERT_EQ(sigaltstack(&stack, &old_stack), 0);
  struct sigaction action{}, old_action;
  action.sa_handler = [](int) { g_signals.fetch_add(1, std::memory_order_relaxed); };
  action.sa_flags = SA_ONSTACK;  // no SA_RESTART: system calls return early
  ASSERT_EQ(sigaction(SIGALRM, &action, &old_action), 0);
  const itimerval often{{0, 500}, {0, 500}};
  ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  bool good = true;
  for (int round = 0; round < 20000 && g_signals < 50; ++round) {
    good = good && Works(pool);
    pool.ParallelFor(4, [](std::int64_t i, int) {
      if (i == 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  const itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &old_action, nullptr);
  stack_t off{nullptr, SS_DISABLE, 0};
  sigaltstack(&off, nullptr);
  EXPECT_TRUE(good);
  EXPECT_GE(g_signals, 50);
}

}  // namespace
}  // namespace moesaic::threadpool
