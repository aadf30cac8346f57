// One function per class file, each of which registers that file's Objective-C methods.
#pragma once

namespace simulated {

void register_object();
void register_autorelease_pool();
void register_string();
void register_error();
void register_collections();
void register_url();
void register_process_info();

void register_device();
void register_buffer();
void register_library();
void register_pipeline();
void register_binary_archive();
void register_command_queue();
void register_command_buffer();
void register_command_encoder();

// Runs all of them; called once, before the first message is looked up.
void register_every_class();

}  // namespace simulated
