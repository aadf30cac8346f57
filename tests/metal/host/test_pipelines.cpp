// The pipeline cache: each pipeline once, whatever the threads; the archive on disk, good, damaged
// and foreign; compile errors with log, key and source line.
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "flashattn/error.h"
#include "metal/device.h"
#include "metal/pipeline_cache.h"
#include "metal/shader_source.h"
#include "metal/tuning.h"
#include "support.h"

namespace {

using flashattn::metal::archive_path;
using flashattn::metal::AutoreleaseScope;
using flashattn::metal::choose_device;
using flashattn::metal::KernelKey;
using flashattn::metal::KernelKind;
using flashattn::metal::PipelineCache;
using flashattn::testing::contains;
using flashattn::testing::LiveObjectCheck;
using flashattn::testing::ScopedVariable;
using flashattn::testing::TemporaryFolder;

const KernelKey kForward{.kind = KernelKind::kForward,
                         .head_tile = 16,
                         .value_tile = 16,
                         .block_rows = 32,
                         .block_columns = 16};
const KernelKey kDelta{.kind = KernelKind::kDelta, .block_rows = 8};

struct Gpu {
  const AutoreleaseScope scope;
  NS::SharedPtr<MTL::Device> device = choose_device();
  TemporaryFolder folder;
  std::filesystem::path archive = folder.path() / "pipelines.metalarchive";
};

std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

BOOST_FIXTURE_TEST_SUITE(metal_pipelines, Gpu)

// The host's arithmetic about a kernel is the kernel's own: every kernel, narrow, uneven and wide.
BOOST_AUTO_TEST_CASE(threadgroup_memory_is_what_the_kernels_declare) {
  PipelineCache cache(device.get(), {});
  for (const KernelKind kind :
       {KernelKind::kForward, KernelKind::kDelta, KernelKind::kBackwardDq, KernelKind::kBackwardDv,
        KernelKind::kBackwardDk, KernelKind::kMaskGradient, KernelKind::kSlopeGradient,
        KernelKind::kSinkGradient}) {
    const bool by_row = kind == KernelKind::kDelta || kind == KernelKind::kSlopeGradient ||
                        kind == KernelKind::kSinkGradient;
    for (const auto& [head_tile, value_tile] : {std::pair{16, 16}, {32, 80}, {160, 48}}) {
      const bool wide = head_tile > 128;
      KernelKey key{.kind = kind, .block_rows = 8};
      if (!by_row) {
        key = {.kind = kind,
               .head_tile = head_tile,
               .value_tile = value_tile,
               .block_rows = wide ? 16 : 32,
               .block_columns = wide ? 8 : 16};
      }
      const auto& state = cache.get(key).pipeline;
      BOOST_TEST(state->staticThreadgroupMemoryLength() ==
                     static_cast<NS::UInteger>(flashattn::metal::threadgroup_memory(key)),
                 to_string(key));
    }
  }
}

// And so for register kernels, in float and in half.
BOOST_AUTO_TEST_CASE(threadgroup_memory_of_register_kernels) {
  PipelineCache cache(device.get(), {});
  flashattn::metal::DeviceFacts facts;
  facts.float_map = facts.half_map = flashattn::metal::LaneMap::kAny;
  for (const KernelKind kind : {KernelKind::kForward, KernelKind::kBackwardDq,
                                KernelKind::kBackwardDv, KernelKind::kBackwardDkv}) {
    for (const flashattn::DType dtype : {flashattn::DType::kFloat32, flashattn::DType::kFloat16}) {
      const auto key = flashattn::metal::choose_register(
          {.kind = kind, .dtype = dtype, .head_tile = 16, .value_tile = 48}, 40, facts);
      BOOST_TEST_REQUIRE(key.has_value());
      const auto& state = cache.get(*key).pipeline;
      BOOST_TEST(state->staticThreadgroupMemoryLength() ==
                     static_cast<NS::UInteger>(flashattn::metal::threadgroup_memory(*key)),
                 to_string(*key));
    }
  }
}

BOOST_AUTO_TEST_CASE(each_pipeline_is_compiled_once_by_many_threads) {
  const LiveObjectCheck live;
  const AutoreleaseScope inner;
  PipelineCache cache(device.get(), {});
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&cache, i] { cache.get(i % 2 == 0 ? kForward : kDelta); });
  }
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(cache.compiled() == 2);
}

BOOST_AUTO_TEST_CASE(function_constants_make_pipelines_of_their_own) {
  PipelineCache cache(device.get(), {});
  KernelKey with_dlse = kDelta;
  with_dlse.has_dlse = true;
  BOOST_TEST((&cache.get(kDelta) != &cache.get(with_dlse)));
  BOOST_TEST(cache.compiled() == 2);
}

