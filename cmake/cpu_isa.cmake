# One object library per instruction set of the target architecture, all from cpp/src/cpu/kernels.cpp.
#
# flashattn_add_cpu_kernels(<target>) links the objects into <target> and tells it what was built with one
# definition per name: FLASHATTN_HAVE_CPU_ISA_v4_bf16=1 and so on. flashattn_cpu_isas in the caller's scope
# lists the names, best first.

include(CheckCXXCompilerFlag)

# The kernels rely on infinities and NaN, so never -ffast-math; errno and traps are not part of the contract.
# Nothing in them throws, and an unwinding table would bring a weak symbol (its personality routine).
set(FLASHATTN_CPU_KERNEL_FLAGS -O3 -fno-exceptions -fno-math-errno -fno-trapping-math -ffp-contract=fast)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's own AVX-512 intrinsics trip both (GCC bug 105593).
  list(APPEND FLASHATTN_CPU_KERNEL_FLAGS -Wno-maybe-uninitialized -Wno-uninitialized)
endif()
# Instrumented code is for tests: a third of the time to compile, and the same accesses are seen.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  list(TRANSFORM FLASHATTN_CPU_KERNEL_FLAGS REPLACE "^-O3$" "-O2")
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND FLASHATTN_CPU_KERNEL_FLAGS "SHELL:--param asan-instrumentation-with-call-threshold=0")
  endif()
endif()
set(FLASHATTN_CPU_FLAGS_v2 -march=x86-64-v2)
set(FLASHATTN_CPU_FLAGS_v3 -march=x86-64-v3)
set(FLASHATTN_CPU_FLAGS_v4 -march=x86-64-v4 -mprefer-vector-width=512)
set(FLASHATTN_CPU_FLAGS_v4_bf16 -march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512)
set(FLASHATTN_CPU_FLAGS_neon "")

# A shorter list saves compiling where not all are wanted, as in sanitizer builds.
set(FLASHATTN_CPU_ISAS "" CACHE STRING
    "Instruction sets to build kernels for, as in v3;v4_bf16; empty is all of the architecture")

function(_flashattn_target_isas isas_var)
  set(processor "${CMAKE_SYSTEM_PROCESSOR}")
  if(CMAKE_OSX_ARCHITECTURES)
    set(processor "${CMAKE_OSX_ARCHITECTURES}")
  endif()
  if(processor MATCHES "^(x86_64|AMD64|amd64)$")
    set(candidates v4_bf16 v4 v3 v2)
  elseif(processor MATCHES "^(aarch64|arm64|ARM64)$")
    set(candidates neon)
  else()
    message(FATAL_ERROR "flashattn: no CPU kernels for the architecture '${processor}'; "
                        "build one of x86_64, aarch64 (one architecture a build)")
  endif()
  if(FLASHATTN_CPU_ISAS)
    set(candidates ${FLASHATTN_CPU_ISAS})
  endif()
  set(isas "")
  foreach(isa IN LISTS candidates)
    string(REPLACE ";" " " flags "${FLASHATTN_CPU_FLAGS_${isa}}")
    check_cxx_compiler_flag("${flags}" FLASHATTN_COMPILER_KNOWS_${isa})
    if(FLASHATTN_COMPILER_KNOWS_${isa})
      list(APPEND isas ${isa})
    else()
      message(STATUS "flashattn: the compiler does not know '${flags}'; ${isa} kernels are left out")
    endif()
  endforeach()
  set(${isas_var} "${isas}" PARENT_SCOPE)
endfunction()

function(flashattn_add_cpu_kernels library)
  _flashattn_target_isas(isas)
  foreach(isa IN LISTS isas)
    set(target flashattn_cpu_${isa})
    add_library(${target} OBJECT "${PROJECT_SOURCE_DIR}/cpp/src/cpu/kernels.cpp")
    target_compile_features(${target} PRIVATE cxx_std_20)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cpp/include"
                                                 "${PROJECT_SOURCE_DIR}/cpp/src")
    target_compile_definitions(${target} PRIVATE FLASHATTN_CPU_ISA_NAME=${isa})
    # After the build type's own flags, so that a debug build still has kernels of usable speed.
    target_compile_options(${target} PRIVATE ${FLASHATTN_CPU_KERNEL_FLAGS} ${FLASHATTN_CPU_FLAGS_${isa}})
    # Link-time optimisation could move code of one instruction set into another's callers.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON
                                               CXX_VISIBILITY_PRESET hidden
                                               INTERPROCEDURAL_OPTIMIZATION OFF)
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${target}>)
    target_compile_definitions(${library} PRIVATE FLASHATTN_HAVE_CPU_ISA_${isa}=1)
  endforeach()
  set(flashattn_cpu_isas "${isas}" PARENT_SCOPE)
endfunction()
