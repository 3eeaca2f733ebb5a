// The Python module moesaic._core: everything that needs C++. python/moesaic/_core.pyi describes it; what users see is the
// package around it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <string>

#include "bindings/arena.h"
#include "bindings/bench_bindings.h"
#include "bindings/evaluator_bindings.h"
#include "bindings/fused_bindings.h"
#include "bindings/interpreter_end.h"
#include "bindings/layer_module.h"
#include "bindings/profiling_bindings.h"
#include "bindings/sampling_bindings.h"
#include "bindings/tensor.h"
#include "bindings/thread_source.h"
#include "cpu_kernels/fused/scratch.h"
#include "cpu_kernels/isa.h"
#include "moe/workspace.h"
#include "profiling/clock.h"
#include "sampling/sampler.h"
#include "threadpool/pool.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

/// Beside PyTorch the workers are the process's OpenMP team: two sets of threads on the same cores would spin against each
/// other.
threadpool::ThreadSource SourceFromEnvironment() {
  const char* value = std::getenv("MOESAIC_THREAD_SOURCE");
  const std::string source = value == nullptr ? "" : value;
  return source.empty() ? threadpool::ThreadSource::kOpenMp : SourceNamed(source, "MOESAIC_THREAD_SOURCE");
}

py::dict TierToDict(const IsaTier& tier) {
  py::dict row;
  row["name"] = tier.name;
  row["supported"] = tier.supported;
  row["permitted"] = tier.permitted;
  row["compiled"] = tier.compiled;
  row["chosen"] = tier.chosen;
  return row;
}

template <typename Rows, typename ToDict>
py::list ToList(const Rows& rows, ToDict to_dict) {
  py::list list;
  for (const auto& row : rows) list.append(to_dict(row));
  return list;
}

void BindThreads(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("set_num_threads", [](int n) { threadpool::Pool::Default().SetNumThreads(n); }, py::arg("n"), unlocked);
  module.def("get_num_threads", [] { return threadpool::Pool::Default().num_threads(); }, unlocked);
  module.def(
      "set_thread_source", [](const std::string& source) { threadpool::Pool::Default().SetSource(SourceNamed(source)); },
      py::arg("source"), unlocked);
  // Not done while the module is initialised, where an error would come out as ImportError.
  module.def("apply_environment", [] {
    profiling::CheckClock();
    threadpool::Pool::Default().SetSource(SourceFromEnvironment());
  });
  module.def("get_thread_source",
             [] { return threadpool::Pool::Default().source() == threadpool::ThreadSource::kOwn ? "own" : "openmp"; });
}

void BindHost(py::module_& module) {
  module.def("isa", [] { return ChosenIsa(); });
  module.def("isa_tiers", [] { return ToList(IsaTiers(), TierToDict); });
  module.def(
      "verify_isa", [](const std::string& name) { return VerifyIsa(name); }, py::arg("name"),
      py::call_guard<py::gil_scoped_release>());
  module.def("cpu_name", [] { return CpuName(); });
}

void BindMemory(py::module_& module) {
  module.def("memory_stats", [] {
    const ArenaStats stats = Arena::Default().Stats();
    py::dict row;
    row["in_use_bytes"] = stats.in_use_bytes;
    row["cached_bytes"] = stats.cached_bytes;
    row["peak_in_use_bytes"] = stats.peak_in_use_bytes;
    row["blocks_in_use"] = stats.blocks_in_use;
    row["allocations"] = stats.allocations;
    row["reused"] = stats.reused;
    return row;
  });
  module.def(
      "trim_memory",
      [] {
        moe::ReleaseWorkspaces();
        fused::ReleaseScratch();
        sampling::ReleaseScratch();
        return Arena::Default().Trim();
      },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace moesaic::bindings

PYBIND11_MODULE(_core, module) {
  namespace bindings = moesaic::bindings;
  py::register_exception<moesaic::UnsupportedHostError>(module, "UnsupportedHostError", PyExc_RuntimeError).attr("__module__") =
      "moesaic";
  bindings::LoadTorch();
  bindings::WatchForTheEnd();
  bindings::BindThreads(module);
  bindings::BindHost(module);
  bindings::BindProfiling(module);
  bindings::BindMemory(module);
  bindings::BindLayer(module);
  bindings::BindFused(module);
  bindings::BindSampling(module);
  bindings::RegisterBench(module);
  bindings::RegisterEvaluator(module);
}
