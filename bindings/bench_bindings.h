// The submodule `bench`: instruction sets of the host, and the ceiling probes of profiling/bench.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds the submodule `bench` to the module.
void RegisterBench(pybind11::module_& module);

}  // namespace moesaic::bindings
