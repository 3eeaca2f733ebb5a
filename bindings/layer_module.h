// The experts layer as a Python class.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds the class `Layer`; python/moesaic/_core.pyi describes it.
void BindLayer(pybind11::module_& module);

}  // namespace moesaic::bindings
