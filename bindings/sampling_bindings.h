// The sampler as a function of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds `sample` to the module.
void BindSampling(pybind11::module_& module);

}  // namespace moesaic::bindings
