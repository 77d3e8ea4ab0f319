// One link: a local socket that carries frames and, with them, descriptors.
//
// Knows neither threads nor pollers. The writing half is guarded by the endpoint's mutex, the reading half belongs to
// the I/O thread; the two share nothing but the socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "core/descriptor.h"
#include "flodl/frame.h"
#include "flodl/status.h"

namespace flodl {

// Bytes that may wait in one link, in either direction, before the slower side is called at fault.
inline constexpr std::size_t kMaxQueuedBytes = std::size_t{256} << 20;

struct Incoming {
  std::uint32_t generation = 0;
  std::vector<std::byte> payload;
  std::vector<Descriptor> descriptors;
};

struct Reading {
  std::size_t bytes = 0;           // heartbeats count here and appear nowhere else
  std::vector<Incoming> messages;  // also those that came before the end
  bool has_ended = false;
  std::string reason;  // why it ended
};

class Link {
 public:
  Link(std::uint64_t id, Descriptor socket, std::uint32_t generation)
      : id_(id), generation_(generation), socket_(std::move(socket)) {}

  std::uint64_t id() const { return id_; }
  int socket() const { return socket_.get(); }

  // Writes at once where it can, queues the rest. A failure other than Code::link leaves the link as it was.
  Status send(std::span<const std::byte> payload, std::span<const int> descriptors);
  // Only if nothing is queued: queued bytes tell as much. A full socket swallows it.
  Status send_heartbeat();
  // Writes what the socket takes. After Code::link nothing more can be written.
  Status write_queued();
  bool has_queued() const { return !queue_.empty(); }
  // Ok until a write found the peer gone. What the peer sent before may still be read.
  const Status& write_failure() const { return failure_; }

  // One recvmsg into `buffer`.
  Reading read(std::span<std::byte> buffer);

  // Both halves: closes the socket, and every descriptor that waits in either direction. Nothing else may follow.
  void close();

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::size_t written = 0;
    std::vector<Descriptor> descriptors;  // sent with the first byte
  };

  Status check(std::span<const std::byte> payload, std::span<const int> descriptors) const;
  Status broken(int error);
  Status enqueue(std::span<const std::byte> head, std::span<const std::byte> body, std::span<const int> descriptors);
  Status deliver(std::vector<Incoming>& messages);

  const std::uint64_t id_;
  const std::uint32_t generation_;
  Descriptor socket_;

  // Writing.
  std::deque<Outgoing> queue_;
  std::size_t queued_bytes_ = 0;
  Status failure_;

  // Reading.
  FrameDecoder decoder_;
  std::deque<Descriptor> arrived_;  // not yet claimed by a whole frame
};

}  // namespace flodl
