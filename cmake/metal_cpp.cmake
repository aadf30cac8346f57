# metal_cpp: an interface target with Apple's metal-cpp headers on its include path.
#
# FLASHATTN_METAL_CPP_DIR names a directory that already holds them; otherwise fetch_metal_cpp.py finds or
# downloads the pinned ones. On Linux (FLASHATTN_SIMULATED_METAL) the few system headers that metal-cpp
# includes come from tests/metal/shim, and the compiler has to be a clang: metal-cpp uses block syntax.

set(FLASHATTN_METAL_CPP_DIR "" CACHE PATH "Directory with metal-cpp's Foundation/ and Metal/; empty: fetch")

if(FLASHATTN_METAL_CPP_DIR)
  set(_metal_cpp "${FLASHATTN_METAL_CPP_DIR}")
else()
  find_package(Python COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/fetch_metal_cpp.py" "${CMAKE_BINARY_DIR}"
    OUTPUT_VARIABLE _metal_cpp OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE _metal_cpp_failed)
  if(_metal_cpp_failed)
    message(FATAL_ERROR "metal-cpp headers could not be fetched; set FLASHATTN_METAL_CPP_DIR")
  endif()
endif()
if(NOT EXISTS "${_metal_cpp}/Metal/Metal.hpp")
  message(FATAL_ERROR "no metal-cpp headers in ${_metal_cpp}")
endif()
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "metal-cpp needs clang (block syntax), not ${CMAKE_CXX_COMPILER_ID}")
endif()

add_library(metal_cpp INTERFACE)
target_include_directories(metal_cpp SYSTEM INTERFACE "${_metal_cpp}")
target_compile_options(metal_cpp INTERFACE -fblocks)
if(FLASHATTN_SIMULATED_METAL)
  target_include_directories(metal_cpp SYSTEM INTERFACE "${CMAKE_CURRENT_LIST_DIR}/../tests/metal/shim")
elseif(APPLE)
  target_link_libraries(metal_cpp INTERFACE "-framework Metal" "-framework Foundation" objc)
endif()
