// Computing without the Python lock.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace moesaic::bindings {

/// Releases the Python lock for its scope, as pybind11::gil_scoped_release does. Where the interpreter ends meanwhile, as it
/// may under a daemon thread, the lock cannot be had again: Python then ends the thread by unwinding it, which no C++
/// destructor survives. Such a thread sleeps here instead until the process is gone; Python 3.14 does the same.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();  // leaving this handler would end the process
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace moesaic::bindings
