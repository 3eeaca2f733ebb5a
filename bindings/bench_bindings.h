// The ceiling probes of profiling/bench and the machine's topology, as functions of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds the topology and the probes; python/moesaic/_core.pyi describes them.
void RegisterBench(pybind11::module_& module);

}  // namespace moesaic::bindings
