// Systems without epoll or kqueue: refused by name, so that nothing hangs on an endpoint that never hears.
#include "flodl/endpoint.h"

namespace flodl {

Result<std::unique_ptr<Endpoint>> Endpoint::create(const EndpointOptions& /*options*/) {
  return Status(Code::system, "links between processes are not on this platform yet (neither epoll nor kqueue)");
}

}  // namespace flodl
