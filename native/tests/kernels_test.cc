// Every table against the slow reference, and so against every other, bit for bit.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "doctest/doctest.h"
#include "kernel_reference.h"
#include "kernels/table.h"

using namespace flodl;
using reference::Bytes;
using reference::draw;

namespace {

constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
constexpr std::size_t kShort[] = {0, 1, 31, 32, 33, 511, 513, 1100};
constexpr std::size_t kLong = 1000003;
constexpr std::size_t kGuard = 64;

std::uint64_t bits(double x) { return std::bit_cast<std::uint64_t>(x); }

bool can_narrow(DType in, DType out) { return (in == DType::f64) == (out == DType::f64); }

// A place for `bytes` with guards around it, `shift` bytes off a multiple of 64.
class Room {
 public:
  Room(std::size_t bytes, std::size_t shift) : bytes_(bytes), held_(bytes + 3 * kGuard, std::byte{0xa5}) {
    const auto address = reinterpret_cast<std::uintptr_t>(held_.data()) + kGuard;
    start_ = kGuard + (kGuard - address % kGuard) % kGuard + shift - (shift == 0 ? 0 : kGuard);
  }
  std::byte* data() { return held_.data() + start_; }
  bool holds(const Bytes& expected) {
    return expected.size() == bytes_ && (bytes_ == 0 || std::memcmp(data(), expected.data(), bytes_) == 0);
  }
  bool is_guarded() const {
    const auto is_untouched = [](std::byte b) { return b == std::byte{0xa5}; };
    const auto first = held_.begin();
    const auto start = static_cast<std::ptrdiff_t>(start_);
    const auto end = start + static_cast<std::ptrdiff_t>(bytes_);
    return std::all_of(first, first + start, is_untouched) && std::all_of(first + end, held_.end(), is_untouched);
  }

 private:
  std::size_t bytes_;
  Bytes held_;
  std::size_t start_;
};

struct Case {
  DType in;
  DType out;
  std::size_t width;
  std::size_t count;
};

// Inputs overlap in one draw, each an element further on, so that most are unaligned.
struct Inputs {
  Bytes drawn;
  std::vector<const std::byte*> at;
  std::vector<float> weights;

  Inputs(DType dtype, std::size_t width, std::size_t count) : drawn(draw(dtype, count + 7 * width, count + width)) {
    for (std::size_t k = 0; k < width; ++k) {
      at.push_back(drawn.data() + 7 * k * bytes_of(dtype));
      weights.push_back(static_cast<float>(2 * k + 1) / static_cast<float>(width * width));
    }
  }
};

bool is_same(const WeightedSumStats& stats, const reference::Sum& expected) {
  bool same = stats.hash == expected.hash && bits(stats.norm_sq) == bits(expected.norm_sq);
  for (std::size_t k = 0; k < expected.distance_sq.size(); ++k) {
    same = same && bits(stats.distance_sq[k]) == bits(expected.distance_sq[k]) && stats.is_finite[k];
  }
  return same;
}

void check_weighted_sum(const Case& given) {
  const Inputs inputs(given.in, given.width, given.count);
  WeightedSum request{inputs.at, inputs.weights, given.in, nullptr, given.out, given.count, 42, false};
  const reference::Sum expected = reference::weighted_sum(request);
  const std::vector<const std::byte*> reversed(inputs.at.rbegin(), inputs.at.rend());
  WeightedSum other{reversed, inputs.weights, given.in, nullptr, given.out, given.count, 43, false};
  const reference::Sum expected_other = reference::weighted_sum(other);
  for (const Kernels* table : available_kernels()) {
    for (const bool streams : {false, true}) {
      for (const std::size_t shift : {std::size_t{0}, bytes_of(given.out)}) {
        CAPTURE(table->name);
        CAPTURE(static_cast<int>(given.in));
        CAPTURE(static_cast<int>(given.out));
        CAPTURE(given.width);
        CAPTURE(given.count);
        Room out(expected.out.size(), shift);
        WeightedSumStats stats;
        request.out = out.data();
        request.streams = streams;
        table->weighted_sum(request, stats);
        CHECK(out.holds(expected.out));
        CHECK(out.is_guarded());
        CHECK(is_same(stats, expected));

        Room first(expected.out.size(), shift), second(expected.out.size(), 0);
        std::array<WeightedSumStats, 2> both;
        request.out = first.data();
        other.out = second.data();
        other.streams = streams;
        table->weighted_sum_pair({request, other}, both);
        CHECK(first.holds(expected.out));
        CHECK(second.holds(expected_other.out));
        CHECK((first.is_guarded() && second.is_guarded()));
        CHECK(is_same(both[0], expected));
        CHECK(is_same(both[1], expected_other));
      }
    }
  }
}

void put(DType dtype, Bytes& bytes, std::size_t index, double value) {
  reference::narrow(dtype, value, bytes.data() + index * bytes_of(dtype));
}

}  // namespace

