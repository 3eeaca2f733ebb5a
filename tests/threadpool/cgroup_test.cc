#include "threadpool/cgroup.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace moesaic::threadpool {
namespace {

using Files = std::map<std::string, std::string>;

double Quota(const Files& files) {
  return CgroupCpuQuota([&files](const std::string& path) -> std::optional<std::string> {
    const auto file = files.find(path);
    if (file == files.end()) return std::nullopt;
    return file->second;
  });
}

const char kMount2[] =
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    "31 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const char kMount1[] =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

TEST(CgroupCpuQuota, NoneWithoutCgroups) {
  EXPECT_EQ(Quota({}), 0);
  EXPECT_EQ(Quota({{"/proc/self/mountinfo", "garbage\n- - -\n"}, {"/proc/self/cgroup", "nonsense"}}), 0);
}

TEST(CgroupCpuQuota, Version2) {
  Files files = {{"/proc/self/mountinfo", kMount2}, {"/proc/self/cgroup", "0::/user.slice/job\n"}};
  EXPECT_EQ(Quota(files), 0);
  files["/sys/fs/cgroup/user.slice/job/cpu.max"] = "max 100000\n";
  EXPECT_EQ(Quota(files), 0);
  files["/sys/fs/cgroup/user.slice/job/cpu.max"] = "250000 100000\n";
  EXPECT_DOUBLE_EQ(Quota(files), 2.5);
}

TEST(CgroupCpuQuota, TheTightestOfAllGroupsAboveCounts) {
  Files files = {{"/proc/self/mountinfo", kMount2},
                 {"/proc/self/cgroup", "0::/a/b/c\n"},
                 {"/sys/fs/cgroup/a/b/c/cpu.max", "800000 100000\n"},
                 {"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"},
                 {"/sys/fs/cgroup/a/cpu.max", "300000 100000\n"}};
  EXPECT_DOUBLE_EQ(Quota(files), 3);
  files["/sys/fs/cgroup/cpu.max"] = "50000 100000\n";  // the mount's own, as inside a container
  EXPECT_DOUBLE_EQ(Quota(files), 0.5);
}

TEST(CgroupCpuQuota, Version1) {
  Files files = {{"/proc/self/mountinfo", kMount1},
                 {"/proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/docker/1\n0::/\n"},
                 {"/sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us", "-1\n"},
                 {"/sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us", "100000\n"}};
  EXPECT_EQ(Quota(files), 0);
  files["/sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us"] = "400000\n";
  EXPECT_DOUBLE_EQ(Quota(files), 4);
}

TEST(CgroupCpuQuota, GroupSeenFromInsideAContainer) {
  // Only the container's own group is mounted, while /proc tells its path on the host.
  Files files = {{"/proc/self/mountinfo", "32 31 0:29 /docker/1 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"},
                 {"/proc/self/cgroup", "4:cpu:/docker/1\n"},
                 {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n"},
                 {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}};
  EXPECT_DOUBLE_EQ(Quota(files), 1.5);
  files["/proc/self/cgroup"] = "4:cpu:/docker/1/sub\n";
  files["/sys/fs/cgroup/cpu/sub/cpu.cfs_quota_us"] = "100000\n";
  files["/sys/fs/cgroup/cpu/sub/cpu.cfs_period_us"] = "100000\n";
  EXPECT_DOUBLE_EQ(Quota(files), 1);
  files["/proc/self/cgroup"] = "4:cpu:/../other\n";
  EXPECT_DOUBLE_EQ(Quota(files), 1.5);
}

TEST(CgroupCpuQuota, MountPointWithBlanks) {
  EXPECT_DOUBLE_EQ(Quota({{"/proc/self/mountinfo", "31 22 0:26 / /odd\\040place rw - cgroup2 cgroup2 rw\n"},
                          {"/proc/self/cgroup", "0::/\n"},
                          {"/odd place/cpu.max", "200000 100000\n"}}),
                   2);
}

TEST(CgroupCpuQuota, ThisProcess) { EXPECT_GE(CgroupCpuQuota(), 0); }

}  // namespace
}  // namespace moesaic::threadpool
