#include "bindings/interpreter_end.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

// Python joins all other threads before it calls what atexit holds: whoever is here besides is a daemon thread.
std::atomic<bool> ending{false};
std::atomic<pthread_t> ending_thread{};
std::atomic<int> inside{0};
thread_local int own_inside = 0;
std::terminate_handler terminate_before = nullptr;

bool EndsOnAnotherThread() { return ending && pthread_equal(ending_thread, pthread_self()) == 0; }

/// Unwinding is no C++ exception, so none is current where it reaches a function that throws nothing.
[[noreturn]] void SleepIfUnwound() {
  while (EndsOnAnotherThread() && std::current_exception() == nullptr) pause();
  if (terminate_before != nullptr) terminate_before();
  std::abort();
}

void WaitForTheLast() {
  constexpr auto kLimit = std::chrono::seconds(5);  // PyTorch's functions in question take microseconds
  ending_thread = pthread_self();
  ending = true;
  const py::gil_scoped_release unlocked;
  const auto began = std::chrono::steady_clock::now();
  while (inside > 0 && std::chrono::steady_clock::now() - began < kLimit) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

void UsesTorch::Begin() {
  if (EndsOnAnotherThread()) {
    PyErr_SetNone(PyExc_SystemExit);
    throw py::error_already_set();
  }
  inside_ = true;
  ++own_inside;
  ++inside;
}

void UsesTorch::End() {
  if (!inside_) return;
  inside_ = false;
  --own_inside;
  --inside;
}

void WatchForTheEnd() {
  pthread_atfork(nullptr, nullptr, [] { inside = own_inside; });  // a child has the forking thread alone
  // An import that failed later on may come again.
  if (std::get_terminate() != &SleepIfUnwound) terminate_before = std::set_terminate(&SleepIfUnwound);
  py::module_::import("atexit").attr("register")(py::cpp_function(&WaitForTheLast));
}

}  // namespace moesaic::bindings
