// Every formula of the averaging plane, once: functions from values to values.
//
// Written in the common subset of C++, CUDA, HIP and Metal (no pointers, no std::, no double in fp32 formulas, no
// exceptions), so that the loops of each device wrap the same text. Compile with contraction off: multiply and add
// round apart, and results are then bit-equal on every device. Bits of a NaN result are not promised, only that it
// is a NaN: devices differ in payload and sign.
#pragma once

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
#define FLODL_FN inline
#define FLODL_CONST constant
#define FLODL_BITS_OF_FLOAT(x) as_type<uint>(x)
#define FLODL_FLOAT_OF_BITS(x) as_type<float>(x)
using namespace metal;
#else
#include <stdint.h>
#if defined(__CUDACC__) || defined(__HIPCC__)
#define FLODL_FN static __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define FLODL_FN static __forceinline
#else
// Internal linkage, so that no instruction set's copy can stand in for another's; unused ones raise no warning.
#define FLODL_FN [[maybe_unused]] static inline __attribute__((always_inline))
#endif
#define FLODL_CONST constexpr
#define FLODL_BITS_OF_FLOAT(x) __builtin_bit_cast(uint32_t, x)
#define FLODL_FLOAT_OF_BITS(x) __builtin_bit_cast(float, x)
#endif