TEST_CASE("baseline is always there, and a name that is not there is refused by naming what is") {
  REQUIRE(!available_kernels().empty());
  CHECK(available_kernels().front()->name == "baseline");
  CHECK(choose_kernels("").value() == available_kernels().back());
  for (const Kernels* table : available_kernels()) CHECK(choose_kernels(table->name).value() == table);
  const auto refused = choose_kernels("sse9");
  REQUIRE(!refused.is_ok());
  CHECK(refused.status().code() == Code::invalid_argument);
  for (const Kernels* table : available_kernels()) {
    CHECK(refused.status().message().find(table->name) != std::string::npos);
  }
}

TEST_CASE("weighted sums and their statistics are the reference's, whatever the table, width and length") {
  for (const DType in : kFloats) {
    for (const DType out : kFloats) {
      if (!can_narrow(in, out)) continue;
      for (const std::size_t width : {1, 2, 3, 4, 5, 17}) {
        for (const std::size_t count : kShort) check_weighted_sum({in, out, width, count});
      }
    }
  }
}

TEST_CASE("long weighted sums") {
  for (const DType dtype : kFloats) {
    for (const std::size_t width : {1, 2, 3, 5}) check_weighted_sum({dtype, dtype, width, kLong});
  }
  check_weighted_sum({DType::f32, DType::f32, 17, kLong});
  check_weighted_sum({DType::f32, DType::bf16, 3, kLong});
  check_weighted_sum({DType::bf16, DType::f32, 3, kLong});
}

TEST_CASE("as many inputs as are allowed") { check_weighted_sum({DType::f32, DType::f32, kMaxInputs, 700}); }

TEST_CASE("one value that is not finite is found wherever it lies, and blamed on its input alone") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::size_t count = 1500;
  for (const Kernels* table : available_kernels()) {
    for (const DType dtype : kFloats) {
      for (const double value : {nan, infinity, -infinity}) {
        for (const std::size_t index : {std::size_t{0}, count / 2, count - 1}) {
          for (const std::size_t width : {1, 3, 6}) {
            std::vector<Bytes> inputs(width, draw(dtype, count, 5));
            put(dtype, inputs[width / 2], index, value);
            std::vector<const std::byte*> at;
            for (const Bytes& input : inputs) at.push_back(input.data());
            const std::vector<float> weights(width, 1.0f / static_cast<float>(width));
            Bytes out(count * bytes_of(dtype));
            WeightedSumStats stats;
            table->weighted_sum({at, weights, dtype, out.data(), dtype, count, 0, false}, stats);
            for (std::size_t k = 0; k < width; ++k) CHECK(stats.is_finite[k] == (k != width / 2));
            CHECK(!table->gather({at[width / 2], nullptr, dtype, count, 0, false}).is_finite);
          }
        }
      }
    }
  }
}

TEST_CASE("finite values whose squares overflow count as finite") {
  for (const Kernels* table : available_kernels()) {
    Bytes low = draw(DType::f32, 600, 1);
    Bytes high = low;
    put(DType::f32, low, 300, -3e38);
    put(DType::f32, high, 300, 3e38);
    const std::vector<const std::byte*> at{low.data(), high.data()};
    const std::vector<float> weights{0.5f, 0.5f};
    Bytes out(600 * 4);
    WeightedSumStats stats;
    table->weighted_sum({at, weights, DType::f32, out.data(), DType::f32, 600, 0, false}, stats);
    CHECK(std::isinf(stats.distance_sq[0]));
    CHECK(stats.is_finite[0]);
    CHECK(stats.is_finite[1]);
    CHECK(table->gather({high.data(), nullptr, DType::f32, 600, 0, false}).is_finite);
  }
}

