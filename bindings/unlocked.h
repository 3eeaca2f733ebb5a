// Who holds the Python lock when, and what becomes of threads when the interpreter ends meanwhile.
//
// A daemon thread may be anywhere when the main thread ends the interpreter. Python ends a thread that then asks for the lock
// by unwinding it, which no C++ destructor survives: the process aborts. PyTorch gives up the lock for a moment in many of its
// functions, some that the bindings call among them.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace moesaic::bindings {

/// Releases the Python lock for its scope, as pybind11::gil_scoped_release does. Where the interpreter has ended meanwhile, the
/// lock cannot be had again; such a thread sleeps here until the process is gone, as all do from Python 3.14 on.
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

/// The part of a call that uses PyTorch: the interpreter does not end before it is over (WatchForTheEnd). Once it is about to
/// end, a call from any thread but the ending one raises SystemExit, which ends a thread without a word.
class UsesTorch {
 public:
  /// Throws pybind11::error_already_set (SystemExit).
  UsesTorch() { Begin(); }
  ~UsesTorch() { End(); }
  UsesTorch(const UsesTorch&) = delete;
  UsesTorch& operator=(const UsesTorch&) = delete;

  void Begin();  ///< Throws pybind11::error_already_set (SystemExit).
  void End();

 private:
  bool inside_ = false;
};

/// Registers with Python's atexit what waits for UsesTorch. Called once while the module is imported.
void WatchForTheEnd();

}  // namespace moesaic::bindings