namespace flodl_math {

// ---- bf16 and fp16, held as their bits ----

FLODL_FN float float_of_bf16(uint16_t half) { return FLODL_FLOAT_OF_BITS(static_cast<uint32_t>(half) << 16); }

// To nearest, ties to even. A NaN stays a NaN (quiet) with its sign.
FLODL_FN uint16_t bf16_of_float(float value) {
  const uint32_t bits = FLODL_BITS_OF_FLOAT(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

FLODL_FN float float_of_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // The exponent moves by 112; all ones (inf, NaN) move by 224 to stay all ones.
  const uint32_t shift = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t normal = (magnitude << 13) + shift;
  // Below 2^-14 the value is a count of 2^-24, exact in fp32.
  const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f;
  const uint32_t bits = magnitude < 0x400u ? FLODL_BITS_OF_FLOAT(tiny) : normal;
  return FLODL_FLOAT_OF_BITS(bits | sign);
}

// To nearest, ties to even; 65520 and above become infinite. A NaN stays a NaN (quiet) with its sign.
FLODL_FN uint16_t f16_of_float(float value) {
  const uint32_t bits = FLODL_BITS_OF_FLOAT(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - 0x1c000u;
  // One half has an ulp of 2^-24, the step of fp16 subnormals: this addition does the rounding.
  const float shifted = FLODL_FLOAT_OF_BITS(magnitude) + 0.5f;
  const uint32_t tiny = FLODL_BITS_OF_FLOAT(shifted) - 0x3f000000u;
  const uint32_t quiet = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? tiny : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? quiet : half;
  return static_cast<uint16_t>(half | sign);
}

// ---- the weighted mean; Real is float, or double for f64 tensors ----

template <typename Real>
FLODL_FN Real weighted_first(Real weight, Real x) {
  return weight * x;
}
template <typename Real>
FLODL_FN Real weighted_next(Real sum, Real weight, Real x) {
  const Real product = weight * x;
  return sum + product;
}

template <typename Real>
FLODL_FN Real squared_difference(Real a, Real b) {
  const Real difference = a - b;
  return difference * difference;
}

// ---- the outer step; the velocity is fp32 whatever the tensor ----

template <typename Real>
FLODL_FN float pseudo_gradient(Real theta_prev, Real consensus) {
  return static_cast<float>(theta_prev - consensus);
}
FLODL_FN float next_velocity(float velocity, float momentum, float gradient) {
  const float kept = momentum * velocity;
  return kept + gradient;
}
// What theta_prev loses, before the learning rate; `velocity` is the new one. SlowMo loses `velocity` itself.
FLODL_FN float nesterov_direction(float velocity, float momentum, float gradient) {
  const float ahead = momentum * velocity;
  return gradient + ahead;
}
template <typename Real>
FLODL_FN Real outer_theta(Real theta_prev, float lr, float direction) {
  const float step = lr * direction;
  return theta_prev - static_cast<Real>(step);
}

// ---- blends ----

// theta + (w - snapshot); theta itself where nothing moved (-0.0 counts as 0.0, and equal infinities do not cancel).
template <typename Real>
FLODL_FN Real delta_blend(Real w, Real theta, Real snapshot) {
  const Real moved = w - snapshot;
  const Real sum = theta + moved;
  return w == snapshot ? theta : sum;
}

// keep = 1 - alpha, rounded once by the caller.
template <typename Real>
FLODL_FN Real elastic_blend(Real w, Real theta, Real alpha, Real keep) {
  const Real own = keep * w;
  const Real pull = alpha * theta;
  return own + pull;
}

// ---- finite: the exponent is not all ones ----

FLODL_FN bool is_finite_float(float value) { return (FLODL_BITS_OF_FLOAT(value) & 0x7f800000u) != 0x7f800000u; }
FLODL_FN bool is_finite_bf16(uint16_t half) { return (half & 0x7f80u) != 0x7f80u; }
FLODL_FN bool is_finite_f16(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

// ---- the hash ----
// Bytes fall into units of 1024 (the last one filled up with zeros; the length is in the seed), a unit into 16 stripes
// of eight little-endian 64-bit words. Word i of stripe n meets key_i(n) = key_i(0) + n step_i, n counted from the
// start of the chunk: x = word ^ key; sum_i += x; product_i += low32(x) * high32(x). After each unit every lane absorbs
// both: lane = (lane ^ sum) * kHashOdd; lane ^= lane >> 29; lane += product. At the end the lanes are folded in order.

FLODL_CONST uint32_t kHashUnitBytes = 1024;
FLODL_CONST uint32_t kHashStripeBytes = 64;
// Fractions of square roots (2, 3, 5, 7, 11) and of the golden ratio, made odd.
FLODL_CONST uint64_t kHashGolden = 0x9e3779b97f4a7c15u;
FLODL_CONST uint64_t kHashOdd = 0xbb67ae8584caa73bu;
FLODL_CONST uint64_t kHashFirst = 0x6a09e667f3bcc909u;
FLODL_CONST uint64_t kHashSecond = 0x3c6ef372fe94f82bu;
FLODL_CONST uint64_t kHashThird = 0xa54ff53a5f1d36f1u;
FLODL_CONST uint64_t kHashFourth = 0x510e527fade682d1u;

// A bijection in which every bit of the input moves every bit of the output.
FLODL_FN uint64_t hash_mix(uint64_t x) {
  x ^= x >> 32;
  x *= kHashFirst;
  x ^= x >> 29;
  x *= kHashThird;
  x ^= x >> 32;
  return x;
}

FLODL_FN uint64_t hash_seed(uint64_t chunk, uint64_t bytes) {
  return hash_mix(hash_mix(chunk + kHashGolden) ^ (bytes * kHashFourth));
}
FLODL_FN uint64_t hash_first_lane(uint64_t seed, uint32_t lane) { return hash_mix(seed + (lane + 1u) * kHashGolden); }
FLODL_FN uint64_t hash_first_key(uint64_t seed, uint32_t lane) { return hash_mix(~seed + (lane + 1u) * kHashSecond); }
FLODL_FN uint64_t hash_key_step(uint32_t lane) { return hash_mix((lane + 1u) * kHashFourth) | 1u; }
FLODL_FN uint64_t hash_absorb(uint64_t lane, uint64_t sum, uint64_t product) {
  lane = (lane ^ sum) * kHashOdd;
  lane ^= lane >> 29;
  return lane + product;
}
// Folds the next lane, or the next chunk's hash, into what came before it.
FLODL_FN uint64_t hash_fold(uint64_t before, uint64_t next) { return hash_mix(before * kHashOdd + next); }

}  // namespace flodl_math
