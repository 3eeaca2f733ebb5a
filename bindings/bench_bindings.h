// The ceiling probes of profiling/bench and the machine's topology, as functions of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds topology, compute_probes, measure_compute, ReadProbe and last_level_cache_bytes to the module.
void RegisterBench(pybind11::module_& module);

}  // namespace moesaic::bindings
