#include "transport/socket.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "flodl/frame.h"

namespace flodl {
namespace {

#if defined(MSG_NOSIGNAL)
constexpr int kSendFlags = MSG_NOSIGNAL;
#else
constexpr int kSendFlags = 0;  // SO_NOSIGPIPE is set instead
#endif
#if defined(MSG_CMSG_CLOEXEC)
constexpr int kReceiveFlags = MSG_CMSG_CLOEXEC;
#else
constexpr int kReceiveFlags = 0;  // set_close_on_exec after the fact
#endif

constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(int) * kMaxDescriptors);

void take_descriptors(msghdr& message, Received& received) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof descriptor);
      received.descriptors.emplace_back(descriptor);
#if !defined(MSG_CMSG_CLOEXEC)
      (void)set_close_on_exec(descriptor).is_ok();  // fails only for a number that is not open
#endif
    }
  }
}

}  // namespace

Status prepare_socket(int socket) {
  int type = 0;
  socklen_t size = sizeof type;
  if (::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) != 0) {
    return Status::from_errno("a link needs a socket", errno);
  }
  if (type != SOCK_STREAM) return Status(Code::invalid_argument, "a link needs a stream socket");
#if defined(SO_NOSIGPIPE)
  const int on = 1;
  if (::setsockopt(socket, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on) != 0) {
    return Status::from_errno("SO_NOSIGPIPE", errno);
  }
#endif
  if (Status status = set_close_on_exec(socket); !status.is_ok()) return status;
  return set_non_blocking(socket);
}

Sent send_bytes(int socket, std::span<const std::byte> head, std::span<const std::byte> body,
                std::span<const int> descriptors) {
  iovec parts[2] = {{const_cast<std::byte*>(head.data()), head.size()},
                    {const_cast<std::byte*>(body.data()), body.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = body.empty() ? 1 : 2;
  alignas(cmsghdr) std::byte control[kControlBytes] = {};
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = static_cast<decltype(message.msg_controllen)>(CMSG_SPACE(descriptors.size_bytes()));
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = static_cast<decltype(part->cmsg_len)>(CMSG_LEN(descriptors.size_bytes()));
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  while (true) {
    const ssize_t sent = ::sendmsg(socket, &message, kSendFlags);
    if (sent >= 0) return Sent{static_cast<std::size_t>(sent), 0};
    if (errno == EWOULDBLOCK || errno == ENOBUFS) return Sent{0, EAGAIN};
    if (errno != EINTR) return Sent{0, errno};
  }
}

Received receive_bytes(int socket, std::span<std::byte> buffer) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::byte control[kControlBytes];
  Received received;
  while (true) {
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t bytes = ::recvmsg(socket, &message, kReceiveFlags);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) {
      received.error = errno == EWOULDBLOCK ? EAGAIN : errno;
      return received;
    }
    received.bytes = static_cast<std::size_t>(bytes);
    received.is_truncated = (message.msg_flags & MSG_CTRUNC) != 0;
    take_descriptors(message, received);
    return received;
  }
}

}  // namespace flodl
