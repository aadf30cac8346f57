// The test framework and its main(); the tests are in test_*.cpp.
#define BOOST_TEST_MODULE flashattn
#include <boost/test/included/unit_test.hpp>
