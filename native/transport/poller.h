// The one seam to the operating system's readiness: epoll or kqueue, chosen when building.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "flodl/status.h"

namespace flodl {

// Level-triggered. wait() is called by one thread, everything else by any, also meanwhile.
// Tokens are the caller's, never 0, and never used twice: a token that is reported after its removal means nothing.
class Poller {
 public:
  struct Ready {
    std::uint64_t token = 0;
    bool is_readable = false;  // bytes, end of file, an error, or a process that ended
    bool is_writable = false;
  };

  static Result<std::unique_ptr<Poller>> create();
  virtual ~Poller() = default;

  // Watches for reading. The descriptor stays the caller's.
  virtual Status add(int descriptor, std::uint64_t token) = 0;
  virtual Status watch_writes(int descriptor, std::uint64_t token, bool wanted) = 0;
  virtual void remove(int descriptor) = 0;

  // Reported once it has ended, also if it has ended already. It must be a child that nobody has reaped.
  virtual Status add_process(int pid, std::uint64_t token) = 0;
  virtual void remove_process(std::uint64_t token) = 0;

  // Empty after a timeout (negative: none) or wake().
  virtual std::vector<Ready> wait(std::chrono::nanoseconds timeout) = 0;
  virtual void wake() = 0;
};

}  // namespace flodl
