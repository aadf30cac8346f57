// The ways a call can fail. The Python module maps the first four one to one:
// InvalidArgument -> ValueError, InvalidType -> TypeError, Unsupported -> NotImplementedError,
// DeviceError -> RuntimeError. Every message reads "function: name (got) must ... (expected)".
#pragma once

#include <stdexcept>

namespace flashattn {

// A value or a shape is wrong.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A dtype or the kind of an argument is wrong.
class InvalidType : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The call is valid but no backend (or not the named one) can do it.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A device refused or failed; the text carries the driver's diagnostics.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The program wanted the call to end (interrupt.h).
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace flashattn
