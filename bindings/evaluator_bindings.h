// The tile evaluator in Python: cpu_kernels/tile_evaluator/.
#pragma once

#include <pybind11/pybind11.h>

namespace moesaic::bindings {

void RegisterEvaluator(pybind11::module_& module);

}  // namespace moesaic::bindings
