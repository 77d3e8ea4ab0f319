#include "core/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace flodl {

void Descriptor::reset(int value) {
  // Never retried: after EINTR the number is free already on Linux and macOS, and may be somebody else's.
  if (value_ >= 0) ::close(value_);
  value_ = value;
}

Result<Descriptor> duplicate_descriptor(int descriptor) {
  constexpr int kLowest = 3;  // never one of the standard streams, even if they are closed
  const int copy = ::fcntl(descriptor, F_DUPFD_CLOEXEC, kLowest);
  if (copy < 0) return Status::from_errno("duplicating descriptor " + std::to_string(descriptor), errno);
  return Descriptor(copy);
}

Result<Pipe> make_pipe() {
  int ends[2];
#if defined(__linux__)
  if (::pipe2(ends, O_CLOEXEC) != 0) return Status::from_errno("pipe2", errno);
  return Pipe{Descriptor(ends[0]), Descriptor(ends[1])};
#else
  if (::pipe(ends) != 0) return Status::from_errno("pipe", errno);
  Pipe made{Descriptor(ends[0]), Descriptor(ends[1])};
  for (const int end : ends) {
    if (Status status = set_close_on_exec(end); !status.is_ok()) return status;
  }
  return made;
#endif
}

Status set_close_on_exec(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFD);
  if (flags < 0 || ::fcntl(descriptor, F_SETFD, flags | FD_CLOEXEC) < 0) {
    return Status::from_errno("fcntl(FD_CLOEXEC)", errno);
  }
  return {};
}

Status set_non_blocking(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0) {
    return Status::from_errno("fcntl(O_NONBLOCK)", errno);
  }
  return {};
}

}  // namespace flodl
