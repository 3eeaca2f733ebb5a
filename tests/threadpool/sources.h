// Tests that run once for each source of threads.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "threadpool/pool.h"

#if defined(__SANITIZE_THREAD__)
#define MOESAIC_TSAN 1
#else
#define MOESAIC_TSAN 0
#endif

namespace moesaic::threadpool {

class BothSources : public testing::TestWithParam<ThreadSource> {
 protected:
  void SetUp() override {
    if (MOESAIC_TSAN && GetParam() == ThreadSource::kOpenMp) {
      GTEST_SKIP() << "ThreadSanitizer cannot see libgomp's synchronisation and would report races that are none";
    }
  }
};

inline std::string SourceName(const testing::TestParamInfo<ThreadSource>& info) {
  return info.param == ThreadSource::kOwn ? "Own" : "OpenMp";
}

#define MOESAIC_BOTH_SOURCES(suite) \
  INSTANTIATE_TEST_SUITE_P(Sources, suite, testing::Values(ThreadSource::kOwn, ThreadSource::kOpenMp), SourceName)

}  // namespace moesaic::threadpool
