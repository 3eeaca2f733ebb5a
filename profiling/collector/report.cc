#include "profiling/collector/report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

namespace moesaic::profiling::collector {
namespace {

constexpr const char* kSummaryHeader[] = {"Time (%)", "Total Time (ns)", "Instances",   "Avg (ns)", "Med (ns)",
                                          "Min (ns)", "Max (ns)",        "StdDev (ns)", "Range"};

std::string OneDecimal(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::vector<std::string> Cells(const SummaryRow& row, const Collected& collected) {
  return {OneDecimal(row.percent), std::to_string(row.total), std::to_string(row.instances),
          OneDecimal(row.average), OneDecimal(row.median),    std::to_string(row.min),
          std::to_string(row.max), OneDecimal(row.deviation), collected.names[row.name]};
}

std::string Quoted(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + '"';
}

// "expert=3 rows=17 flops=1.5e+06"; the value alone of a field without a name.
std::string PayloadText(const Payload& payload, const Collected& collected) {
  std::string text;
  if (payload.schema >= collected.schemas.size()) return text;  // a schema that nobody registered
  for (const Field& field : collected.schemas[payload.schema]) {
    char number[32];
    std::snprintf(number, sizeof number, "%.17g", ValueOf(field, payload));
    if (!text.empty()) text += ' ';
    if (!field.name.empty()) text.append(field.name).append("=");
    text += number;
  }
  return text;
}

std::string WithCommas(std::string number) {
  const std::size_t point = std::min(number.find('.'), number.size());
  for (std::size_t i = point; i > 3; i -= 3) number.insert(i - 3, 1, ',');
  return number;
}

// The first line is the header; all but the last column are numbers.
void WriteColumns(const std::vector<std::vector<std::string>>& lines, std::ostream& out) {
  std::vector<std::size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (std::size_t n = 0; n < lines.size(); ++n) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string& cell = lines[n][i];
      out << (i == 0 ? " " : "  ");
      if (i + 1 < widths.size()) out << std::string(widths[i] - cell.size(), ' ');
      out << cell;
    }
    out << '\n';
    if (n > 0) continue;
    for (std::size_t i = 0; i < widths.size(); ++i) out << (i == 0 ? " " : "  ") << std::string(widths[i], '-');
    out << '\n';
  }
}

// Ranges whose payload says what they computed: most work first.
void WriteWork(const Collected& collected, std::ostream& out) {
  struct Done {
    std::int64_t instances = 0, time = 0;
    double flops = 0;
  };
  std::map<NameId, Done> all;
  for (const Collected::Thread& thread : collected.threads) {
    for (const RangeRecord& range : thread.ranges) {
      if (range.payload.schema >= collected.schemas.size()) continue;
      for (const Field& field : collected.schemas[range.payload.schema]) {
        if (field.name != "flops" || !(ValueOf(field, range.payload) > 0)) continue;
        Done& done = all[range.name];
        ++done.instances;
        done.time += range.end_ns - range.begin_ns;
        done.flops += ValueOf(field, range.payload);
      }
    }
  }
  if (all.empty()) return;
  std::vector<std::pair<NameId, Done>> rows(all.begin(), all.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.flops > b.second.flops; });
  std::vector<std::vector<std::string>> lines{{"Work (GFLOP)", "Instances", "GFLOP/s a thread", "Range"}};
  for (const auto& [name, done] : rows) {
    const double rate = done.time > 0 ? done.flops / static_cast<double>(done.time) : 0;
    lines.push_back({WithCommas(OneDecimal(done.flops / 1e9)), WithCommas(std::to_string(done.instances)),
                     WithCommas(OneDecimal(rate)), collected.names[name]});
  }
  out << '\n';
  WriteColumns(lines, out);
}

}  // namespace

std::vector<SummaryRow> Summarize(const Collected& collected) {
  std::vector<std::vector<std::int64_t>> durations(collected.names.size());
  for (const Collected::Thread& thread : collected.threads) {
    for (const RangeRecord& range : thread.ranges) durations[range.name].push_back(range.end_ns - range.begin_ns);
  }
  std::vector<SummaryRow> rows;
  double all = 0;
  for (std::size_t name = 0; name < durations.size(); ++name) {
    std::vector<std::int64_t>& times = durations[name];
    if (times.empty()) continue;
    std::sort(times.begin(), times.end());
    SummaryRow& row = rows.emplace_back();
    row.name = static_cast<NameId>(name);
    row.instances = static_cast<std::int64_t>(times.size());
    for (const std::int64_t time : times) row.total += time;
    row.average = static_cast<double>(row.total) / static_cast<double>(row.instances);
    const std::size_t middle = times.size() / 2;
    row.median = times.size() % 2 == 1 ? static_cast<double>(times[middle])
                                       : (static_cast<double>(times[middle - 1]) + static_cast<double>(times[middle])) / 2;
    row.min = times.front();
    row.max = times.back();
    double squares = 0;
    for (const std::int64_t time : times) {
      const double distance = static_cast<double>(time) - row.average;
      squares += distance * distance;
    }
    row.deviation = row.instances > 1 ? std::sqrt(squares / static_cast<double>(row.instances - 1)) : 0;
    all += static_cast<double>(row.total);
  }
  for (SummaryRow& row : rows) row.percent = all > 0 ? 100 * static_cast<double>(row.total) / all : 0;
  std::sort(rows.begin(), rows.end(), [&](const SummaryRow& a, const SummaryRow& b) {
    return a.total != b.total ? a.total > b.total : collected.names[a.name] < collected.names[b.name];
  });
  return rows;
}

