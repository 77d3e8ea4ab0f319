# flodl_test(NAME LIBS ...): native/tests/NAME.cc as one test program, registered with ctest.
# flodl_check_tests(): stops the configuration if a *_test.cc exists that no target builds.
set_property(GLOBAL PROPERTY FLODL_TEST_FILES "")

function(flodl_test name)
  cmake_parse_arguments(arg "" "" "LIBS" ${ARGN})
  set_property(GLOBAL APPEND PROPERTY FLODL_TEST_FILES ${name}.cc)
  add_executable(${name} ${name}.cc $<TARGET_OBJECTS:flodl_test_main>)
  target_link_libraries(${name} PRIVATE ${arg_LIBS})
  target_include_directories(${name} SYSTEM PRIVATE ${PROJECT_SOURCE_DIR}/native/tests/third_party)
  target_compile_definitions(${name} PRIVATE FLODL_VECTORS_DIR="${PROJECT_SOURCE_DIR}/tests/vectors")
  flodl_flags(${name})
  add_test(NAME ${name} COMMAND ${name})
  # Sanitized code takes up to thirty times as long; the limit is there to end a test that hangs.
  set_tests_properties(${name} PROPERTIES TIMEOUT $<IF:$<BOOL:${FLODL_SANITIZER}>,1800,300>)
endfunction()

function(flodl_check_tests)
  get_property(built GLOBAL PROPERTY FLODL_TEST_FILES)
  file(GLOB present RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*_test.cc)
  foreach(file ${present})
    if(NOT file IN_LIST built)
      message(FATAL_ERROR "native/tests/${file} is built by no target: add flodl_test() in native/tests/CMakeLists.txt")
    endif()
  endforeach()
endfunction()
