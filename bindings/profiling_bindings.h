// Timers, calls and traces for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

void BindProfiling(pybind11::module_& module);

}  // namespace moesaic::bindings
