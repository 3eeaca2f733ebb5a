#include "threadpool/deque.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace moesaic::threadpool {
namespace {

TEST(Deque, OwnerTakesTheNewestThiefTheOldest) {
  Deque deque;
  EXPECT_TRUE(deque.empty());
  EXPECT_EQ(deque.Pop(), Deque::kNone);
  EXPECT_EQ(deque.Steal(), Deque::kNone);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(deque.Push(i));
  EXPECT_FALSE(deque.empty());
  EXPECT_EQ(deque.Pop(), 3);
  EXPECT_EQ(deque.Steal(), 0);
  EXPECT_EQ(deque.Steal(), 1);
  EXPECT_EQ(deque.Pop(), 2);
  EXPECT_EQ(deque.Pop(), Deque::kNone);
  EXPECT_TRUE(deque.empty());
}

TEST(Deque, RefusesWhenFullAndWrapsAround) {
  Deque deque;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < Deque::kCapacity; ++i) ASSERT_TRUE(deque.Push(i));
    EXPECT_FALSE(deque.Push(-7));
    EXPECT_EQ(deque.Steal(), 0);
    EXPECT_TRUE(deque.Push(static_cast<int>(Deque::kCapacity)));
    for (int i = 1; i <= Deque::kCapacity; ++i) ASSERT_EQ(deque.Steal(), i);
    EXPECT_EQ(deque.Pop(), Deque::kNone);
  }
}

// The owner pushes and pops, two thieves steal: each task is taken exactly once.
TEST(Deque, EveryTaskIsTakenOnce) {
  constexpr int kTasks = 100000;
  Deque deque;
  std::vector<std::atomic<int>> taken(kTasks);
  std::atomic<bool> stop{false};
  const auto steal = [&] {
    while (!stop.load()) {
      const std::int32_t task = deque.Steal();
      if (task != Deque::kNone) taken[task].fetch_add(1);
    }
  };
  std::thread first(steal), second(steal);
  for (int i = 0; i < kTasks; ++i) {
    while (!deque.Push(i)) std::this_thread::yield();
    if (i % 3 != 0) continue;
    const std::int32_t task = deque.Pop();
    if (task != Deque::kNone) taken[task].fetch_add(1);
  }
  while (!deque.empty()) {
    const std::int32_t task = deque.Pop();
    if (task != Deque::kNone) taken[task].fetch_add(1);
  }
  stop = true;
  first.join();
  second.join();
  for (int i = 0; i < kTasks; ++i) ASSERT_EQ(taken[i].load(), 1) << "task " << i;
}

}  // namespace
}  // namespace moesaic::threadpool
