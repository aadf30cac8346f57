// NSURL's methods; only file URLs exist here.
#include "objc/url.h"

#include "objc/autorelease.h"
#include "objc/register.h"
#include "objc/string.h"

namespace simulated {

void register_url() {
  allocatable<Url>("NSURL");
  class_method("NSURL", "fileURLWithPath:", [](Object*, SEL, String* path) {
    return autoreleased(new Url(text_of(path)));
  });
  instance_method("NSURL", "initFileURLWithPath:", [](Url* self, SEL, String* path) {
    self->assign(text_of(path));
    return self;
  });
  instance_method("NSURL", "fileSystemRepresentation",
                  [](Url* self, SEL) { return self->path().c_str(); });
}

}  // namespace simulated
