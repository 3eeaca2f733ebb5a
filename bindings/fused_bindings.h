// Fused dense layers as Python functions.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

/// Adds the class `PackedMatrix` and the functions on it; python/moesaic/_core.pyi describes them.
void BindFused(pybind11::module_& module);

}  // namespace moesaic::bindings
