#include "threadpool/cgroup.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace moesaic::threadpool {
namespace {

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

bool HasWord(const std::string& comma_separated, const std::string& word) {
  const std::vector<std::string> words = Split(comma_separated, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// mountinfo writes blanks and backslashes in paths as \ooo.
std::string Unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

struct Mount {
  std::string root;   // the group that is mounted
  std::string point;  // where
};

/// The mount of the cgroup hierarchy: version 2, or the one of version 1 with the cpu controller.
std::optional<Mount> FindMount(const std::string& mountinfo, bool version2) {
  for (const std::string& line : Split(mountinfo, '\n')) {
    // id parent major:minor root point options [optional fields] - type source super-options
    const std::vector<std::string> fields = Split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (fields.size() < 6 || fields.end() - dash < 4) continue;
    if (version2 ? dash[1] != "cgroup2" : dash[1] != "cgroup" || !HasWord(dash[3], "cpu")) continue;
    return Mount{Unescape(fields[3]), Unescape(fields[4])};
  }
  return std::nullopt;
}

/// This process's group: version 2 has an empty list of controllers.
std::optional<std::string> FindGroup(const std::string& proc_cgroup, bool version2) {
  for (const std::string& line : Split(proc_cgroup, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version2 ? line.compare(0, first, "0") == 0 && controllers.empty() : HasWord(controllers, "cpu")) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

/// quota / period in a group's folder; 0 without a limit.
double QuotaOf(const FileReader& read, const std::string& folder, bool version2) {
  std::string quota, period;
  if (version2) {
    std::istringstream in(read(folder + "/cpu.max").value_or(""));
    in >> quota >> period;
  } else {
    std::istringstream(read(folder + "/cpu.cfs_quota_us").value_or("")) >> quota;
    std::istringstream(read(folder + "/cpu.cfs_period_us").value_or("")) >> period;
  }
  double q = 0, p = 0;
  if (!(std::istringstream(quota) >> q) || !(std::istringstream(period) >> p)) return 0;  // "max", or not there
  return q > 0 && p > 0 ? q / p : 0;
}

double LeastQuota(const FileReader& read, const std::string& mountinfo, const std::string& proc_cgroup, bool version2) {
  const std::optional<Mount> mount = FindMount(mountinfo, version2);
  const std::optional<std::string> group = FindGroup(proc_cgroup, version2);
  if (!mount || !group) return 0;
  // Seen from inside a container the group may lie outside what is mounted; then the mount itself is the group.
  std::string below;
  if (mount->root == "/") {
    below = *group;
  } else if (group->compare(0, mount->root.size(), mount->root) == 0) {
    below = group->substr(mount->root.size());
  }
  if (below.find("..") != std::string::npos) below.clear();
  while (!below.empty() && below.back() == '/') below.pop_back();

  double least = 0;
  for (;;) {
    const double quota = QuotaOf(read, mount->point + below, version2);
    if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
    if (below.empty()) return least;
    below.resize(below.rfind('/'));
  }
}

}  // namespace

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path);
  if (!in) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

double CgroupCpuQuota(const FileReader& read) {
  const std::optional<std::string> mountinfo = read("/proc/self/mountinfo");
  const std::optional<std::string> proc_cgroup = read("/proc/self/cgroup");
  if (!mountinfo || !proc_cgroup) return 0;
  double least = 0;
  for (const bool version2 : {true, false}) {
    const double quota = LeastQuota(read, *mountinfo, *proc_cgroup, version2);
    if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
  }
  return least;
}

}  // namespace moesaic::threadpool
