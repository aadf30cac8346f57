# The static library `flashattn` (alias flashattn::flashattn) and its install rules.
# Relies on cpu_isa.cmake for the kernels of each instruction set and, with FLASHATTN_METAL, on metal.cmake.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
find_package(Threads REQUIRED)

file(GLOB flashattn_sources CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/cpp/src/core/*.cpp"
     "${PROJECT_SOURCE_DIR}/cpp/src/cpu/*.cpp")
# kernels.cpp is compiled once per instruction set, by cpu_isa.cmake.
list(FILTER flashattn_sources EXCLUDE REGEX "/cpu/kernels\\.cpp$")

add_library(flashattn STATIC ${flashattn_sources})
add_library(flashattn::flashattn ALIAS flashattn)
target_compile_features(flashattn PUBLIC cxx_std_20)
target_include_directories(flashattn
  PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE
    "${PROJECT_SOURCE_DIR}/cpp/src")
target_compile_definitions(flashattn PRIVATE FLASHATTN_VERSION="${PROJECT_VERSION}")
target_link_libraries(flashattn PUBLIC Threads::Threads)

# flashattn_add_cpu_kernels(TARGET): one object library of kernels.cpp per instruction set of this
# architecture, linked into TARGET.
include(cpu_isa OPTIONAL)
if(COMMAND flashattn_add_cpu_kernels)
  flashattn_add_cpu_kernels(flashattn)
endif()

# The portable half of the Metal backend: plain C++20, part of the library only with Metal, but tested
# on every machine.
file(GLOB flashattn_schedule_sources CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/cpp/src/metal/schedule*.cpp"
     "${PROJECT_SOURCE_DIR}/cpp/src/metal/tuning*.cpp"
     "${PROJECT_SOURCE_DIR}/cpp/src/metal/kernel_key*.cpp")
if(FLASHATTN_METAL)
  target_sources(flashattn PRIVATE ${flashattn_schedule_sources})
  target_include_directories(flashattn PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(flashattn PRIVATE FLASHATTN_WITH_METAL=1)
  # flashattn_add_metal(TARGET): the device half, the embedded shaders and the frameworks.
  include(metal)
  flashattn_add_metal(flashattn)
endif()

# What the library's own tests and bindings may see and users may not: internal headers, abi.h.
add_library(flashattn_internal INTERFACE)
target_include_directories(flashattn_internal INTERFACE
  "${PROJECT_SOURCE_DIR}/cpp/src" "${PROJECT_SOURCE_DIR}")
target_compile_definitions(flashattn_internal INTERFACE FLASHATTN_VERSION="${PROJECT_VERSION}")
target_link_libraries(flashattn_internal INTERFACE flashattn)

# Component "dev" keeps all of it out of the wheel, which installs component "python" alone.
install(TARGETS flashattn EXPORT flashattnTargets COMPONENT dev
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT dev)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/cpp/include/flashattn"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT dev FILES_MATCHING PATTERN "*.h")
set(flashattn_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/flashattn")
install(EXPORT flashattnTargets NAMESPACE flashattn:: DESTINATION "${flashattn_package_dir}"
        COMPONENT dev)
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/flashattnConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/flashattnConfig.cmake" INSTALL_DESTINATION "${flashattn_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/flashattnConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/flashattnConfig.cmake"
              "${PROJECT_BINARY_DIR}/flashattnConfigVersion.cmake"
        DESTINATION "${flashattn_package_dir}" COMPONENT dev)
