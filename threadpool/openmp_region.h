// Threads of the process's OpenMP team.
#pragma once

#include "threadpool/executor.h"
#include "threadpool/topology.h"

namespace moesaic::threadpool {

/// Executes the started job of `executor` in one parallel region, in which each thread is a lane. OpenMP may deliver fewer
/// threads than there are lanes (a thread limit, a region around this one): the lanes that come do all the work.
void RunInOpenMpRegion(Executor& executor, const Topology& topology);

}  // namespace moesaic::threadpool
