// The part of Objective-C's runtime header that metal-cpp includes, for the simulated device.
// The functions are defined in tests/metal/objc; this header defines no behaviour.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Complete, because NS::Object derives from it. Nothing but the runtime reads the word.
struct objc_object {
  void* isa;
};
struct objc_class;
struct objc_selector;
typedef struct objc_selector* SEL;
typedef struct objc_class* Class;
typedef struct objc_object* id;
typedef signed char BOOL;

void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);

#ifdef __cplusplus
}
#endif
