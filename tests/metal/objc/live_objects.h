// How many objects of the simulated runtime are alive: a test compares the count before and after.
// Exported from the module, so that Python tests reach it through ctypes.
#pragma once

#define FLASHATTN_SIMULATED_EXPORT __attribute__((visibility("default"), used))

extern "C" {

// Instances of every class; class objects and selectors are not counted.
FLASHATTN_SIMULATED_EXPORT long flashattn_simulated_live_objects(void);
// Instances of one class, for example "MTLBuffer".
FLASHATTN_SIMULATED_EXPORT long flashattn_simulated_live_instances(const char* class_name);
// Instances that were ever made, in all and of one class.
FLASHATTN_SIMULATED_EXPORT long flashattn_simulated_made_objects(void);
FLASHATTN_SIMULATED_EXPORT long flashattn_simulated_made_instances(const char* class_name);

}  // extern "C"
