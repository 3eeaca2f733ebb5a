// What fork() must not tear apart.
#pragma once

#include <mutex>

namespace moesaic::threadpool {

/// Held while an object of the whole process is made, and by fork(): a child never inherits one that is half made, nor a lock
/// that a thread it does not have would have to release.
std::recursive_mutex& ProcessMutex();

/// Is told in the child after a fork(), where only the forking thread exists.
class ForkListener {
 public:
  ForkListener();
  ForkListener(const ForkListener&) = delete;
  ForkListener& operator=(const ForkListener&) = delete;
  virtual void AfterForkInChild() = 0;

  /// Whether this process was forked from one that had loaded this library.
  static bool InForkedChild();

 protected:
  virtual ~ForkListener();
};

}  // namespace moesaic::threadpool
