#include "flodl/frame.h"

#include <cstdio>
#include <iterator>
#include <string>
#include <utility>

namespace flodl {
namespace {

// Where each field of the header begins (docs/design/wire.md).
constexpr std::size_t kMagicAt = 0;
constexpr std::size_t kVersionAt = 4;
constexpr std::size_t kKindAt = 5;
constexpr std::size_t kDescriptorsAt = 6;
constexpr std::size_t kGenerationAt = 8;
constexpr std::size_t kLengthAt = 12;
// A decoder gives back what a large frame needed beyond this.
constexpr std::size_t kKeptCapacity = std::size_t{1} << 20;

template <typename T>
void store(std::span<std::byte> bytes, std::size_t at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) bytes[at + i] = static_cast<std::byte>((value >> (8 * i)) & 0xFF);
}

template <typename T>
T load(std::span<const std::byte> bytes, std::size_t at) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value = static_cast<T>(value | static_cast<T>(static_cast<T>(bytes[at + i]) << (8 * i)));
  }
  return value;
}

Status refused(const char* field, std::uint32_t value, const std::string& expected) {
  return Status(Code::wire, "frame " + std::string(field) + " is " + std::to_string(value) + ", expected " + expected);
}

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08X", static_cast<unsigned>(value));
  return text;
}

}  // namespace

std::array<std::byte, kFrameHeaderBytes> encode_header(const FrameHeader& header) {
  std::array<std::byte, kFrameHeaderBytes> bytes;
  store(bytes, kMagicAt, kFrameMagic);
  store(bytes, kVersionAt, kFrameVersion);
  store(bytes, kKindAt, static_cast<std::uint8_t>(header.kind));
  store(bytes, kDescriptorsAt, header.descriptors);
  store(bytes, kGenerationAt, header.generation);
  store(bytes, kLengthAt, header.length);
  return bytes;
}

Result<FrameHeader> decode_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  const auto magic = load<std::uint32_t>(bytes, kMagicAt);
  if (magic != kFrameMagic) {
    return Status(Code::wire, "frame magic is " + hex(magic) + ", expected " + hex(kFrameMagic));
  }
  const auto version = load<std::uint8_t>(bytes, kVersionAt);
  if (version != kFrameVersion) return refused("version", version, std::to_string(kFrameVersion));
  const auto kind = load<std::uint8_t>(bytes, kKindAt);
  if (kind != static_cast<std::uint8_t>(FrameKind::control) &&
      kind != static_cast<std::uint8_t>(FrameKind::heartbeat)) {
    return refused("kind", kind, "1 (control) or 2 (heartbeat)");
  }
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.descriptors = load<std::uint16_t>(bytes, kDescriptorsAt);
  header.generation = load<std::uint32_t>(bytes, kGenerationAt);
  header.length = load<std::uint32_t>(bytes, kLengthAt);
  const bool is_heartbeat = header.kind == FrameKind::heartbeat;
  if (is_heartbeat && header.descriptors != 0) return refused("descriptors", header.descriptors, "0 in a heartbeat");
  if (is_heartbeat && header.length != 0) return refused("length", header.length, "0 in a heartbeat");
  if (header.descriptors > kMaxDescriptors) {
    return refused("descriptors", header.descriptors, "at most " + std::to_string(kMaxDescriptors));
  }
  if (header.length > kMaxFrameBytes) {
    return refused("length", header.length, "at most " + std::to_string(kMaxFrameBytes) + " bytes");
  }
  return header;
}

Status FrameDecoder::feed(std::span<const std::byte> bytes) {
  if (!failure_.is_ok()) return failure_;
  // Grows with the bytes that came, never with a length that a peer only announced.
  pending_.insert(pending_.end(), bytes.begin(), bytes.end());
  while (pending_bytes() >= kFrameHeaderBytes) {
    const std::span<const std::byte> rest(pending_.data() + start_, pending_bytes());
    Result<FrameHeader> header = decode_header(rest.first<kFrameHeaderBytes>());
    if (!header.is_ok()) {
      failure_ = header.status();
      pending_ = {};
      start_ = 0;
      return failure_;
    }
    const std::size_t whole = kFrameHeaderBytes + header.value().length;
    if (rest.size() < whole) break;
    const auto payload = rest.subspan(kFrameHeaderBytes, header.value().length);
    ready_.push_back(Frame{header.value(), {payload.begin(), payload.end()}});
    start_ += whole;
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(start_));
  start_ = 0;
  if (pending_.empty() && pending_.capacity() > kKeptCapacity) pending_ = {};
  return {};
}

std::optional<Frame> FrameDecoder::next() {
  if (taken_ == ready_.size()) return std::nullopt;
  Frame frame = std::move(ready_[taken_++]);
  if (taken_ == ready_.size()) {
    ready_.clear();
    taken_ = 0;
  }
  return frame;
}

}  // namespace flodl