BOOST_AUTO_TEST_CASE(a_second_process_finds_its_pipelines_in_the_archive) {
  PipelineCache(device.get(), archive).get(kDelta);
  PipelineCache second(device.get(), archive);
  second.get(kDelta);
  BOOST_TEST(second.from_archive() == 1);
  BOOST_TEST(second.compiled() == 0);
  second.get(kForward);
  BOOST_TEST(second.compiled() == 1);
}

BOOST_AUTO_TEST_CASE(a_damaged_archive_is_ignored_and_replaced) {
  PipelineCache(device.get(), archive).get(kDelta);
  std::string text = text_of_file(archive);
  text[text.size() / 2] ^= 1;
  std::ofstream(archive, std::ios::binary | std::ios::trunc) << text;

  PipelineCache damaged(device.get(), archive);
  damaged.get(kDelta);
  BOOST_TEST(damaged.compiled() == 1);
  PipelineCache repaired(device.get(), archive);
  repaired.get(kDelta);
  BOOST_TEST(repaired.from_archive() == 1);
}

BOOST_AUTO_TEST_CASE(an_archive_that_cannot_be_written_fails_nothing) {
  PipelineCache nowhere(device.get(), "/proc/nowhere/pipelines.metalarchive");
  nowhere.get(kDelta);
  BOOST_TEST(nowhere.compiled() == 1);
}

BOOST_AUTO_TEST_CASE(an_archive_that_others_may_write_is_not_used) {
  namespace fs = std::filesystem;
  constexpr auto kOthers = fs::perms::group_write | fs::perms::others_write;
  PipelineCache(device.get(), archive).get(kDelta);
  fs::permissions(archive, kOthers, fs::perm_options::add);
  PipelineCache open_file(device.get(), archive);
  open_file.get(kDelta);
  BOOST_TEST(open_file.from_archive() == 0);
  BOOST_TEST(((fs::status(archive).permissions() & kOthers) == fs::perms::none));  // replaced

  fs::permissions(archive.parent_path(), kOthers, fs::perm_options::add);
  const auto written = fs::last_write_time(archive);
  PipelineCache open_folder(device.get(), archive);
  open_folder.get(kDelta);
  open_folder.get(kForward);
  BOOST_TEST(open_folder.compiled() == 2);
  BOOST_TEST((fs::last_write_time(archive) == written));
}

BOOST_AUTO_TEST_CASE(a_cache_folder_that_is_made_is_its_owner_s_alone) {
  const auto made = folder.path() / "deep" / "er";
  PipelineCache(device.get(), made / "pipelines.metalarchive").get(kDelta);
  BOOST_TEST((std::filesystem::status(made).permissions() == std::filesystem::perms::owner_all));
  BOOST_TEST(std::filesystem::exists(made / "pipelines.metalarchive"));
}

BOOST_AUTO_TEST_CASE(the_archive_s_name_tells_gpu_and_system_build) {
  const ScopedVariable cache("FLASHATTN_CACHE_DIR", folder.path().string());
  const auto path = archive_path("Apple M3", "Version 15.1 (Build 24B83)");
  BOOST_TEST(path.parent_path() == folder.path());
  BOOST_TEST(contains(path.filename().string(), "Apple-M3-Version-15.1--Build-24B83-"));
  BOOST_TEST((path != archive_path("Apple M3", "Version 15.2 (Build 24C101)")));
  BOOST_TEST((path != archive_path("Apple M4", "Version 15.1 (Build 24B83)")));
  const ScopedVariable none("FLASHATTN_CACHE_DIR", "");
  BOOST_TEST(archive_path("Apple M3", "Version 15.1").empty());
}

BOOST_AUTO_TEST_CASE(a_compile_error_shows_key_log_and_source_line) {
  const std::string wrong =
      flashattn::metal::shader_program("delta", "") + "#line 1 \"tile.h\"\nnot a word of MSL;\n";
  try {
    flashattn::metal::compile_library(device.get(), wrong, "delta_float32_r8");
    BOOST_ERROR("the source must not compile");
  } catch (const flashattn::DeviceError& error) {
    const std::string text = error.what();
    BOOST_TEST(contains(text, "kernel delta_float32_r8 does not compile"), text);
    BOOST_TEST(contains(text, "error:"), text);
    BOOST_TEST(
        contains(text, "source line: tile.h:1: " + flashattn::metal::source_line("tile.h", 1)),
        text);
  }
}

BOOST_AUTO_TEST_CASE(a_geometry_that_does_not_fit_says_so) {
  PipelineCache cache(device.get(), {});
  KernelKey huge = kForward;
  huge.head_tile = 256;
  huge.value_tile = 256;
  try {
    cache.get(huge);
    BOOST_ERROR("the kernel must not fit");
  } catch (const flashattn::DeviceError& error) {
    BOOST_TEST(contains(error.what(), "cannot be made a pipeline: Threadgroup memory size"),
               error.what());
    BOOST_TEST(contains(error.what(), "forward_float32_d256_v256"), error.what());
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