TEST_CASE("gather copies, and reports norm and hash") {
  for (const Kernels* table : available_kernels()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i64, DType::u8}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{33}, std::size_t{5001}}) {
        const bool is_float = std::find(std::begin(kFloats), std::end(kFloats), dtype) != std::end(kFloats);
        const Bytes src = draw(is_float ? dtype : DType::f64, count, 3);
        const Bytes expected(src.begin(), src.begin() + static_cast<std::ptrdiff_t>(count * bytes_of(dtype)));
        reference::Squares norm(dtype);
        for (std::size_t i = 0; is_float && i < count; ++i) {
          norm.add(reference::widen(dtype, src.data() + i * bytes_of(dtype)), 0.0);
        }
        for (const bool streams : {false, true}) {
          Room dst(expected.size(), bytes_of(dtype));
          const GatherStats stats = table->gather({src.data(), dst.data(), dtype, count, 9, streams});
          CHECK(dst.holds(expected));
          CHECK(dst.is_guarded());
          CHECK(bits(stats.norm_sq) == bits(is_float ? norm.total() : 0.0));
          CHECK(stats.is_finite);
          CHECK(stats.hash == reference::hash(expected.data(), expected.size(), 9));
          const GatherStats looked = table->gather({src.data(), nullptr, dtype, count, 9, streams});
          CHECK(looked.hash == stats.hash);
          CHECK(bits(looked.norm_sq) == bits(stats.norm_sq));
        }
      }
    }
  }
}

TEST_CASE("a hash is equal to itself and tells a bit, a swap, the chunk and the length") {
  const std::size_t bytes = 5003;
  Bytes data = draw(DType::f64, 626, 11);
  data.resize(bytes);
  for (const Kernels* table : available_kernels()) {
    const auto hash = [&](const Bytes& of, std::uint64_t chunk) {
      return table->copy_hash(nullptr, of.data(), of.size(), chunk, false);
    };
    const std::uint64_t own = hash(data, 1);
    CHECK(own == reference::hash(data.data(), bytes, 1));
    Room copy(bytes, 1);
    CHECK(table->copy_hash(copy.data(), data.data(), bytes, 1, true) == own);
    CHECK(copy.holds(data));
    CHECK(copy.is_guarded());
    CHECK(hash(data, 2) != own);
    for (std::size_t bit = 0; bit < bytes * 8; bit += 37) {
      Bytes changed = data;
      changed[bit / 8] ^= std::byte{static_cast<unsigned char>(1u << (bit % 8))};
      REQUIRE(hash(changed, 1) != own);
    }
    for (const std::size_t apart : {4, 8, 64, 128, 1024, 2048}) {
      Bytes swapped = data;
      std::swap_ranges(swapped.begin() + 400, swapped.begin() + 404,
                       swapped.begin() + 400 + static_cast<std::ptrdiff_t>(apart));
      REQUIRE(swapped != data);
      CHECK(hash(swapped, 1) != own);
    }
    for (std::size_t longer = 1; longer < 130; ++longer) {
      Bytes padded = data;
      padded.resize(bytes + longer);
      REQUIRE(hash(padded, 1) != own);
    }
    const Bytes zeros(64);
    CHECK(hash({}, 1) != hash(Bytes(1), 1));
    CHECK(hash(zeros, 1) != hash(Bytes(128), 1));
  }
}

TEST_CASE("combined hashes know their order and their number") {
  const std::uint64_t forward[] = {1, 2, 3};
  const std::uint64_t swapped[] = {1, 3, 2};
  const std::uint64_t longer[] = {1, 2, 3, 0};
  CHECK(combine_hashes(forward) == combine_hashes(forward));
  CHECK(combine_hashes(forward) != combine_hashes(swapped));
  CHECK(combine_hashes(forward) != combine_hashes(longer));
  CHECK(combine_hashes({}) != combine_hashes(std::span(forward).first(1)));
}

