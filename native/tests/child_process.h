// A forked child of a test. Fork before the test has threads of its own (before it makes an endpoint).
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <utility>

#include "core/descriptor.h"

namespace flodl::testing {

struct SocketPair {
  Descriptor ours;
  Descriptor theirs;
};

inline SocketPair make_socket_pair(int type = SOCK_STREAM) {
  int ends[2];
  if (::socketpair(AF_UNIX, type, 0, ends) != 0) std::abort();
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// Killed and reaped at the end of its scope, unless somebody reaped it before.
class ChildProcess {
 public:
  // `body` returns the exit code; nothing of the test runs after it in the child.
  explicit ChildProcess(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ == 0) ::_exit(body());
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  int pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  // Somebody else reaps it.
  int release() { return std::exchange(pid_, -1); }
  // The raw status of waitpid.
  int wait_for_end() {
    int status = -1;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  int pid_;
};

// Blocks until every holder of the other end is gone, or says otherwise by a byte.
inline bool is_end_of_file(int descriptor) {
  char byte = 0;
  ssize_t bytes = 0;
  do {
    bytes = ::read(descriptor, &byte, 1);
  } while (bytes < 0 && errno == EINTR);
  return bytes == 0;
}

inline void sleep_until_killed() {
  while (true) ::pause();
}

}  // namespace flodl::testing
