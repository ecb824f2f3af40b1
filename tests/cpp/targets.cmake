# C++ tests, one program a file, and the model checker; included by CMakeLists.txt, whose paths these are.
file(GLOB test_sources CONFIGURE_DEPENDS tests/cpp/*_test.cc)
add_programs(cpp_tests ${test_sources})
add_library(cpp_test_main STATIC EXCLUDE_FROM_ALL tests/cpp/main.cc)
add_library(loopback STATIC EXCLUDE_FROM_ALL tests/cpp/loopback.cc)
target_link_libraries(loopback PUBLIC hvd_order_core)
foreach(name IN ITEMS engine_test op_gradient_queue_test)
  target_link_libraries(${name} PRIVATE loopback)
endforeach()
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  target_link_libraries(${name} PRIVATE cpp_test_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endforeach()

# Explores all interleavings of small jobs; see the README there.
file(GLOB checker_sources CONFIGURE_DEPENDS tests/model_checker/*.cc)
include(tests/model_checker/mutants.cmake)
add_executable(model_checker EXCLUDE_FROM_ALL)
target_link_libraries(model_checker PRIVATE model_checker_parts hvd_order_core)
add_dependencies(cpp_tests model_checker)
if(HVD_ORDER_SANITIZE)
  set(fewer --states 3000) # a setup; sanitizers slow the search down tenfold
endif()
add_test(NAME model_checker COMMAND model_checker ${fewer})
set_tests_properties(model_checker PROPERTIES TIMEOUT 300)
# What real jobs did, and one recording that names another policy than the job had.
file(GLOB recordings CONFIGURE_DEPENDS tests/model_checker/recordings/*.txt)
add_test(NAME model_checker_replay COMMAND model_checker --replay ${recordings})
set_tests_properties(model_checker_replay PROPERTIES TIMEOUT 300)
add_test(
  NAME model_checker_replay_can_fail
  COMMAND model_checker --replay
  ${CMAKE_CURRENT_SOURCE_DIR}/tests/model_checker/recordings/wrong/another_policy.txt)
set_tests_properties(
  model_checker_replay_can_fail PROPERTIES TIMEOUT 300
  PASS_REGULAR_EXPRESSION "the classes cannot do what was recorded")
