// CPU quotas of made-up cgroup trees, version 1 and 2.
#include <stdlib.h>

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <string>

#include "cpu/cpu_count.h"

namespace {

namespace fs = std::filesystem;
using flashattn::cpu::cgroup_cpu_limit;

// A folder that stands for /sys/fs/cgroup, with a file that stands for /proc/self/cgroup.
class Tree {
 public:
  Tree() {
    std::string name = (fs::temp_directory_path() / "flashattn-cgroup-XXXXXX").string();
    BOOST_REQUIRE(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~Tree() { fs::remove_all(root_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  int limit() const { return cgroup_cpu_limit((root_ / "self").string(), root_.string()); }

 private:
  fs::path root_;
};

BOOST_AUTO_TEST_SUITE(cpu_count)

BOOST_AUTO_TEST_CASE(no_files_is_no_limit) { BOOST_TEST(Tree().limit() == 0); }

BOOST_AUTO_TEST_CASE(version_2) {
  const Tree tree;
  tree.write("self", "0::/user/job\n");
  BOOST_TEST(tree.limit() == 0);
  tree.write("user/job/cpu.max", "max 100000\n");
  BOOST_TEST(tree.limit() == 0);
  tree.write("user/job/cpu.max", "250000 100000\n");
  BOOST_TEST(tree.limit() == 3);
  tree.write("user/cpu.max", "150000 100000\n");
  BOOST_TEST(tree.limit() == 2);
  tree.write("cpu.max", "20000 100000\n");
  BOOST_TEST(tree.limit() == 1);
}

BOOST_AUTO_TEST_CASE(version_1) {
  const Tree tree;
  tree.write("self", "5:memory:/job\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/job\n");
  tree.write("cpu/docker/abc/cpu.cfs_quota_us", "-1\n");
  tree.write("cpu/docker/abc/cpu.cfs_period_us", "100000\n");
  BOOST_TEST(tree.limit() == 0);
  tree.write("cpu/docker/abc/cpu.cfs_quota_us", "400000\n");
  BOOST_TEST(tree.limit() == 4);
}

BOOST_AUTO_TEST_CASE(a_container_that_sees_its_own_group_as_the_root) {
  const Tree tree;
  tree.write("self", "0::/kubepods/pod1/c1\n");  // the host's path, not in this tree
  tree.write("cpu.max", "200000 100000\n");
  BOOST_TEST(tree.limit() == 2);
}

BOOST_AUTO_TEST_CASE(damaged_files_are_no_limit) {
  const Tree tree;
  tree.write("self", "nonsense\n0:\n0::\n");
  tree.write("cpu.max", "many\n");
  BOOST_TEST(tree.limit() == 0);
}

BOOST_AUTO_TEST_CASE(there_is_always_a_core) { BOOST_TEST(flashattn::cpu::usable_cores() >= 1); }

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
