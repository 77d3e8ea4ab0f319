#include "flodl/frame.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <utility>

#include "doctest/doctest.h"
#include "frame_vectors.h"

namespace flodl {
namespace {

using testing::FrameVector;

const std::vector<FrameVector>& vectors() {
  static const auto all = testing::read_frame_vectors(FLODL_VECTORS_DIR "/wire/frames.txt");
  return all;
}

std::string described(const Frame& frame) {
  std::string payload;
  for (const std::byte byte : frame.payload) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
    payload += digits;
  }
  return std::string(frame.header.kind == FrameKind::control ? "control " : "heartbeat ") +
         std::to_string(frame.header.generation) + " " + std::to_string(frame.header.descriptors) + " " +
         (payload.empty() ? "-" : payload);
}

// What a decoder makes of `bytes` when it gets at most `cut` of them at a time.
struct Outcome {
  std::vector<std::string> frames;
  std::string end;
};

Outcome decode(std::span<const std::byte> bytes, std::size_t cut) {
  FrameDecoder decoder;
  Outcome outcome;
  for (std::size_t at = 0; at < bytes.size(); at += cut) {
    const Status fed = decoder.feed(bytes.subspan(at, std::min(cut, bytes.size() - at)));
    while (const auto frame = decoder.next()) outcome.frames.push_back(described(*frame));
    if (fed.is_ok()) continue;
    CHECK(fed.code() == Code::wire);
    outcome.end = "error: " + fed.message();
    return outcome;
  }
  const std::size_t pending = decoder.pending_bytes();
  outcome.end = pending == 0 ? "whole" : "incomplete " + std::to_string(pending);
  return outcome;
}

void check_outcome(const FrameVector& vector, const Outcome& outcome) {
  CHECK(outcome.frames == vector.frames);
  if (vector.end.starts_with("error: ")) {
    REQUIRE(outcome.end.starts_with("error: "));
    CHECK_MESSAGE(outcome.end.find(vector.end.substr(7)) != std::string::npos, outcome.end);
  } else {
    CHECK(outcome.end == vector.end);
  }
}

std::vector<std::byte> frame_bytes(const FrameHeader& header, std::size_t payload, std::byte fill) {
  const auto head = encode_header(header);
  std::vector<std::byte> bytes(head.size() + payload, fill);
  std::copy(head.begin(), head.end(), bytes.begin());
  return bytes;
}

}  // namespace

TEST_CASE("every vector decodes as written, whatever the cuts") {
  REQUIRE(vectors().size() >= 25);
  for (const FrameVector& vector : vectors()) {
    CAPTURE(vector.name);
    for (const std::size_t cut : {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{15}, std::size_t{16},
                                  std::size_t{17}, std::size_t{1000}}) {
      CAPTURE(cut);
      check_outcome(vector, decode(vector.bytes, cut));
    }
  }
}

TEST_CASE("trailing bytes begin the next frame") {
  for (const FrameVector& vector : vectors()) {
    if (vector.end != "whole") continue;
    CAPTURE(vector.name);
    std::vector<std::byte> bytes = vector.bytes;
    const auto next = frame_bytes({.length = 3}, 1, std::byte{1});
    bytes.insert(bytes.end(), next.begin(), next.end());
    FrameVector expected = vector;
    expected.end = "incomplete 17";
    check_outcome(expected, decode(bytes, 1000));
    check_outcome(expected, decode(bytes, 1));
  }
}

TEST_CASE("a header survives encoding and decoding") {
  std::mt19937 random(20261130);
  for (int i = 0; i < 1000; ++i) {
    FrameHeader header;
    header.kind = i % 2 == 0 ? FrameKind::control : FrameKind::heartbeat;
    header.generation = static_cast<std::uint32_t>(random());
    if (header.kind == FrameKind::control) {
      header.descriptors = static_cast<std::uint16_t>(random() % (kMaxDescriptors + 1));
      header.length = static_cast<std::uint32_t>(random() % (kMaxFrameBytes + 1));
    }
    const auto decoded = decode_header(encode_header(header));
    REQUIRE(decoded.is_ok());
    CHECK(decoded.value().kind == header.kind);
    CHECK(decoded.value().descriptors == header.descriptors);
    CHECK(decoded.value().generation == header.generation);
    CHECK(decoded.value().length == header.length);
  }
}

TEST_CASE("the first vectors are what the encoder writes") {
  std::vector<std::byte> bytes = frame_bytes({.generation = 7, .length = 5}, 0, {});
  for (const char letter : std::string("hello")) bytes.push_back(static_cast<std::byte>(letter));
  CHECK(bytes == vectors().front().bytes);
}

TEST_CASE("an error is final and repeats itself") {
  FrameDecoder decoder;
  const auto good = frame_bytes({.length = 0}, 0, {});
  auto bad = good;
  bad[0] = std::byte{0};
  const Status failure = decoder.feed(bad);
  REQUIRE(failure.code() == Code::wire);
  CHECK(decoder.feed(good).message() == failure.message());
  CHECK_FALSE(decoder.next().has_value());
  CHECK(decoder.pending_bytes() == 0);
}

TEST_CASE("the largest frame passes in small pieces") {
  const auto bytes = frame_bytes({.length = kMaxFrameBytes}, kMaxFrameBytes, std::byte{0x5A});
  FrameDecoder decoder;
  constexpr std::size_t kPiece = 65'521;
  for (std::size_t at = 0; at < bytes.size(); at += kPiece) {
    REQUIRE_FALSE(decoder.next().has_value());
    REQUIRE(decoder.feed(std::span(bytes).subspan(at, std::min(kPiece, bytes.size() - at))).is_ok());
  }
  const auto frame = decoder.next();
  REQUIRE(frame.has_value());
  CHECK(frame->payload.size() == kMaxFrameBytes);
  CHECK(std::all_of(frame->payload.begin(), frame->payload.end(), [](std::byte b) { return b == std::byte{0x5A}; }));
}

}  // namespace flodl
