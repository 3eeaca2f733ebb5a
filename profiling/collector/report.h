// The collector's files: nsys's tables of push and pop ranges.
#pragma once

#include <ostream>
#include <vector>

#include "profiling/collector/recorder.h"

namespace moesaic::profiling::collector {

/// One line of nsys's nvtx_pushpop_sum. Times in ns.
struct SummaryRow {
  double percent = 0;  ///< of the total of all lines; nested ranges count more than once, as in nsys
  std::int64_t total = 0;
  std::int64_t instances = 0;
  double average = 0;
  double median = 0;
  std::int64_t min = 0;
  std::int64_t max = 0;
  double deviation = 0;  ///< of a sample (n - 1); 0 for a single instance
  NameId name = 0;
};

/// Longest total first; names break ties.
std::vector<SummaryRow> Summarize(const Collected& collected);

void WriteSummaryCsv(const Collected& collected, std::ostream& out);
/// As text in columns, and below it the work of ranges whose payload has a field "flops"; ends with a line for each kind of
/// loss there was.
void WriteSummaryText(const Collected& collected, std::ostream& out);
/// One line a range, in the order in which they began: columns of nsys's nvtx_pushpop_trace, and its payload.
void WriteTraceCsv(const Collected& collected, std::ostream& out);

}  // namespace moesaic::profiling::collector
