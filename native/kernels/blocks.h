// Blocks of 512 elements: what a loop does with one block while it lies in the first-level cache.
//
// A reduction adds fp32 terms (f64 for f64 tensors) in a fixed shape: a block is rows of 16 lanes, eight rows are a
// group. In each lane a group adds its rows in order, from zero; groups add up in order; lanes add up in double, block
// after block, and at the end in lane order. A short last block counts as filled up with terms of zero. The shape is
// part of the formula: every instruction set gives the same bits. A block of 512 keeps the pauses between reads from
// memory short enough for the hardware's prefetchers to work through them.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/math.h"
#include "kernels/registers.h"

#if defined(_MSC_VER)
#define FLODL_RESTRICT __restrict
#else
#define FLODL_RESTRICT __restrict__
#endif

namespace flodl::FLODL_VARIANT {
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kLanes = 16;
constexpr size_t kGroup = 8 * kLanes;

struct F32 {
  using Storage = float;
  using Wide = float;
  static Wide widen(Storage x) { return x; }
  static Storage narrow(Wide x) { return x; }
  static bool is_finite(Storage x) { return flodl_math::is_finite_float(x); }
};
struct Bf16 {
  using Storage = uint16_t;
  using Wide = float;
  static Wide widen(Storage x) { return flodl_math::float_of_bf16(x); }
  static Storage narrow(Wide x) { return flodl_math::bf16_of_float(x); }
  static bool is_finite(Storage x) { return flodl_math::is_finite_bf16(x); }
};
struct F16 {
  using Storage = uint16_t;
  using Wide = float;
  static Wide widen(Storage x) { return flodl_math::float_of_f16(x); }
  static Storage narrow(Wide x) { return flodl_math::f16_of_float(x); }
  static bool is_finite(Storage x) { return flodl_math::is_finite_f16(x); }
};
struct F64 {
  using Storage = double;
  using Wide = double;
  static Wide widen(Storage x) { return x; }
  static Storage narrow(Wide x) { return x; }
  static bool is_finite(Storage x) {
    return (__builtin_bit_cast(uint64_t, x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
  }
};

// ---- reductions ----

struct Totals {
  alignas(64) double lane[kLanes];

  void clear() {
    for (size_t l = 0; l < kLanes; ++l) lane[l] = 0.0;
  }
  template <typename Wide>
  void add(const Wide (&block)[kLanes]) {
    for (size_t l = 0; l < kLanes; ++l) lane[l] += static_cast<double>(block[l]);
  }
  double sum() const {
    double total = 0.0;
    for (size_t l = 0; l < kLanes; ++l) total += lane[l];
    return total;
  }
};

// Adds term(0..kBlock-1) to the totals.
template <typename Wide, typename Term>
void reduce_block(Totals& totals, const Term& term) {
  alignas(64) Wide lane[kLanes];
  for (size_t l = 0; l < kLanes; ++l) lane[l] = 0;
  for (size_t first = 0; first < kBlock; first += kGroup) {
    for (size_t l = 0; l < kLanes; ++l) {
      Wide sum = 0;
      sum += term(first + l);
      sum += term(first + l + kLanes);
      sum += term(first + l + 2 * kLanes);
      sum += term(first + l + 3 * kLanes);
      sum += term(first + l + 4 * kLanes);
      sum += term(first + l + 5 * kLanes);
      sum += term(first + l + 6 * kLanes);
      sum += term(first + l + 7 * kLanes);
      lane[l] += sum;
    }
  }
  totals.add(lane);
}

template <typename Wide>
void reduce_norm(Totals& totals, const Wide* FLODL_RESTRICT x) {
  reduce_block<Wide>(totals, [x](size_t i) { return x[i] * x[i]; });
}

template <typename D>
void reduce_storage_norm(Totals& totals, const typename D::Storage* FLODL_RESTRICT x) {
  using Wide = typename D::Wide;
  reduce_block<Wide>(totals, [x](size_t i) {
    const Wide wide = D::widen(x[i]);
    return wide * wide;
  });
}

template <typename D>
void reduce_distance(Totals& totals, const typename D::Storage* FLODL_RESTRICT x,
                     const typename D::Wide* FLODL_RESTRICT centre) {
  using Wide = typename D::Wide;
  reduce_block<Wide>(totals,
                     [x, centre](size_t i) { return flodl_math::squared_difference<Wide>(D::widen(x[i]), centre[i]); });
}

template <typename D>
bool scan_finite(const typename D::Storage* x, size_t count) {
  unsigned bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= D::is_finite(x[i]) ? 0u : 1u;
  return bad == 0;
}

// A sum of squares (of x, or of x less something) that is finite proves every x finite; one that is not may have
// overflowed, and the bits decide.
template <typename D>
bool is_all_finite(double sum_of_squares, const typename D::Storage* x, size_t count) {
  return F64::is_finite(sum_of_squares) || scan_finite<D>(x, count);
}

// ---- the hash, see math.h ----

constexpr size_t kWords = 8;
constexpr size_t kPartBytes = flodl_math::kHashUnitBytes / 2;
constexpr size_t kRegisterWords = sizeof(Register) / sizeof(uint64_t);

class Hash {
 public:
  Hash(uint64_t chunk, uint64_t bytes) : seed_(flodl_math::hash_seed(chunk, bytes)) {
    for (uint32_t i = 0; i < kWords; ++i) {
      lane_[i] = flodl_math::hash_first_lane(seed_, i);
      key_[i] = flodl_math::hash_first_key(seed_, i);
      step_[i] = flodl_math::hash_key_step(i);
    }
  }

  // Takes in the next bytes: whole parts, but for the last call of a chunk.
  void update(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (; bytes >= kPartBytes; bytes -= kPartBytes) {
      update_part(at);
      at += kPartBytes;
    }
    if (bytes == 0) return;
    alignas(64) unsigned char filled[kPartBytes];
    memcpy(filled, at, bytes);
    memset(filled + bytes, 0, sizeof filled - bytes);
    update_part(filled);
  }

  // One register's width of the stripes of a part.
  struct Running {
    Register key;
    Register step;
    Register sum;
    Register product;

    void take(Register words) {
      const Register x = bit_xor(words, key);
      key = add64(key, step);
      sum = add64(sum, x);
      product = add64(product, low_times_high(x));
    }
  };
  // At the start of a part; `first` is the word within the stripe.
  Running running(size_t first) const {
    return {load(key_ + first), load(step_ + first), load(sum_ + first), load(product_ + first)};
  }
  // The running words, which are a whole stripe wide, have taken in a part; they may go on with the next one.
  void end_part(Running& words) {
    keep(words, 0);
    end_part();
    words.sum = load(sum_);
    words.product = load(product_);
  }

  // Half a unit, small enough to stand between two groups of loads from memory.
  void update_part(const void* part) {
    const auto* words = static_cast<const unsigned char*>(part);
    for (size_t first = 0; first < kWords; first += kRegisterWords) {
      Running words_here = running(first);
      const unsigned char* at = words + first * sizeof(uint64_t);
      for (size_t n = 0; n < kPartBytes; n += flodl_math::kHashStripeBytes) words_here.take(load(at + n));
      keep(words_here, first);
    }
    end_part();
  }

  uint64_t finish() {
    if (!ends_unit_) {
      alignas(64) const unsigned char zeros[kPartBytes] = {};
      update_part(zeros);
    }
    uint64_t folded = seed_;
    for (size_t i = 0; i < kWords; ++i) folded = flodl_math::hash_fold(folded, lane_[i]);
    return folded;
  }

 private:
  void keep(const Running& words, size_t first) {
    store(key_ + first, words.key);
    store(sum_ + first, words.sum);
    store(product_ + first, words.product);
  }
  void end_part() {
    ends_unit_ = !ends_unit_;
    if (ends_unit_) absorb();
  }
  void absorb() {
    for (size_t i = 0; i < kWords; ++i) lane_[i] = flodl_math::hash_absorb(lane_[i], sum_[i], product_[i]);
    for (size_t i = 0; i < kWords; ++i) sum_[i] = product_[i] = 0;
  }

  uint64_t seed_;
  alignas(64) uint64_t lane_[kWords];
  alignas(64) uint64_t key_[kWords];
  alignas(64) uint64_t step_[kWords];
  alignas(64) uint64_t sum_[kWords] = {};
  alignas(64) uint64_t product_[kWords] = {};
  bool ends_unit_ = true;
};

// ---- memory ----

inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

inline void copy_out(void* to, const void* from, size_t bytes, bool streams) {
  if (streams) {
    stream_copy(to, from, bytes);
  } else {
    memcpy(to, from, bytes);
  }
}

// Hashes and copies, in parts: long bursts of stores would hold up the loads behind them.
inline void hash_and_copy(Hash& hash, void* to, const void* from, size_t bytes, bool streams) {
  for (size_t at = 0; at < bytes; at += kPartBytes) {
    const size_t part = smaller(kPartBytes, bytes - at);
    const auto* source = static_cast<const unsigned char*>(from) + at;
    hash.update(source, part);
    if (to != nullptr) copy_out(static_cast<unsigned char*>(to) + at, source, part, streams);
  }
}

// The block itself, or a copy in `room` filled up with zeros where fewer than kBlock elements are left.
template <typename Storage>
const Storage* whole_block(const Storage* block, size_t count, Storage* room) {
  if (count == kBlock) return block;
  memcpy(room, block, count * sizeof(Storage));
  memset(room + count, 0, (kBlock - count) * sizeof(Storage));
  return room;
}

}  // namespace
}  // namespace flodl::FLODL_VARIANT
