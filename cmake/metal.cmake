# flashattn_add_metal(TARGET): the device half of the Metal backend, the embedded shaders and the frameworks.
#
# With FLASHATTN_SIMULATED_METAL the same files are built on Linux over the simulated device of tests/metal: for
# tests, never for a release. It needs clang as the C++ compiler (tests/metal/toolchain.py brings one).
option(FLASHATTN_SIMULATED_METAL "Build the Metal backend over the simulated device of tests/metal" OFF)

include(metal_cpp)
if(FLASHATTN_SIMULATED_METAL)
  add_subdirectory("${PROJECT_SOURCE_DIR}/tests/metal" "${PROJECT_BINARY_DIR}/simulated_metal")
endif()

# The text of every shader as one C++ file.
function(flashattn_embed_shaders output)
  file(GLOB shaders CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/shaders/*.metal" "${PROJECT_SOURCE_DIR}/shaders/*.h")
  list(JOIN shaders "|" joined)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${output}" "-DSHADERS=${joined}" -P "${PROJECT_SOURCE_DIR}/cmake/embed_shaders.cmake"
    DEPENDS ${shaders} "${PROJECT_SOURCE_DIR}/cmake/embed_shaders.cmake"
    COMMENT "Embedding the shaders"
    VERBATIM)
endfunction()

function(flashattn_add_metal target)
  set(embedded "${PROJECT_BINARY_DIR}/generated/shader_files.cpp")
  flashattn_embed_shaders("${embedded}")
  set(directory "${PROJECT_SOURCE_DIR}/cpp/src/metal")
  target_sources(${target} PRIVATE
    "${directory}/buffer_pool.cpp"
    "${directory}/cache_files.cpp"
    "${directory}/call.cpp"
    "${directory}/call_buffers.cpp"
    "${directory}/device.cpp"
    "${directory}/encode.cpp"
    "${directory}/lane_maps.cpp"
    "${directory}/mask_table.cpp"
    "${directory}/metal_backend.cpp"
    "${directory}/metal_cpp.cpp"
    "${directory}/pipeline_archive.cpp"
    "${directory}/pipeline_cache.cpp"
    "${directory}/run_call.cpp"
    "${directory}/shader_source.cpp"
    "${directory}/shared_memory.cpp"
    "${directory}/stream.cpp"
    "${directory}/strided_copy.cpp"
    "${directory}/stored_tuning.cpp"
    "${embedded}")
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:metal_cpp>)
  # metal-cpp's own code is not ours to warn about.
  set_source_files_properties("${directory}/metal_cpp.cpp" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "-w")
  if(FLASHATTN_SIMULATED_METAL)
    target_compile_definitions(${target} PUBLIC FLASHATTN_SIMULATED_METAL=1)
    target_link_libraries(${target} PUBLIC $<BUILD_INTERFACE:simulated_metal>)
  endif()
endfunction()