void WriteSummaryCsv(const Collected& collected, std::ostream& out) {
  const char* separator = "";
  for (const char* title : kSummaryHeader) {
    out << separator << title;
    separator = ",";
  }
  out << '\n';
  for (const SummaryRow& row : Summarize(collected)) {
    separator = "";
    for (const std::string& cell : Cells(row, collected)) {
      out << separator << Quoted(cell);
      separator = ",";
    }
    out << '\n';
  }
}

void WriteSummaryText(const Collected& collected, std::ostream& out) {
  std::vector<std::vector<std::string>> lines{{std::begin(kSummaryHeader), std::end(kSummaryHeader)}};
  for (const SummaryRow& row : Summarize(collected)) {
    lines.push_back(Cells(row, collected));
    for (std::size_t i = 0; i + 1 < lines.back().size(); ++i) lines.back()[i] = WithCommas(lines.back()[i]);
  }
  WriteColumns(lines, out);
  WriteWork(collected, out);
  const Losses& losses = collected.losses;
  if (losses.over_capacity > 0) {
    out << losses.over_capacity << " ranges were lost: more than MOESAIC_NVTX_CAPACITY\n";
  }
  if (losses.too_deep > 0)
    out << losses.too_deep << " ranges were lost: more than " << Recorder::kMaxDepth << " open at once\n";
  if (losses.unbalanced_pops > 0) out << losses.unbalanced_pops << " pops without an open range\n";
  if (losses.unfinished > 0) out << losses.unfinished << " ranges were still open at the end, and are left out\n";
}

void WriteTraceCsv(const Collected& collected, std::ostream& out) {
  struct Place {
    std::int64_t children = 0, children_time = 0;
    std::uint64_t parent = 0;
  };
  struct Line {
    const RangeRecord* range;
    int os_id;
  };
  std::unordered_map<std::uint64_t, Place> places;
  std::vector<Line> lines;
  for (const Collected::Thread& thread : collected.threads) {
    for (const RangeRecord& range : thread.ranges) {
      lines.push_back({&range, thread.os_id});
      if (range.parent == 0) continue;
      places[range.id].parent = range.parent;
      Place& of_parent = places[range.parent];
      ++of_parent.children;
      of_parent.children_time += range.end_ns - range.begin_ns;
    }
  }
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return a.range->begin_ns != b.range->begin_ns ? a.range->begin_ns < b.range->begin_ns : a.range->id < b.range->id;
  });
  out << "Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl,NumChild,RangeId,ParentId,"
         "RangeStack,NameTree,Payload\n";
  const pid_t pid = getpid();
  const auto place_of = [&](std::uint64_t id) {
    const auto found = places.find(id);
    return found == places.end() ? Place{} : found->second;
  };
  for (const auto& [range, os_id] : lines) {
    const Place place = place_of(range->id);
    const std::string& name = collected.names[range->name];
    std::vector<std::uint64_t> around;
    for (std::uint64_t id = range->id; id != 0; id = place_of(id).parent) around.push_back(id);
    std::string stack;
    for (std::size_t i = around.size(); i > 0; --i) stack.append(":").append(std::to_string(around[i - 1]));
    const std::int64_t duration = range->end_ns - range->begin_ns;
    out << range->begin_ns << ',' << range->end_ns << ',' << duration << ',' << place.children_time << ','
        << duration - place.children_time << ',' << Quoted(name) << ',' << pid << ',' << os_id << ',' << range->level << ','
        << place.children << ',' << range->id << ',';
    if (range->parent != 0) out << range->parent;
    out << ',' << stack << ',' << Quoted(std::string(2 * range->level, '-') + name) << ','
        << Quoted(PayloadText(range->payload, collected)) << '\n';
  }
}

}  // namespace moesaic::profiling::collector
