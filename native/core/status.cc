#include "flodl/status.h"

#include <cerrno>
#include <system_error>

namespace flodl {

Status Status::from_errno(const std::string& context, int error) {
  const Code code = error == ENOMEM ? Code::memory : Code::system;
  return Status(code, context + ": " + std::generic_category().message(error));
}

}  // namespace flodl
