// The few operations that compilers do not find by themselves, per instruction set: the hash's 32 x 32 -> 64 bit
// multiply, non-temporal stores, and rows of floats whose loads and stores must stay in the order written. The
// including file chooses one of FLODL_REGISTERS_AVX512, _AVX2, _SSE2, _NEON; without a choice, plain C++. Everything
// has internal linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(FLODL_REGISTERS_AVX512) || defined(FLODL_REGISTERS_AVX2)
#include <immintrin.h>
#elif defined(FLODL_REGISTERS_SSE2)
#include <emmintrin.h>
#elif defined(FLODL_REGISTERS_NEON)
#include <arm_neon.h>
#endif

// Rows of floats are written with the operators of GNU vectors; elsewhere the plain loops do the same, bit for bit.
#if defined(__GNUC__) && (defined(FLODL_REGISTERS_AVX512) || defined(FLODL_REGISTERS_AVX2) || \
                          defined(FLODL_REGISTERS_SSE2) || defined(FLODL_REGISTERS_NEON))
#define FLODL_HAS_FLOAT_ROWS
#endif

namespace flodl::FLODL_VARIANT {
namespace {

#if defined(FLODL_REGISTERS_AVX512)
using Register = __m512i;
inline Register load(const void* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, Register x) { _mm512_storeu_si512(to, x); }
inline Register zero() { return _mm512_setzero_si512(); }
inline Register bit_xor(Register a, Register b) { return _mm512_xor_si512(a, b); }
inline Register add64(Register a, Register b) { return _mm512_add_epi64(a, b); }
inline Register low_times_high(Register x) { return _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)); }
inline void stream(void* to, Register x) { _mm512_stream_si512(static_cast<__m512i*>(to), x); }
inline void fence_streams() { _mm_sfence(); }
using Floats = __m512;
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline void stream_floats(float* to, Floats x) { _mm512_stream_ps(to, x); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
#elif defined(FLODL_REGISTERS_AVX2)
using Register = __m256i;
inline Register load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store(void* to, Register x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
inline Register zero() { return _mm256_setzero_si256(); }
inline Register bit_xor(Register a, Register b) { return _mm256_xor_si256(a, b); }
inline Register add64(Register a, Register b) { return _mm256_add_epi64(a, b); }
inline Register low_times_high(Register x) { return _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)); }
inline void stream(void* to, Register x) { _mm256_stream_si256(static_cast<__m256i*>(to), x); }
inline void fence_streams() { _mm_sfence(); }
using Floats = __m256;
inline Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline void stream_floats(float* to, Floats x) { _mm256_stream_ps(to, x); }
inline Floats splat(float x) { return _mm256_set1_ps(x); }
#elif defined(FLODL_REGISTERS_SSE2)
using Register = __m128i;
inline Register load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void store(void* to, Register x) { _mm_storeu_si128(static_cast<__m128i*>(to), x); }
inline Register zero() { return _mm_setzero_si128(); }
inline Register bit_xor(Register a, Register b) { return _mm_xor_si128(a, b); }
inline Register add64(Register a, Register b) { return _mm_add_epi64(a, b); }
inline Register low_times_high(Register x) { return _mm_mul_epu32(x, _mm_srli_epi64(x, 32)); }
inline void stream(void* to, Register x) { _mm_stream_si128(static_cast<__m128i*>(to), x); }
inline void fence_streams() { _mm_sfence(); }
using Floats = __m128;
inline Floats load_floats(const float* from) { return _mm_loadu_ps(from); }
inline void store_floats(float* to, Floats x) { _mm_storeu_ps(to, x); }
inline void stream_floats(float* to, Floats x) { _mm_stream_ps(to, x); }
inline Floats splat(float x) { return _mm_set1_ps(x); }
#elif defined(FLODL_REGISTERS_NEON)
using Register = uint64x2_t;
inline Register load(const void* from) { return vreinterpretq_u64_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }
inline void store(void* to, Register x) { vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_u64(x)); }
inline Register zero() { return vdupq_n_u64(0); }
inline Register bit_xor(Register a, Register b) { return veorq_u64(a, b); }
inline Register add64(Register a, Register b) { return vaddq_u64(a, b); }
inline Register low_times_high(Register x) { return vmull_u32(vmovn_u64(x), vshrn_n_u64(x, 32)); }
using Floats = float32x4_t;
inline Floats load_floats(const float* from) { return vld1q_f32(from); }
inline void store_floats(float* to, Floats x) { vst1q_f32(to, x); }
inline void stream_floats(float* to, Floats x) { vst1q_f32(to, x); }
inline Floats splat(float x) { return vdupq_n_f32(x); }
#else
using Register = uint64_t;
inline Register load(const void* from) {
  uint64_t x;
  memcpy(&x, from, sizeof x);
  return x;
}
inline void store(void* to, Register x) { memcpy(to, &x, sizeof x); }
inline Register zero() { return 0; }
inline Register bit_xor(Register a, Register b) { return a ^ b; }
inline Register add64(Register a, Register b) { return a + b; }
inline Register low_times_high(Register x) { return (x & 0xffffffffu) * (x >> 32); }
#endif

#if !defined(FLODL_REGISTERS_AVX512) && !defined(FLODL_REGISTERS_AVX2) && !defined(FLODL_REGISTERS_SSE2)
// No non-temporal store that is worth its name here: ordinary stores.
inline void stream(void* to, Register x) { store(to, x); }
inline void fence_streams() {}
#endif

// to = from, past the caches where `to` is aligned enough. The caller ends its pass with fence_streams().
inline void stream_copy(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  size_t head = (sizeof(Register) - reinterpret_cast<uintptr_t>(out) % sizeof(Register)) % sizeof(Register);
  if (head > bytes) head = bytes;
  memcpy(out, in, head);
  size_t at = head;
  for (; at + sizeof(Register) <= bytes; at += sizeof(Register)) stream(out + at, load(in + at));
  memcpy(out + at, in + at, bytes - at);
}

}  // namespace
}  // namespace flodl::FLODL_VARIANT
