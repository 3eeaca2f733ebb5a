#include "threadpool/fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

namespace moesaic::threadpool {
namespace {

// Never destroyed: pools with static storage may end after this file's objects.
struct State {
  std::recursive_mutex mutex;
  std::vector<ForkListener*> listeners;
  std::atomic<bool> in_child{false};
};

State& TheState();

void BeforeFork() { TheState().mutex.lock(); }

void AfterForkInParent() { TheState().mutex.unlock(); }

void AfterForkInChild() {
  State& state = TheState();
  // The mutex is held by a thread id of the parent's: it cannot be unlocked, only made anew.
  new (&state.mutex) std::recursive_mutex;
  state.in_child.store(true, std::memory_order_relaxed);
  for (ForkListener* listener : state.listeners) listener->AfterForkInChild();
}

State& TheState() {
  static State& state = *[] {
    auto* made = new State;
    pthread_atfork(&BeforeFork, &AfterForkInParent, &AfterForkInChild);
    return made;
  }();
  return state;
}

}  // namespace

std::recursive_mutex& ProcessMutex() { return TheState().mutex; }

ForkListener::ForkListener() {
  const std::lock_guard lock(ProcessMutex());
  TheState().listeners.push_back(this);
}

ForkListener::~ForkListener() {
  const std::lock_guard lock(ProcessMutex());
  std::erase(TheState().listeners, this);
}

bool ForkListener::InForkedChild() { return TheState().in_child.load(std::memory_order_relaxed); }

}  // namespace moesaic::threadpool
