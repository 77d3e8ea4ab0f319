// Any bytes, cut anywhere: the decoder neither fails otherwise nor gives other frames than for the bytes as a whole.
// The first byte of the input says how many of the next bytes are sizes of cuts; the rest is the stream.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "flodl/frame.h"

namespace {

using flodl::Frame;
using flodl::FrameDecoder;

struct Outcome {
  std::vector<Frame> frames;
  std::string failure;
  std::size_t pending = 0;
};

void require(bool claim) {
  if (!claim) std::abort();
}

// Returns false at the first error.
bool feed(FrameDecoder& decoder, std::span<const std::byte> bytes, Outcome& outcome) {
  const flodl::Status fed = decoder.feed(bytes);
  while (auto frame = decoder.next()) outcome.frames.push_back(std::move(*frame));
  outcome.pending = decoder.pending_bytes();
  if (fed.is_ok()) return true;
  require(fed.code() == flodl::Code::wire && !fed.message().empty());
  outcome.failure = fed.message();
  return false;
}

Outcome decode(std::span<const std::byte> stream, std::span<const std::byte> cuts) {
  FrameDecoder decoder;
  Outcome outcome;
  for (std::size_t turn = 0; !stream.empty(); ++turn) {
    const std::size_t cut = cuts.empty() ? stream.size() : 1 + std::to_integer<std::size_t>(cuts[turn % cuts.size()]);
    const auto piece = stream.first(std::min(cut, stream.size()));
    if (!feed(decoder, piece, outcome)) break;
    stream = stream.subspan(piece.size());
  }
  return outcome;
}

void require_same(const Outcome& whole, const Outcome& cut) {
  require(whole.failure == cut.failure && whole.pending == cut.pending && whole.frames.size() == cut.frames.size());
  for (std::size_t i = 0; i < whole.frames.size(); ++i) {
    const Frame& a = whole.frames[i];
    const Frame& b = cut.frames[i];
    require(a.payload == b.payload && a.payload.size() == a.header.length);
    // Encoding gives back the header's bytes: no field is lost.
    require(flodl::encode_header(a.header) == flodl::encode_header(b.header));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size)).subspan(1);
  const std::size_t count = std::min<std::size_t>(data[0] % 16, input.size());
  const auto cuts = input.first(count);
  const auto stream = input.subspan(count);
  const Outcome whole = decode(stream, {});
  const std::byte one[] = {std::byte{0}};
  require_same(whole, decode(stream, cuts));
  require_same(whole, decode(stream, one));

  // The frames that came out are what stands in the stream, byte for byte.
  std::size_t at = 0;
  for (const Frame& frame : whole.frames) {
    const auto head = flodl::encode_header(frame.header);
    require(std::equal(head.begin(), head.end(), stream.begin() + static_cast<std::ptrdiff_t>(at)));
    at += head.size() + frame.payload.size();
  }
  require(whole.failure.empty() ? at + whole.pending == stream.size() : at < stream.size());
  return 0;
}
