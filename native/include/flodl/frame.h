// Frames: a fixed 16-byte little-endian header, then the payload. docs/design/wire.md is normative.
//
//   0  magic u32 = 0x4C444C46 ("FLDL")   4  version u8 = 1   5  kind u8
//   6  descriptors u16                   8  generation u32  12  length u32
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "flodl/status.h"

namespace flodl {

inline constexpr std::uint32_t kFrameMagic = 0x4C444C46;
inline constexpr std::uint8_t kFrameVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 16;
inline constexpr std::uint32_t kMaxFrameBytes = 64u << 20;  // payload; refused before allocation
inline constexpr std::uint16_t kMaxDescriptors = 16;

enum class FrameKind : std::uint8_t { control = 1, heartbeat = 2 };

struct FrameHeader {
  FrameKind kind = FrameKind::control;
  std::uint16_t descriptors = 0;
  std::uint32_t generation = 0;
  std::uint32_t length = 0;
};

std::array<std::byte, kFrameHeaderBytes> encode_header(const FrameHeader& header);
// Code::wire names the field and its value.
Result<FrameHeader> decode_header(std::span<const std::byte, kFrameHeaderBytes> bytes);

struct Frame {
  FrameHeader header;
  std::vector<std::byte> payload;
};

// Fed any cut of the byte stream; gives whole frames. After an error it decodes nothing more; frames that were whole
// before the bad bytes are still given, so that the outcome does not depend on the cuts.
class FrameDecoder {
 public:
  Status feed(std::span<const std::byte> bytes);
  std::optional<Frame> next();
  // Bytes of a frame that is not whole yet; 0 between frames.
  std::size_t pending_bytes() const { return pending_.size() - start_; }

 private:
  std::vector<std::byte> pending_;
  std::size_t start_ = 0;
  std::vector<Frame> ready_;
  std::size_t taken_ = 0;
  Status failure_;
};

}  // namespace flodl
