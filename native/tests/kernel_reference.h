// The kernels once more, slowly: one element at a time, from the words of flodl/kernels.h and kernels/blocks.h.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "flodl/kernels.h"
#include "kernels/math.h"

namespace flodl::reference {

using Bytes = std::vector<std::byte>;

inline double widen(DType dtype, const std::byte* at) {
  if (dtype == DType::f64) {
    double x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  if (dtype == DType::f32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  std::uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return dtype == DType::bf16 ? flodl_math::float_of_bf16(half) : flodl_math::float_of_f16(half);
}

// `value` is exactly an fp32 unless dtype is f64.
inline void narrow(DType dtype, double value, std::byte* at) {
  const auto single = static_cast<float>(value);
  std::uint16_t half = 0;
  switch (dtype) {
    case DType::f64:
      std::memcpy(at, &value, sizeof value);
      return;
    case DType::f32:
      std::memcpy(at, &single, sizeof single);
      return;
    case DType::bf16:
      half = flodl_math::bf16_of_float(single);
      break;
    default:
      half = flodl_math::f16_of_float(single);
      break;
  }
  std::memcpy(at, &half, sizeof half);
}

// Rounds the way that the accumulator of `dtype` does.
inline double rounded(DType dtype, double exact) { return dtype == DType::f64 ? exact : static_cast<float>(exact); }

template <typename Real>
class SquaresOf {
 public:
  void add(Real a, Real b) {
    const Real difference = a - b;
    push(difference * difference);
  }
  double total() {
    while (seen_ % 512 != 0) push(0);
    double sum = 0.0;
    for (const double lane : totals_) sum += lane;
    return sum;
  }

 private:
  void push(Real term) {
    rows_[seen_ % 16] += term;
    ++seen_;
    if (seen_ % 128 == 0) {
      for (std::size_t l = 0; l < 16; ++l) lanes_[l] += rows_[l];
      rows_ = {};
    }
    if (seen_ % 512 == 0) {
      for (std::size_t l = 0; l < 16; ++l) totals_[l] += static_cast<double>(lanes_[l]);
      lanes_ = {};
    }
  }

  std::size_t seen_ = 0;
  std::array<Real, 16> rows_{};
  std::array<Real, 16> lanes_{};
  std::array<double, 16> totals_{};
};

// sum (a - b)^2 in the precision that `dtype` accumulates in.
class Squares {
 public:
  explicit Squares(DType dtype) : is_double_(dtype == DType::f64) {}

  void add(double a, double b) {
    if (is_double_) {
      wide_.add(a, b);
    } else {
      single_.add(static_cast<float>(a), static_cast<float>(b));
    }
  }
  double total() { return is_double_ ? wide_.total() : single_.total(); }

 private:
  bool is_double_;
  SquaresOf<float> single_;
  SquaresOf<double> wide_;
};

inline std::uint64_t hash(const std::byte* data, std::size_t bytes, std::uint64_t chunk) {
  using namespace flodl_math;
  const std::uint64_t seed = hash_seed(chunk, bytes);
  Bytes filled(data, data + bytes);
  filled.resize((bytes + kHashUnitBytes - 1) / kHashUnitBytes * kHashUnitBytes);
  std::array<std::uint64_t, 8> lane{}, sum{}, product{};
  for (std::uint32_t i = 0; i < 8; ++i) lane[i] = hash_first_lane(seed, i);
  for (std::size_t word = 0; word < filled.size() / 8; ++word) {
    const auto i = static_cast<std::uint32_t>(word % 8);
    std::uint64_t x;
    std::memcpy(&x, filled.data() + word * 8, 8);
    x ^= hash_first_key(seed, i) + word / 8 * hash_key_step(i);
    sum[i] += x;
    product[i] += (x & 0xffffffffu) * (x >> 32);
    if ((word + 1) % (kHashUnitBytes / 8) != 0) continue;
    for (std::size_t l = 0; l < 8; ++l) lane[l] = hash_absorb(lane[l], sum[l], product[l]);
    sum = {};
    product = {};
  }
  std::uint64_t folded = seed;
  for (const std::uint64_t l : lane) folded = hash_fold(folded, l);
  return folded;
}

struct Sum {
  Bytes out;
  std::vector<double> distance_sq;
  double norm_sq = 0.0;
  std::uint64_t hash = 0;
};

inline Sum weighted_sum(const WeightedSum& given) {
  const std::size_t in_bytes = bytes_of(given.dtype);
  const std::size_t out_bytes = bytes_of(given.out_dtype);
  Sum result;
  result.out.resize(given.count * out_bytes);
  std::vector<Squares> distances(given.inputs.size(), Squares(given.dtype));
  Squares norm(given.dtype);
  for (std::size_t i = 0; i < given.count; ++i) {
    double sum = widen(given.dtype, given.inputs[0] + i * in_bytes);
    if (given.inputs.size() > 1) sum = rounded(given.dtype, given.weights[0] * sum);
    for (std::size_t k = 1; k < given.inputs.size(); ++k) {
      const double x = widen(given.dtype, given.inputs[k] + i * in_bytes);
      sum = rounded(given.dtype, sum + rounded(given.dtype, given.weights[k] * x));
    }
    narrow(given.out_dtype, sum, result.out.data() + i * out_bytes);
    const double out = widen(given.out_dtype, result.out.data() + i * out_bytes);
    norm.add(out, 0.0);
    for (std::size_t k = 0; k < given.inputs.size(); ++k) {
      distances[k].add(widen(given.dtype, given.inputs[k] + i * in_bytes), out);
    }
  }
  for (Squares& distance : distances) result.distance_sq.push_back(distance.total());
  result.norm_sq = norm.total();
  result.hash = hash(result.out.data(), result.out.size(), given.chunk);
  return result;
}

// Finite values over many exponents, subnormals and both zeros among them; the same for the same seed.
inline Bytes draw(DType dtype, std::size_t count, std::uint64_t seed) {
  Bytes drawn(count * bytes_of(dtype));
  std::uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto mantissa = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
    const float scale = std::bit_cast<float>(static_cast<std::uint32_t>(103u + (state >> 20) % 28u) << 23);
    const float value = (state >> 12) % 61 == 0 ? mantissa * 0.0f : mantissa * scale;
    const double exact = dtype == DType::f64 ? value * 1.0000000123 : value;
    narrow(dtype, exact, drawn.data() + i * bytes_of(dtype));
  }
  return drawn;
}

}  // namespace flodl::reference
