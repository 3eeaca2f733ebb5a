// The ceiling probes of profiling/bench and the machine's topology, as functions of the module.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "cpu_kernels/kernels.h"

namespace moesaic::bindings {

/// The tier of that name. Throws std::invalid_argument where none runs here.
const KernelTier& RunnableTier(const std::string& isa);

/// Adds the topology and the probes; python/moesaic/_core.pyi describes them.
void RegisterBench(pybind11::module_& module);

}  // namespace moesaic::bindings
