// The part of XLA's foreign function interface (FFI) that attention calls use: the C structs in
// which an XLA runtime hands a call frame to a handler. The layout is the ABI, and XLA promises to
// keep it within a major version; names and comments are ours, so that no build needs jaxlib.
// tests/test_jax_abi.py holds size and offsets against the header of the jaxlib that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashattn::xla {

// Versions of the interface in which every struct below has this layout. XLA takes handlers made
// for an older minor version than its own for a year at least.
inline constexpr int kMajorVersion = 0;
inline constexpr int kOldestMinorVersion = 1;
inline constexpr int kNewestMinorVersion = 5;

// Numbers of xla.PrimitiveType, as far as a call can have them.
enum class ElementType : std::uint32_t {
  kBool = 1,
  kInt32 = 4,
  kInt64 = 5,
  kUInt32 = 8,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kBFloat16 = 16,
};

enum class ErrorCode : std::uint32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
};

enum class ExtensionKind : std::uint32_t { kMetadata = 1 };
enum class Stage : std::uint32_t { kExecute = 3 };
enum class ValueKind : std::uint32_t { kBuffer = 1 };
enum class AttributeKind : std::uint32_t { kScalar = 3, kText = 4 };

// Structs begin with their own size in bytes and a list of extensions.
struct Extension {
  std::size_t struct_size;
  ExtensionKind kind;
  Extension* next;
};

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

struct Error;  // XLA's own; whoever gets one frees it

struct ErrorArguments {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;  // copied
  ErrorCode code;
};

// The runtime's functions; those behind the first are not used here.
struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  void* internal;
  Error* (*create_error)(ErrorArguments* arguments);
};

// A dense row-major array in host memory.
struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  ElementType type;
  void* data;
  std::int64_t rank;
  std::int64_t* sizes;  // rank
};

struct Text {
  const char* data;  // not terminated
  std::size_t size;
};

struct Scalar {
  ElementType type;
  void* value;
};

// Operands, and likewise results.
struct Values {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  ValueKind* kinds;
  void** values;  // Buffer* where the kind says so
};

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t count;
  AttributeKind* kinds;
  Text** names;
  void** values;  // Scalar* or Text*
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  Stage stage;
  Values operands;
  Values results;
  Attributes attributes;
  void* future;
};

// With this extension a frame is no call: it asks what the handler was made for.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

using Handler = Error*(CallFrame* frame);

}  // namespace flashattn::xla
