// Messages of refusals: what a call of a whole set of valid tensors, changed in one place, says.
#pragma once

#include <boost/test/unit_test.hpp>
#include <functional>
#include <string>

#include "flashattn/error.h"
#include "flashattn/problem.h"
#include "tensors.h"

namespace flashattn::testing {

// What the call throws as an Error, or what else happened.
template <typename Error>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another kind of error: ") + error.what();
  }
  return "no error";
}

template <typename Error = InvalidArgument>
void expect_forward(const std::function<void(ForwardTensors&, AttentionOptions&)>& change,
                    const std::string& text) {
  Call call;
  ForwardTensors tensors = call.forward_tensors();
  AttentionOptions options;
  change(tensors, options);
  BOOST_TEST(message_of<Error>([&] { make_problem(tensors, options); }) == text);
}

template <typename Error = InvalidArgument>
void expect_backward(const std::function<void(BackwardTensors&)>& change, const std::string& text) {
  Call call;
  BackwardTensors tensors = call.backward_tensors();
  change(tensors);
  BOOST_TEST(message_of<Error>([&] { make_problem(tensors, {}); }) == text);
}

}  // namespace flashattn::testing
