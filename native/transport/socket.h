// One sendmsg, one recvmsg: bytes and descriptors over a connected non-blocking local socket.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/descriptor.h"
#include "flodl/status.h"

namespace flodl {

// Checks that it is a stream socket; makes it non-blocking, close-on-exec and silent (no SIGPIPE).
Status prepare_socket(int socket);

struct Sent {
  std::size_t bytes = 0;
  int error = 0;  // errno; EAGAIN when the socket is full, and then nothing was sent
};
// Writes `head` then `body`. The descriptors go with the first byte: they are sent if any byte is.
Sent send_bytes(int socket, std::span<const std::byte> head, std::span<const std::byte> body,
                std::span<const int> descriptors);

struct Received {
  std::size_t bytes = 0;
  int error = 0;              // errno; EAGAIN when nothing is there. No error and no bytes: end of file
  bool is_truncated = false;  // more descriptors came than kMaxDescriptors, or than this process may open
  std::vector<Descriptor> descriptors;
};
Received receive_bytes(int socket, std::span<std::byte> buffer);

}  // namespace flodl