TEST_CASE("an outer step moves theta, velocity and every copy alike in all tables") {
  for (const OuterRule rule : {OuterRule::none, OuterRule::nesterov, OuterRule::heavy_ball}) {
    for (const DType dtype : kFloats) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{33}, std::size_t{2100}, kLong}) {
        const Bytes before = draw(dtype, count, 1);
        const Bytes consensus = draw(dtype, count, 2);
        const Bytes velocity = draw(DType::f32, count, 3);
        const std::size_t size = bytes_of(dtype);
        Bytes theta = consensus;
        Bytes moved = velocity;
        for (std::size_t i = 0; rule != OuterRule::none && i < count; ++i) {
          const double prev = reference::widen(dtype, before.data() + i * size);
          const auto g = static_cast<float>(prev - reference::widen(dtype, consensus.data() + i * size));
          const auto v = static_cast<float>(reference::widen(DType::f32, velocity.data() + i * 4));
          const float next = static_cast<float>(0.9f * v) + g;
          const float direction = rule == OuterRule::nesterov ? g + static_cast<float>(0.9f * next) : next;
          const float step = 0.7f * direction;
          reference::narrow(dtype, reference::rounded(dtype, prev - step), theta.data() + i * size);
          reference::narrow(DType::f32, next, moved.data() + i * 4);
        }
        for (const Kernels* table : available_kernels()) {
          Bytes own_theta = consensus;
          Bytes own_velocity = velocity;
          Room first(theta.size(), 0);
          Room second(theta.size(), size);
          std::byte* const copies[] = {first.data(), second.data()};
          const bool reads = rule != OuterRule::none;
          const std::uint64_t hash = table->outer_step(
              {rule, 0.7f, 0.9f, dtype, reads ? before.data() : nullptr, own_theta.data(),
               reads ? reinterpret_cast<float*>(own_velocity.data()) : nullptr, copies, count, 8, count % 2 == 1});
          CHECK(own_theta == theta);
          CHECK(own_velocity == moved);
          CHECK(first.holds(theta));
          CHECK(second.holds(theta));
          CHECK(second.is_guarded());
          CHECK(hash == reference::hash(theta.data(), theta.size(), 8));
        }
      }
    }
  }
}

TEST_CASE("lr 1 without momentum passes the consensus through") {
  const Bytes before = draw(DType::f32, 777, 1);
  const Bytes consensus = draw(DType::f32, 777, 2);
  for (const Kernels* table : available_kernels()) {
    Bytes theta = consensus;
    std::vector<float> velocity(777, 5.0f);
    table->outer_step(
        {OuterRule::nesterov, 1.0f, 0.0f, DType::f32, before.data(), theta.data(), velocity.data(), {}, 777, 0});
    CHECK(theta == consensus);
    CHECK(velocity[3] == static_cast<float>(reference::widen(DType::f32, before.data() + 12) -
                                            reference::widen(DType::f32, consensus.data() + 12)));
  }
}

TEST_CASE("blends and distances are the reference's in all tables") {
  for (const DType dtype : kFloats) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{33}, kLong}) {
      const std::size_t size = bytes_of(dtype);
      const Bytes w = draw(dtype, count, 1);
      const Bytes theta = draw(dtype, count, 2);
      Bytes snapshot = draw(dtype, count, 3);
      for (std::size_t i = 0; i < count; i += 3) std::memcpy(snapshot.data() + i * size, w.data() + i * size, size);
      Bytes delta = theta;
      Bytes elastic = theta;
      reference::Squares distance(dtype);
      const float alpha = 0.3f;
      const double keep = dtype == DType::f64 ? 1.0 - static_cast<double>(alpha) : 1.0f - alpha;
      for (std::size_t i = 0; i < count; ++i) {
        const double own = reference::widen(dtype, w.data() + i * size);
        const double aim = reference::widen(dtype, theta.data() + i * size);
        const double old = reference::widen(dtype, snapshot.data() + i * size);
        const double moved = reference::rounded(dtype, own - old);
        if (own != old) reference::narrow(dtype, reference::rounded(dtype, aim + moved), delta.data() + i * size);
        const double kept = reference::rounded(dtype, keep * own);
        const double pull = reference::rounded(dtype, static_cast<double>(alpha) * aim);
        reference::narrow(dtype, reference::rounded(dtype, kept + pull), elastic.data() + i * size);
        distance.add(own, aim);
      }
      for (const Kernels* table : available_kernels()) {
        Bytes mine = w;
        table->blend_delta(mine.data(), theta.data(), snapshot.data(), dtype, count);
        CHECK(mine == delta);
        mine = w;
        table->blend_elastic(mine.data(), theta.data(), alpha, dtype, count);
        CHECK(mine == elastic);
        CHECK(bits(table->distance_sq(w.data(), theta.data(), dtype, count)) == bits(distance.total()));
      }
    }
  }
}
