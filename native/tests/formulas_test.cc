// kernels/math.h by itself: conversions over every 16-bit value and every tie, the outer step, the blends.
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "doctest/doctest.h"
#include "kernels/math.h"

using namespace flodl_math;

namespace {

// What the 16 bits mean, by the definition of the format.
double meaning(std::uint32_t half, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(half >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = half & ((1u << fraction_bits) - 1u);
  const double sign = (half & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(1.0 + std::ldexp(fraction, -fraction_bits), exponent - bias);
}

struct Format {
  int exponent_bits;
  int fraction_bits;
  std::uint32_t infinity;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
};

const Format kFormats[] = {
    {8, 7, 0x7f80, [](std::uint16_t h) { return float_of_bf16(h); }, [](float x) { return bf16_of_float(x); }},
    {5, 10, 0x7c00, [](std::uint16_t h) { return float_of_f16(h); }, [](float x) { return f16_of_float(x); }},
};

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

}  // namespace

TEST_CASE("every 16-bit value widens to what it means and narrows back") {
  for (const Format& format : kFormats) {
    int wrong = 0;
    for (std::uint32_t half = 0; half < 65536; ++half) {
      const double expected = meaning(half, format.exponent_bits, format.fraction_bits);
      const float wide = format.widen(static_cast<std::uint16_t>(half));
      const std::uint32_t back = format.narrow(wide);
      if (std::isnan(expected)) {
        wrong += !std::isnan(wide) || (back & 0x7fffu) <= format.infinity || (back & 0x8000u) != (half & 0x8000u);
      } else {
        wrong += wide != expected || std::signbit(wide) != std::signbit(expected) || back != half;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("narrowing goes to the nearest, ties to even, at every step of either format") {
  for (const Format& format : kFormats) {
    int wrong = 0;
    for (std::uint32_t half = 0; half < format.infinity; ++half) {
      const double low = meaning(half, format.exponent_bits, format.fraction_bits);
      // The step above the largest value leads to where the next one would be.
      const double high = half + 1 < format.infinity
                              ? meaning(half + 1, format.exponent_bits, format.fraction_bits)
                              : 2 * low - meaning(half - 1, format.exponent_bits, format.fraction_bits);
      const auto tie = static_cast<float>((low + high) / 2);
      REQUIRE(tie == (low + high) / 2);
      for (const float sign : {1.0f, -1.0f}) {
        const std::uint32_t mark = sign < 0 ? 0x8000u : 0u;
        wrong += format.narrow(sign * tie) != ((half + (half & 1u)) | mark);
        wrong += format.narrow(sign * std::nextafter(tie, 0.0f)) != (half | mark);
        wrong += format.narrow(sign * std::nextafter(tie, HUGE_VALF)) != ((half + 1) | mark);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("what no 16-bit value reaches becomes infinite, what lies under all becomes zero, NaN stays NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Format& format : kFormats) {
    CHECK(format.narrow(infinity) == format.infinity);
    CHECK(format.narrow(-infinity) == (format.infinity | 0x8000u));
    CHECK(format.narrow(std::numeric_limits<float>::max()) == format.infinity);
    CHECK(format.narrow(std::numeric_limits<float>::denorm_min()) == 0);
    CHECK(format.narrow(-std::numeric_limits<float>::denorm_min()) == 0x8000u);
    for (const std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0xffffffffu, 0x7fffffffu}) {
      const std::uint32_t half = format.narrow(std::bit_cast<float>(nan));
      CHECK((half & 0x7fffu) > format.infinity);
      CHECK((half >> 15) == (nan >> 31));
    }
  }
  CHECK(f16_of_float(65519.996f) == 0x7bffu);
  CHECK(f16_of_float(65520.0f) == 0x7c00u);
}

TEST_CASE("a finite exponent is told from an infinite one in every format") {
  for (std::uint32_t half = 0; half < 65536; ++half) {
    const auto h = static_cast<std::uint16_t>(half);
    REQUIRE(is_finite_bf16(h) == std::isfinite(float_of_bf16(h)));
    REQUIRE(is_finite_f16(h) == std::isfinite(float_of_f16(h)));
    REQUIRE(is_finite_float(float_of_bf16(h)) == std::isfinite(float_of_bf16(h)));
  }
}

TEST_CASE("the outer step follows v = mu v + g and theta = theta_prev - lr (g + mu v)") {
  const float g = pseudo_gradient<float>(1.0f, 0.75f);
  CHECK(g == 0.25f);
  const float v = next_velocity(0.5f, 0.5f, g);
  CHECK(v == 0.5f);
  CHECK(nesterov_direction(v, 0.5f, g) == 0.5f);
  CHECK(outer_theta<float>(1.0f, 0.5f, 0.5f) == 0.75f);
  CHECK(outer_theta<double>(1.0 + 0x1p-40, 0.5f, 0.5f) == 0.75 + 0x1p-40);
}

TEST_CASE("multiply and add round apart") {
  // Fused, the product's low bits would survive: the square of 1 + 2^-12 is 1 + 2^-11 + 2^-24.
  const float x = 1.0f + 0x1p-12f;
  CHECK(weighted_next<float>(-1.0f, x, x) == 0x1p-11f);
  CHECK(next_velocity(x, x, -1.0f) == 0x1p-11f);
  CHECK(nesterov_direction(x, x, -1.0f) == 0x1p-11f);
  CHECK(outer_theta<float>(1.0f, x, x) == -0x1p-11f);
  CHECK(elastic_blend<float>(x, 1.0f, -1.0f, x) == 0x1p-11f);
}

TEST_CASE("a delta blend gives theta bit for bit where nothing moved") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(bits(delta_blend<float>(3.0f, -0.0f, 3.0f)) == 0x80000000u);
  CHECK(bits(delta_blend<float>(-0.0f, -0.0f, 0.0f)) == 0x80000000u);
  CHECK(delta_blend<float>(infinity, 2.0f, infinity) == 2.0f);
  CHECK(delta_blend<float>(-infinity, 2.0f, -infinity) == 2.0f);
  CHECK(delta_blend<float>(1.5f, 10.0f, 1.0f) == 10.5f);
  CHECK(std::isnan(delta_blend<float>(std::nanf(""), 2.0f, 1.0f)));
  CHECK(delta_blend<double>(0.1, 0.3, 0.1) == 0.3);
}

TEST_CASE("an elastic blend goes alpha of the way") {
  CHECK(elastic_blend<float>(4.0f, 8.0f, 0.25f, 0.75f) == 5.0f);
  CHECK(elastic_blend<double>(4.0, 8.0, 0.5, 0.5) == 6.0);
}
