// What becomes of threads inside the bindings when the interpreter ends.
//
// A daemon thread may be anywhere when the main thread ends the interpreter. Up to Python 3.13 a thread that then asks for the
// lock is ended by unwinding it, which no C++ destructor and no `catch (...)` survives: the process would abort. PyTorch gives
// up the lock for a moment in many of its functions, some that the bindings call among them.
#pragma once

namespace moesaic::bindings {

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

/// Called while the module is imported. Registers with Python's atexit what waits for UsesTorch; and from then on a thread
/// whose unwinding reaches a destructor, instead of aborting the process, sleeps until it is gone (as Python 3.14 has such
/// threads do at once): for example where a call has returned and takes the lock again, or where a thread drops its last
/// tensors. It is std::terminate that sleeps, once the end has begun: also for a thread that calls it for another reason
/// without a current exception. Not helped are a `catch (...)` that swallows an unwinding (the C library aborts), and frames of
/// other libraries where this one has a C++ runtime of its own.
void WatchForTheEnd();

}  // namespace moesaic::bindings
