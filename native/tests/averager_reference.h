// What an average should be: layouts, contents and a plain reference, one value at a time in the order given.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "averager/chunks.h"
#include "flodl/host_memory.h"

namespace flodl::test {

using Image = std::vector<std::byte>;

// ---- values ----

template <typename T>
T get(const std::byte* from, std::size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
inline void put(std::byte* to, std::size_t index, T value) {
  std::memcpy(to + index * sizeof(T), &value, sizeof(T));
}

// Halves by arithmetic instead of bits: the nearest multiple of the value's quantum, ties to even.
struct Half {
  int mantissa_bits;
  int lowest_exponent;
  int bias;
};
inline constexpr Half kBf16{7, -126, 127};
inline constexpr Half kF16{10, -14, 15};

inline double widen(const Half& half, std::uint16_t bits) {
  const int mantissa = bits & ((1 << half.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> half.mantissa_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 2 * half.bias + 1) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, half.lowest_exponent - half.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << half.mantissa_bits), exponent - half.bias - half.mantissa_bits);
}

inline std::uint16_t narrow(const Half& half, double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int all_ones = (2 * half.bias + 1) << half.mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | all_ones | (1 << (half.mantissa_bits - 1)));
  const double size = std::fabs(value);
  if (size == 0.0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::isinf(value) ? half.bias + 1 : std::max(std::ilogb(size), half.lowest_exponent);
  if (exponent > half.bias) return static_cast<std::uint16_t>(sign | all_ones);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, half.mantissa_bits - exponent)));
  // The hidden bit and a carry both land in the exponent field by themselves.
  const int field = ((exponent - half.lowest_exponent) << half.mantissa_bits) + steps;
  return static_cast<std::uint16_t>(sign | std::min(field, all_ones));
}

inline double load(const std::byte* from, DType dtype, std::size_t index) {
  switch (dtype) {
    case DType::f32:
      return get<float>(from, index);
    case DType::f64:
      return get<double>(from, index);
    case DType::bf16:
      return widen(kBf16, get<std::uint16_t>(from, index));
    case DType::f16:
      return widen(kF16, get<std::uint16_t>(from, index));
    case DType::i64:
      return static_cast<double>(get<std::int64_t>(from, index));
    case DType::i32:
      return get<std::int32_t>(from, index);
    case DType::i16:
      return get<std::int16_t>(from, index);
    case DType::i8:
      return get<std::int8_t>(from, index);
    default:
      return get<std::uint8_t>(from, index);
  }
}

inline void store(std::byte* to, DType dtype, std::size_t index, double value) {
  switch (dtype) {
    case DType::f32:
      return put(to, index, static_cast<float>(value));
    case DType::f64:
      return put(to, index, value);
    case DType::bf16:
      return put(to, index, narrow(kBf16, value));
    case DType::f16:
      return put(to, index, narrow(kF16, value));
    case DType::i64:
      return put(to, index, static_cast<std::int64_t>(value));
    case DType::i32:
      return put(to, index, static_cast<std::int32_t>(value));
    case DType::i16:
      return put(to, index, static_cast<std::int16_t>(value));
    case DType::i8:
      return put(to, index, static_cast<std::int8_t>(value));
    default:
      return put(to, index, static_cast<std::uint8_t>(value));
  }
}

// ---- layouts and contents ----

inline Layout parameters_only(std::uint64_t count) {
  return {.bytes = (count * 4 + 63) / 64 * 64, .sections = {{Rule::parameter, DType::f32, 0, count, 0}}};
}

