#include "bindings/profiling_bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "moe/phases.h"
#include "profiling/calls.h"
#include "profiling/clock.h"
#include "profiling/nvtx.h"
#include "profiling/range.h"
#include "profiling/trace.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

py::dict ToDict(const profiling::RangeStats& stats) {
  py::dict row;
  row["name"] = stats.name;
  row["category"] = stats.category;
  row["calls"] = stats.calls;
  row["thread_ns"] = stats.thread_ns;
  row["min_thread_ns"] = stats.min_thread_ns;
  row["max_thread_ns"] = stats.max_thread_ns;
  row["span_ns"] = stats.span_ns;
  row["threads"] = stats.threads;
  row["flops"] = stats.flops;
  row["bytes"] = stats.bytes;
  row["apportioned"] = stats.apportioned;
  return row;
}

py::dict ToDict(const profiling::PoolTotals& pool) {
  py::dict row;
  row["runs"] = pool.runs;
  row["tasks"] = pool.tasks;
  row["steals"] = pool.steals;
  row["parks"] = pool.parks;
  row["wall_ns"] = pool.wall_ns;
  row["lane_ns"] = pool.lane_ns;
  row["busy_ns"] = pool.busy_ns;
  row["stealing_ns"] = pool.stealing_ns;
  row["waiting_ns"] = pool.waiting_ns;
  row["parked_ns"] = pool.parked_ns;
  row["least_busy_ns"] = pool.least_busy_ns;
  row["most_busy_ns"] = pool.most_busy_ns;
  return row;
}

py::dict ToDict(const profiling::CallRecord& call) {
  py::dict row;
  row["kind"] = call.kind == profiling::CallKind::kForward ? "forward" : "backward";
  row["first"] = call.first;
  row["layer"] = call.layer;
  row["threads"] = call.threads;
  row["tokens"] = call.tokens;
  row["jobs"] = call.jobs;
  row["job_slots"] = call.job_slots;
  row["job_tasks"] = call.job_tasks;
  row["begin_ns"] = call.begin_ns;
  row["engine_begin_ns"] = call.engine_begin_ns;
  row["engine_end_ns"] = call.engine_end_ns;
  row["end_ns"] = call.end_ns;
  row["pool"] = ToDict(call.pool);
  return row;
}

/// Events as tuples (kind, begin_ns, end_ns, id, expert, rows, flops, bytes): there may be millions.
py::dict ToDict(const profiling::ThreadTrace& thread) {
  py::list events;
  for (const profiling::Event& event : thread.events) {
    events.append(py::make_tuple(static_cast<int>(event.kind), event.begin_ns, event.end_ns, event.id, event.expert, event.rows,
                                 event.flops, event.bytes));
  }
  py::dict row;
  row["os_id"] = thread.os_id;
  row["lane"] = thread.lane;
  row["name"] = thread.name;
  row["dropped"] = thread.dropped;
  row["events"] = events;
  return row;
}

/// A range around what Python does, from construction to Close(), on one thread; ranges of a thread nest.
class OuterRange {
 public:
  explicit OuterRange(const std::string& name) : range_(std::in_place, profiling::RegisterRange(name, "run")) {}
  void Close() { range_.reset(); }

 private:
  std::optional<profiling::Range> range_;
};

/// What one range takes in ns, the mean over those that a block of I opens in forward and backward (moe/), which are nearly all
/// of a step's: the median of many such blocks. Fused phases count, as they do in the timers: two of nine here.
/// @param evicted_bytes  memory that is read before each block, so that the caches hold that instead of what ranges need
double TimeRanges(std::int64_t blocks, std::int64_t evicted_bytes) {
  using moe::Phase;
  const profiling::GroupScope group(profiling::GroupOfCalls(0, false));
  const profiling::TaskScope task(1, 64);
  const profiling::Work work{1e7, 1e5};
  const std::vector<char> memory(static_cast<std::size_t>(evicted_bytes), 1);
  std::vector<std::uint64_t> times;  // in ticks: a reading of the clock itself would bring it into the caches
  std::int64_t read = 0;
  const std::int64_t start_ns = profiling::Now();
  const std::uint64_t start_ticks = __builtin_ia32_rdtsc();
  for (std::int64_t i = 0; i < blocks; ++i) {
    for (std::size_t byte = 0; byte < memory.size(); byte += 64) read += memory[byte];
    __builtin_ia32_lfence();  // the loads are no part of it
    const std::uint64_t start = __builtin_ia32_rdtsc();
    {
      const moe::PhaseRange range(Phase::kGateUpGemm, work, {{Phase::kGateUpLora, work}});
    }
    {
      const moe::PhaseRange range(Phase::kActivation);
    }
    {
      const moe::PhaseRange range(Phase::kD3Gemm, work, {{Phase::kD4LoraGrad, work}});
    }
    {
      const moe::PhaseRange range(Phase::kA1SiluBackward);
    }
    {
      const moe::PhaseRange range(Phase::kD4LoraGrad, work);
    }
    {
      const moe::PhaseRange range(Phase::kGU3GateDB, work);
    }
    {
      const moe::PhaseRange range(Phase::kGU3UpDB, work);
    }
    __builtin_ia32_lfence();
    times.push_back(__builtin_ia32_rdtsc() - start);
  }
  const double ns_per_tick =
      static_cast<double>(profiling::Now() - start_ns) / static_cast<double>(__builtin_ia32_rdtsc() - start_ticks);
  if (read < 0) throw std::logic_error("ones add up to less than nothing");  // so that they are read at all
  std::nth_element(times.begin(), times.begin() + blocks / 2, times.end());
  return static_cast<double>(times[static_cast<std::size_t>(blocks / 2)]) * ns_per_tick / 9.0;
}

