// The choice of an instruction set by name.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "flashattn/error.h"

namespace {

using namespace flashattn::cpu;

BOOST_AUTO_TEST_SUITE(dispatch)

BOOST_AUTO_TEST_CASE(something_runs_here) {
  const std::vector<std::string> built = built_isas();
  const std::vector<std::string> supported = supported_isas();
  BOOST_TEST(!supported.empty());
  for (const std::string& name : supported) {
    BOOST_TEST((std::find(built.begin(), built.end(), name) != built.end()));
  }
}

BOOST_AUTO_TEST_CASE(each_supported_one_can_be_set) {
  std::vector<const CpuKernels*> tables;
  for (const std::string& name : supported_isas()) {
    set_isa(name);
    BOOST_TEST(active_isa() == name);
    tables.push_back(&active_kernels());
  }
  std::sort(tables.begin(), tables.end());
  BOOST_TEST((std::adjacent_find(tables.begin(), tables.end()) == tables.end()));
  set_isa("");
  BOOST_TEST(active_isa() == supported_isas().front());
}

BOOST_AUTO_TEST_CASE(an_unknown_one_is_refused_and_the_choices_are_named) {
  const std::string before = active_isa();
  BOOST_CHECK_EXCEPTION(set_isa("x87"), flashattn::InvalidArgument,
                        [](const flashattn::InvalidArgument& error) {
                          const std::string text = error.what();
                          bool named = text.find("x87") != std::string::npos;
                          for (const std::string& name : supported_isas()) {
                            named = named && text.find(name) != std::string::npos;
                          }
                          return named;
                        });
  BOOST_TEST(active_isa() == before);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
