# The Python module flashattn._core out of cpp/bindings, with its type stub.
# Relies on nanobind being installed in the Python that builds.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT
  COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

file(GLOB flashattn_binding_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cpp/bindings/*.cpp")
if(NOT FLASHATTN_METAL)
  list(FILTER flashattn_binding_sources EXCLUDE REGEX "metal_(memory|stream|tuning)")
endif()
nanobind_add_module(_core NB_STATIC NOMINSIZE ${flashattn_binding_sources})
target_link_libraries(_core PRIVATE flashattn flashattn_internal)
if(FLASHATTN_METAL)
  target_compile_definitions(_core PRIVATE FLASHATTN_WITH_METAL=1)
endif()
install(TARGETS _core LIBRARY DESTINATION flashattn COMPONENT python)

# The stub generator imports the module, which only works where the build runs, and not when the module
# needs a sanitizer's run time loaded first.
if(NOT CMAKE_CROSSCOMPILING AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  nanobind_add_stub(_core_stub MODULE _core OUTPUT "${PROJECT_BINARY_DIR}/_core.pyi"
                    PYTHON_PATH $<TARGET_FILE_DIR:_core> DEPENDS _core)
  install(FILES "${PROJECT_BINARY_DIR}/_core.pyi" DESTINATION flashattn COMPONENT python)
endif()