// Every rule and dtype, with gaps, one section longer than a chunk.
inline Layout mixed() {
  Layout layout;
  const auto add = [&](Rule rule, DType dtype, std::uint64_t count, std::uint64_t mean = 0) {
    layout.sections.push_back({rule, dtype, layout.bytes, count, mean});
    layout.bytes += (count * bytes_of(dtype) + 63) / 64 * 64 + 64;
    return layout.sections.back().offset;
  };
  add(Rule::parameter, DType::f32, 300'001);
  add(Rule::parameter, DType::bf16, 600'003);
  add(Rule::parameter, DType::f16, 1'001);
  add(Rule::parameter, DType::f64, 131'073);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    const std::uint64_t count = dtype == DType::f64 ? 131'100 : 500;  // longer than a chunk, and shorter
    const std::uint64_t mean = add(Rule::buffer, dtype, count + 17, 0);
    add(Rule::pooled_var, dtype, count, mean + 16 * bytes_of(dtype));
  }
  for (const DType dtype : {DType::i64, DType::i32, DType::i16, DType::i8, DType::u8, DType::boolean}) {
    add(Rule::largest, dtype, 77);
  }
  return layout;
}

// A number in [0, 1) that depends on everything that is given.
inline double noise(std::uint64_t seed, std::uint64_t section, std::uint64_t index) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + section * 0xd1b54a32d192ed03u + index + 1;
  for (int i = 0; i < 3; ++i) x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

inline double value_of(const Section& section, double random) {
  switch (section.rule) {
    case Rule::parameter:
      return 2.0 * random - 1.0;
    case Rule::buffer:
      return 8.0 * random - 2.0;
    case Rule::pooled_var:
      return random < 0.25 ? 0.0 : random;
    case Rule::largest:
      break;
  }
  if (section.dtype == DType::boolean) return random < 0.3 ? 1.0 : 0.0;
  return std::floor((section.dtype == DType::u8 ? 200.0 : 100.0) * random) - (section.dtype == DType::u8 ? 0.0 : 50.0);
}

// Writes an image's sections; everything in between stays as it is.
inline void fill(std::byte* image, const Layout& layout, std::uint64_t seed) {
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const Section& section = layout.sections[s];
    for (std::uint64_t i = 0; i < section.count; ++i) {
      store(image + section.offset, section.dtype, i, value_of(section, noise(seed, s, i)));
    }
  }
}

inline Image filled(const Layout& layout, std::uint64_t seed) {
  Image image(layout.bytes);
  fill(image.data(), layout, seed);
  return image;
}

// ---- the reference: one value at a time, in the order of the contributions ----

struct Part {
  const Image* image;
  float weight;
  float buffer_weight;
};

template <typename Value>
inline double mean_of(const std::vector<Part>& parts, const Section& section, std::uint64_t i) {
  Value sum{};
  for (std::size_t k = 0; k < parts.size(); ++k) {
    const Value weight = section.rule == Rule::parameter ? parts[k].weight : parts[k].buffer_weight;
    const Value product = weight * static_cast<Value>(load(parts[k].image->data() + section.offset, section.dtype, i));
    sum = k == 0 ? product : sum + product;
  }
  return sum;
}

template <typename Value>
inline double pooled_of(const std::vector<Part>& parts, const Section& section, std::uint64_t i) {
  Value moment{};
  Value mean{};
  for (std::size_t k = 0; k < parts.size(); ++k) {
    const std::byte* image = parts[k].image->data();
    const Value weight = parts[k].buffer_weight;
    const auto own_mean = static_cast<Value>(load(image + section.mean_offset, section.dtype, i));
    const Value square = own_mean * own_mean;
    const Value own = static_cast<Value>(load(image + section.offset, section.dtype, i)) + square;
    const Value moment_part = weight * own;
    const Value mean_part = weight * own_mean;
    moment = k == 0 ? moment_part : moment + moment_part;
    mean = k == 0 ? mean_part : mean + mean_part;
  }
  const Value square = mean * mean;
  return std::max<Value>(moment - square, 0);
}

inline double largest_of(const std::vector<Part>& parts, const Section& section, std::uint64_t i) {
  double most = -1e300;
  for (const Part& part : parts) most = std::max(most, load(part.image->data() + section.offset, section.dtype, i));
  return most;
}

inline double average_of(const std::vector<Part>& parts, const Section& section, std::uint64_t i) {
  if (section.rule == Rule::largest) return largest_of(parts, section, i);
  const bool is_wide = section.dtype == DType::f64;
  if (section.rule == Rule::pooled_var) {
    return is_wide ? pooled_of<double>(parts, section, i) : pooled_of<float>(parts, section, i);
  }
  return is_wide ? mean_of<double>(parts, section, i) : mean_of<float>(parts, section, i);
}

inline Image average(const Layout& layout, const std::vector<Part>& parts) {
  if (parts.size() == 1) return *parts[0].image;
  Image out(layout.bytes);
  for (const Section& section : layout.sections) {
    for (std::uint64_t i = 0; i < section.count; ++i) {
      store(out.data() + section.offset, section.dtype, i, average_of(parts, section, i));
    }
  }
  return out;
}

// theta: in the consensus, out the new theta. Parameters of f32 only.
inline void step(const OuterSettings& outer, const Image& theta_prev, Image& theta, std::vector<float>& velocity) {
  for (std::size_t i = 0; i < velocity.size(); ++i) {
    const float before = get<float>(theta_prev.data(), i);
    const float gradient = before - get<float>(theta.data(), i);
    const float kept = outer.momentum * velocity[i];
    velocity[i] = kept + gradient;
    const float ahead = outer.momentum * velocity[i];
    const float direction = outer.rule == OuterRule::nesterov ? gradient + ahead : velocity[i];
    const float move = outer.lr * direction;
    put(theta.data(), i, before - move);
  }
}

inline std::uint64_t hash_of(const Layout& layout, const Image& image) {
  return copy_sections(*kernels().value(), layout, nullptr, image.data(), false);
}

}  // namespace flodl::test
