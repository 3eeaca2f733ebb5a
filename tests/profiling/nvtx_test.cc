// Ranges as a tool sees them. NVTX looks for a tool once in a process, so each case runs nvtx_program.cc.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace moesaic::profiling {
namespace {

std::vector<std::string> RecordProgram(const std::string& tool) {
  const std::filesystem::path output =
      std::filesystem::temp_directory_path() / ("moesaic_nvtx_" + std::to_string(getpid()) + ".txt");
  const pid_t child = fork();
  if (child == 0) {
    setenv("NVTX_RECORDER_OUTPUT", output.c_str(), 1);
    setenv("NVTX_INJECTION64_PATH", tool.c_str(), 1);
    execl(NVTX_PROGRAM, NVTX_PROGRAM, static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  std::vector<std::string> lines;
  std::ifstream file(output);
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  std::filesystem::remove(output);
  return lines;
}

TEST(NvtxTest, AToolSeesNamesCategoriesAndNesting) {
  const std::vector<std::string> expected = {
      "domain moesaic",
      "push moesaic backward backward",
      "push moesaic backward D3_gemm",
      "pop moesaic",
      "push moesaic backward D3_gemm",
      "pop moesaic",
      "pop moesaic",
      "push moesaic backward A1_silu_backward",
      "pop moesaic",
      "push moesaic LoRA P",
      "mark moesaic LoRA P 2500",
      "pop moesaic",
      "push moesaic backward backward",
      "pop moesaic",
  };
  EXPECT_EQ(RecordProgram(NVTX_RECORDER), expected);
}

TEST(NvtxTest, WithoutAToolNothingIsRecorded) { EXPECT_EQ(RecordProgram(""), std::vector<std::string>{}); }

TEST(NvtxTest, AToolThatCannotBeLoadedIsNoError) { EXPECT_EQ(RecordProgram("/nonexistent.so"), std::vector<std::string>{}); }

}  // namespace
}  // namespace moesaic::profiling
