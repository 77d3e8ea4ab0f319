#include "averager/probe.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "doctest/doctest.h"
#include "kernels/table.h"

using namespace flodl;

namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

// `bytes` of memory at a multiple of 64, filled with a pattern of its own.
std::vector<Line> filled(std::size_t bytes, unsigned seed) {
  std::vector<Line> lines((bytes + 63) / 64);
  auto* out = reinterpret_cast<std::byte*>(lines.data());
  for (std::size_t i = 0; i < lines.size() * 64; ++i) out[i] = static_cast<std::byte>((i * 131 + seed) % 251);
  return lines;
}

// The exclusive or of the first bytes, word by word.
std::uint64_t folded(const std::vector<Line>& lines, std::size_t bytes) {
  std::uint64_t all = 0;
  for (std::size_t at = 0; at < bytes; at += sizeof all) {
    std::uint64_t word;
    std::memcpy(&word, lines[at / 64].bytes + at % 64, sizeof word);
    all ^= word;
  }
  return all;
}

std::byte* start(std::vector<Line>& lines) { return reinterpret_cast<std::byte*>(lines.data()); }

bool is_same(std::vector<Line>& a, std::vector<Line>& b, std::size_t bytes) {
  return std::equal(start(a), start(a) + bytes, start(b));
}

}  // namespace

TEST_CASE("a bare pass moves every byte and no other, in every table") {
  for (const Kernels* table : available_kernels()) {
    for (const std::size_t streams : {1, 4}) {
      for (const std::size_t bytes : {1, 63, 64, 255, 256, 1000, 65536, 70001}) {
        CAPTURE(table->name);
        CAPTURE(streams);
        CAPTURE(bytes);
        std::vector<Line> src = filled(bytes + 64, 1);
        std::vector<Line> dst = filled(bytes + 64, 2);
        std::vector<Line> before = dst;
        table->move({MoveKind::copy, start(dst), start(src), bytes, streams});
        CHECK(is_same(dst, src, bytes));
        CHECK(std::equal(start(dst) + bytes, start(dst) + bytes + 64, start(before) + bytes));
        before = dst;
        CHECK(table->move({MoveKind::update, start(dst), nullptr, bytes, streams}) == 0);
        CHECK(is_same(dst, before, bytes + 64));
        const std::uint64_t read = table->move({MoveKind::read, start(dst), nullptr, bytes, streams});
        CHECK(read == folded(dst, bytes / (64 * streams) * (64 * streams)));
        CHECK(is_same(dst, before, bytes + 64));
      }
    }
  }
}

TEST_CASE("the probe covers the whole array on any number of threads, and says how long it took") {
  const std::size_t bytes = 3 * kChunkBytes + 100;
  for (const std::size_t threads : {1, 2, 5}) {
    std::vector<Line> src = filled(bytes, 3);
    std::vector<Line> dst = filled(bytes, 4);
    Result<double> seconds = stream_probe({MoveKind::copy, start(dst), start(src), bytes, 4}, threads);
    REQUIRE(seconds.is_ok());
    CHECK(seconds.value() > 0.0);
    CHECK(is_same(dst, src, bytes));
  }
}

TEST_CASE("the probe refuses what it cannot do") {
  std::vector<Line> src = filled(4096, 5);
  std::vector<Line> dst = filled(4096, 6);
  const Move good{MoveKind::copy, start(dst), start(src), 4096, 1};
  const auto code = [](Move job, std::size_t threads = 1) { return stream_probe(job, threads).status().code(); };
  Move job = good;
  job.streams = 2;
  CHECK(code(job) == Code::invalid_argument);
  job = good;
  job.dst += 8;
  CHECK(code(job) == Code::invalid_argument);
  job = good;
  job.src = nullptr;
  CHECK(code(job) == Code::invalid_argument);
  job = good;
  job.src = job.dst + 64;
  CHECK(code(job) == Code::invalid_argument);
  job = good;
  job.bytes = 0;
  CHECK(code(job) == Code::invalid_argument);
  CHECK(code(good, 0) == Code::invalid_argument);
  CHECK(code(good, 257) == Code::invalid_argument);
}
