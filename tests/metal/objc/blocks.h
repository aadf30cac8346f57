// Copying and releasing blocks, as the public <Block.h> declares it.
#pragma once

extern "C" {

void* _Block_copy(const void* block);
void _Block_release(const void* block);

}  // extern "C"
