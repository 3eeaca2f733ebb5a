// The CPU quota that control groups put on this process.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace moesaic::threadpool {

/// Reads a whole file; nothing if it cannot be read. Tests give their own.
using FileReader = std::function<std::optional<std::string>(const std::string& path)>;

std::optional<std::string> ReadFile(const std::string& path);

/// CPUs' worth of time that this process may use: the least quota / period over its control group and all groups above it that
/// are mounted here, version 2 (cpu.max) and version 1 (cpu.cfs_quota_us, cpu.cfs_period_us). 0: no limit, or none that can be
/// read. Source: Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
double CgroupCpuQuota(const FileReader& read = ReadFile);

}  // namespace moesaic::threadpool
