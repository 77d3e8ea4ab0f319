// Everything that a process of a run waits for, behind one wait().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "flodl/events.h"
#include "flodl/status.h"

namespace flodl {

struct EndpointOptions {
  double heartbeat_s = 1.0;  // an idle link carries a heartbeat this often
  double silence_s = 0.0;    // a link not heard for so long is reported silent; 0: never
};

// Owns its links, streams and one I/O thread. Heartbeats are sent and aged on that thread, so a held GIL is no death.
// If the thread itself did not run for over 1 s (sleep, swap, SIGSTOP), all ages start anew.
// Every method may be called from any thread; wait() from one at a time. After fork() only the parent may use it.
class Endpoint {
 public:
  static Result<std::unique_ptr<Endpoint>> create(const EndpointOptions& options);
  virtual ~Endpoint() = default;  // closes everything; frames not yet written are lost (see flush)

  // Takes ownership of a connected stream socket (socket pair or AF_UNIX), also on failure.
  virtual Result<std::uint64_t> add_link(int descriptor, std::uint32_t generation) = 0;
  // Takes ownership of the read end of a pipe; its bytes come as stream_data.
  virtual Result<std::uint64_t> add_stream(int descriptor) = 0;
  // Queues one control frame. Descriptors are duplicated; the caller keeps its own.
  virtual Status send(std::uint64_t link, std::span<const std::byte> payload, std::span<const int> descriptors) = 0;
  // Waits until all queued bytes of a link are with the kernel. Code::link if it closed, Code::state on timeout.
  virtual Status flush(std::uint64_t link, double timeout_s) = 0;
  virtual void close_link(std::uint64_t link) = 0;

  // Reports the exit of a child of this process and reaps it, and that it stands stopped (looked at as often as
  // heartbeats are sent, so while there is a link); first kills its process group if asked,
  // so that what the child had started ends with it.
  virtual Status watch_child(int pid, bool kills_group) = 0;
  // At end of file on this link the I/O thread kills this process's own group (SIGKILL): nothing outlives its launcher.
  virtual Status set_lifeline(std::uint64_t link) = 0;
  // A non-blocking descriptor for signal.set_wakeup_fd: each byte written to it becomes a signal event.
  virtual int signal_descriptor() const = 0;

  virtual std::vector<Event> wait(double timeout_s) = 0;
  virtual void wake() = 0;
  virtual EventQueue& queue() = 0;  // tasks post their end here
};

}  // namespace flodl
