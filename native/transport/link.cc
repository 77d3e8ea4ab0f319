#include "transport/link.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "transport/socket.h"

namespace flodl {

Status Link::check(std::span<const std::byte> payload, std::span<const int> descriptors) const {
  if (!failure_.is_ok()) return failure_;
  if (payload.size() > kMaxFrameBytes) {
    return Status(Code::invalid_argument, "a frame of " + std::to_string(payload.size()) + " bytes; at most " +
                                              std::to_string(kMaxFrameBytes) + " fit");
  }
  if (descriptors.size() > kMaxDescriptors) {
    return Status(Code::invalid_argument, "a frame with " + std::to_string(descriptors.size()) +
                                              " descriptors; at most " + std::to_string(kMaxDescriptors) + " fit");
  }
  for (const int descriptor : descriptors) {
    if (::fcntl(descriptor, F_GETFD) < 0) {
      return Status(Code::invalid_argument, "descriptor " + std::to_string(descriptor) + " to send is not open");
    }
  }
  if (queued_bytes_ > 0 && queued_bytes_ + payload.size() > kMaxQueuedBytes) {
    return Status(Code::link, "link " + std::to_string(id_) + ": " + std::to_string(queued_bytes_) +
                                  " bytes wait already for a peer that does not read them");
  }
  return {};
}

Status Link::broken(int error) {
  failure_ = Status(Code::link, Status::from_errno("link " + std::to_string(id_) + ": sending", error).message());
  queue_.clear();
  queued_bytes_ = 0;
  return failure_;
}

Status Link::send(std::span<const std::byte> payload, std::span<const int> descriptors) {
  if (Status status = check(payload, descriptors); !status.is_ok()) return status;
  const auto head = encode_header({.kind = FrameKind::control,
                                   .descriptors = static_cast<std::uint16_t>(descriptors.size()),
                                   .generation = generation_,
                                   .length = static_cast<std::uint32_t>(payload.size())});
  if (has_queued()) return enqueue(head, payload, descriptors);
  const Sent sent = send_bytes(socket(), head, payload, descriptors);
  // Too many descriptors of this user are under way; none of this frame's bytes went out.
  if (sent.error == ETOOMANYREFS) return Status::from_errno("link " + std::to_string(id_) + ": sending", sent.error);
  if (sent.error == EAGAIN) return enqueue(head, payload, descriptors);
  if (sent.error != 0) return broken(sent.error);
  if (sent.bytes == head.size() + payload.size()) return {};
  if (sent.bytes < head.size()) return enqueue(std::span(head).subspan(sent.bytes), payload, {});
  return enqueue({}, payload.subspan(sent.bytes - head.size()), {});
}

Status Link::send_heartbeat() {
  if (!failure_.is_ok()) return failure_;
  if (has_queued()) return {};
  const auto head =
      encode_header({.kind = FrameKind::heartbeat, .descriptors = 0, .generation = generation_, .length = 0});
  const Sent sent = send_bytes(socket(), head, {}, {});
  if (sent.error == EAGAIN) return {};
  if (sent.error != 0) return broken(sent.error);
  if (sent.bytes == head.size()) return {};
  return enqueue(std::span(head).subspan(sent.bytes), {}, {});
}

Status Link::enqueue(std::span<const std::byte> head, std::span<const std::byte> body,
                     std::span<const int> descriptors) {
  Outgoing out;
  for (const int descriptor : descriptors) {
    Result<Descriptor> copy = duplicate_descriptor(descriptor);
    if (!copy.is_ok()) return copy.status();
    out.descriptors.push_back(std::move(copy.value()));
  }
  out.bytes.reserve(head.size() + body.size());
  out.bytes.insert(out.bytes.end(), head.begin(), head.end());
  out.bytes.insert(out.bytes.end(), body.begin(), body.end());
  queued_bytes_ += out.bytes.size();
  queue_.push_back(std::move(out));
  return {};
}

Status Link::write_queued() {
  if (!failure_.is_ok()) return failure_;
  while (has_queued()) {
    Outgoing& out = queue_.front();
    std::vector<int> numbers;
    for (const Descriptor& descriptor : out.descriptors) numbers.push_back(descriptor.get());
    const Sent sent = send_bytes(socket(), std::span(out.bytes).subspan(out.written), {}, numbers);
    if (sent.error == EAGAIN) return {};
    if (sent.error != 0) return broken(sent.error);
    out.descriptors.clear();
    out.written += sent.bytes;
    queued_bytes_ -= sent.bytes;
    if (out.written == out.bytes.size()) queue_.pop_front();
  }
  return {};
}

Reading Link::read(std::span<std::byte> buffer) {
  Reading reading;
  Received received = receive_bytes(socket(), buffer);
  if (received.error == EAGAIN) return reading;
  reading.bytes = received.bytes;
  const auto end = [&reading](std::string reason) {
    reading.has_ended = true;
    reading.reason = std::move(reason);
  };
  if (received.error != 0) {
    end(Status::from_errno("receiving", received.error).message());
    return reading;
  }
  if (received.bytes == 0) {
    end(decoder_.pending_bytes() == 0 ? "end of file" : "end of file inside a frame");
    return reading;
  }
  for (Descriptor& descriptor : received.descriptors) arrived_.push_back(std::move(descriptor));
  if (received.is_truncated) {
    end("descriptors were lost: a frame brought too many, or this process may open no more");
    return reading;
  }
  const Status decoded = decoder_.feed(std::span<const std::byte>(buffer).first(received.bytes));
  const Status delivered = deliver(reading.messages);
  if (!delivered.is_ok()) {
    end(delivered.message());
  } else if (!decoded.is_ok()) {
    end(decoded.message());
  }
  return reading;
}

void Link::close() {
  socket_.reset();
  queue_.clear();
  arrived_.clear();
}

// Descriptors arrive with the first byte of their frame at the latest, and in the order of frames.
Status Link::deliver(std::vector<Incoming>& messages) {
  while (std::optional<Frame> frame = decoder_.next()) {
    const std::size_t announced = frame->header.descriptors;
    if (announced > arrived_.size()) {
      return Status(Code::wire, "frame announces " + std::to_string(announced) + " descriptors, " +
                                    std::to_string(arrived_.size()) + " came");
    }
    if (frame->header.kind == FrameKind::heartbeat) continue;
    Incoming incoming{.generation = frame->header.generation, .payload = std::move(frame->payload), .descriptors = {}};
    for (std::size_t i = 0; i < announced; ++i) {
      incoming.descriptors.push_back(std::move(arrived_.front()));
      arrived_.pop_front();
    }
    messages.push_back(std::move(incoming));
  }
  const std::size_t claimable = decoder_.pending_bytes() == 0 ? 0 : kMaxDescriptors;
  if (arrived_.size() > claimable) {
    return Status(Code::wire, std::to_string(arrived_.size()) + " descriptors came that no frame announces");
  }
  return {};
}

}  // namespace flodl
