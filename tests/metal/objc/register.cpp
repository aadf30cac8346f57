// The list of everything that answers messages on the simulated device.
#include "objc/register.h"

namespace simulated {

void register_every_class() {
  register_object();
  register_autorelease_pool();
  register_string();
  register_error();
  register_collections();
  register_url();
  register_process_info();

  register_device();
  register_buffer();
  register_library();
  register_pipeline();
  register_binary_archive();
  register_command_queue();
  register_command_buffer();
  register_command_encoder();
}

}  // namespace simulated
