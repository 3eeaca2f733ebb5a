// Ranges as a tool sees them. NVTX looks for a tool once in a process, so each case runs nvtx_program.cc.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace moesaic::profiling {
namespace {

std::vector<std::string> RecordProgram(const std::string& tool, const char* payloads = "yes") {
  const std::filesystem::path output =
      std::filesystem::temp_directory_path() / ("moesaic_nvtx_" + std::to_string(getpid()) + ".txt");
  const pid_t child = fork();
  if (child == 0) {
    setenv("NVTX_RECORDER_OUTPUT", output.c_str(), 1);
    setenv("NVTX_RECORDER_PAYLOADS", payloads, 1);
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
      "push moesaic LoRA GU3_lora_pass_gate",  // what holds a range is there with it
      "push moesaic LoRA P 7 32 2500 10",
      "pop moesaic",
      "pop moesaic",
      "push moesaic backward backward",
      "pop moesaic",
  };
  EXPECT_EQ(RecordProgram(NVTX_RECORDER), expected);
}

TEST(NvtxTest, AToolWithoutPayloadsOfSeveralFieldsGetsANumber) {
  const std::vector<std::string> lines = RecordProgram(NVTX_RECORDER, "no");
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "push moesaic LoRA P " + std::to_string((7ll << 32) + 32)), 1);
}

TEST(NvtxTest, WithoutAToolNothingIsRecorded) { EXPECT_EQ(RecordProgram(""), std::vector<std::string>{}); }

TEST(NvtxTest, AToolThatCannotBeLoadedIsNoError) { EXPECT_EQ(RecordProgram("/nonexistent.so"), std::vector<std::string>{}); }

}  // namespace
}  // namespace moesaic::profiling
