// Memory that runs out when a test says so: operator new, and aligned_alloc of the library, of the
// program that this is linked into.
#pragma once

namespace flashattn::testing {

// The n-th request from now on, of any thread, fails; those after it do not. 0: none does.
void fail_request(long n);

// Whether that request is still to come.
bool is_waiting();

// Blocks that were handed out and not given back.
long live_blocks();

}  // namespace flashattn::testing
