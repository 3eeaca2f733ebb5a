# moesaic_add_test(NAME SOURCES a.cc b.cc LIBRARIES c d [LABELS l])
#
# A GoogleTest program; ctest runs each of its tests as a process of its own and shows a skipped one as skipped.
include(GoogleTest)
find_package(GTest REQUIRED)

function(moesaic_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "" "SOURCES;LIBRARIES;LABELS")
  add_executable(${name} ${test_SOURCES})
  target_link_libraries(${name} PRIVATE ${test_LIBRARIES} GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 TEST_PREFIX "${name}:"
                       PROPERTIES TIMEOUT 600 LABELS "${test_LABELS}")
endfunction()