/// What a reading of the clock takes in ns: the pool takes two for a task while timers are on.
double TimeClock(std::int64_t count) {
  const std::int64_t start = profiling::Now();
  for (std::int64_t i = 0; i < count; ++i) profiling::Now();
  return static_cast<double>(profiling::Now() - start) / static_cast<double>(count);
}

template <typename Rows>
py::list ToList(const Rows& rows) {
  py::list list;
  for (const auto& row : rows) list.append(ToDict(row));
  return list;
}

/// mark_entry and mark_exit, as plain functions of Python's: a dispatcher for arguments would be most of what they take, in
/// each call of a layer.
void AddMarks(const py::module_& module) {
  static std::array<PyMethodDef, 3> marks = {{
      {"mark_entry",
       [](PyObject*, PyObject*) -> PyObject* {
         profiling::MarkEntry();
         Py_RETURN_NONE;
       },
       METH_NOARGS, nullptr},
      {"mark_exit",
       [](PyObject*, PyObject*) -> PyObject* {
         profiling::MarkExit();
         Py_RETURN_NONE;
       },
       METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  }};
  if (PyModule_AddFunctions(module.ptr(), marks.data()) != 0) throw py::error_already_set();
}

}  // namespace

void BindProfiling(py::module_& module) {
  module.def("set_timers_enabled", &profiling::SetTimersEnabled, py::arg("enabled"));
  module.def("timers_enabled", &profiling::TimersEnabled);
  module.def("reset_timers", &profiling::Reset);
  module.def("timers_snapshot", [] {
    moe::RangeOf(moe::Phase::kForward);  // registers the phases first, in the order of their table
    return ToList(profiling::Snapshot());
  });
  module.def("layers_snapshot", [] {
    py::list rows;
    for (const profiling::GroupStats& row : profiling::GroupSnapshot()) {
      rows.append(py::make_tuple(profiling::LayerOfGroup(row.group), profiling::IsFirstOfGroup(row.group), row.id, row.calls,
                                 row.thread_ns, row.flops, row.bytes));
    }
    return rows;
  });
  module.def(
      "add_timed",
      [](const std::string& name, const std::string& category, std::int64_t begin_ns, std::int64_t ns, double bytes) {
        profiling::AddTimed(profiling::RegisterRange(name, category), begin_ns, ns, bytes);
      },
      py::arg("name"), py::arg("category"), py::arg("begin_ns"), py::arg("ns"), py::arg("bytes"));
  module.def("pool_snapshot", [] { return ToDict(profiling::PoolSnapshot()); });
  AddMarks(module);
  module.def("calls", [] {
    const profiling::CallSnapshot snapshot = profiling::Calls();
    return py::make_tuple(ToList(snapshot.calls), snapshot.dropped);
  });
  py::class_<OuterRange>(module, "OuterRange")
      .def(py::init<const std::string&>(), py::arg("name"))
      .def("close", &OuterRange::Close);
  module.def("time_ranges", &TimeRanges, py::arg("blocks"), py::arg("evicted_bytes") = 0);
  module.def("time_clock", &TimeClock, py::arg("count"));
  module.def("mute_nvtx", &profiling::nvtx::Mute, py::arg("muted"));
  module.def("start_trace", &profiling::StartTrace, py::arg("capacity") = profiling::kDefaultTraceCapacity);
  module.def("stop_trace", &profiling::StopTrace);
  module.def("read_trace", [] { return ToList(profiling::ReadTrace()); });
  module.def("clock_ns", &profiling::Now);
  module.def("count_thread_time", &profiling::CountThreadTime, py::arg("on"));
}

}  // namespace moesaic::bindings
