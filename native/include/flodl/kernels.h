// The averaging kernels: loops around kernels/math.h, one table per instruction set, chosen once.
//
// Element-wise results are bit-equal across tables (no contraction, no fma, fixed order of inputs).
// Reductions (norms, hash) are bit-equal across tables too: lanes and their order are part of the formula; squares are
// taken in fp32 (f64 for f64), so they overflow beyond 1.8e19. Of a NaN only that it is one is promised, not its bits.
// The hash is one function of (bytes, length, chunk), whichever kernel took it.
// Callers cut work into chunks of kChunkBytes counted from the start of the layout and combine in chunk
// order, so that no result depends on threads or on who took which chunk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "flodl/layout.h"

namespace flodl {

inline constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxInputs = 256;

// out[i] = narrow(acc), acc = p_0 x_0[i], then acc = acc + p_k x_k[i]; multiply and add rounded apart.
// Accumulates in fp32 (f64 for f64). One input has p = 1 exactly and is copied bit for bit, whatever weights[0] says.
struct WeightedSum {
  std::span<const std::byte* const> inputs;  // 1..kMaxInputs, each `count` elements of `dtype`
  std::span<const float> weights;            // p_k, one per input
  DType dtype;                               // f32, bf16, f16, f64
  std::byte* out;                            // `count` elements of `out_dtype`; may not alias an input
  DType out_dtype;                           // f32, bf16, f16; f64 from f64 and only from it
  std::size_t count;
  std::uint64_t chunk;  // seeds the hash
  bool streams;         // non-temporal stores: for outputs that leave the cache anyway
};

// The first inputs.size() entries are written.
struct WeightedSumStats {
  std::array<bool, kMaxInputs> is_finite;      // every element of input k is finite
  std::array<double, kMaxInputs> distance_sq;  // sum (x_k - out)^2
  double norm_sq;                              // sum out^2
  std::uint64_t hash;                          // of the bytes written to out
};

// dst = src, with what the pass can learn for free. Integers and booleans have norm 0 and are finite.
struct Gather {
  const std::byte* src;
  std::byte* dst;  // null: look only, copy nothing
  DType dtype;
  std::size_t count;
  std::uint64_t chunk;
  bool streams;
};
struct GatherStats {
  double norm_sq;
  bool is_finite;
  std::uint64_t hash;
};

enum class OuterRule : std::uint8_t {
  none,        // theta = consensus
  nesterov,    // DiLoCo: v = mu v + g; theta = theta_prev - lr (g + mu v)
  heavy_ball,  // SlowMo: v = mu v + g; theta = theta_prev - lr v
};
// g = theta_prev - consensus. fp32 throughout; velocity is fp32 whatever the dtype (f64: differences to theta_prev are
// taken in f64, g and the step are fp32). lr = 1 with momentum = 0 passes the consensus through bit for bit.
// Rule none reads neither theta_prev nor velocity, which may be null.
struct OuterStep {
  OuterRule rule;
  float lr;
  float momentum;
  DType dtype;  // of theta_prev, theta and the copies
  const std::byte* theta_prev;
  std::byte* theta;                    // in: consensus; out: the new theta
  float* velocity;                     // in and out
  std::span<std::byte* const> copies;  // further places that get the new theta in the same pass
  std::size_t count;
  std::uint64_t chunk;
  bool streams = true;  // non-temporal stores into the copies; theta and velocity stay ordinary
};

// A pass that only moves bytes: the bound that a memory-bound kernel is measured against.
enum class MoveKind : std::uint8_t {
  copy,    // dst = src, past the cache
  update,  // dst = dst, read and written back with ordinary stores; the values stay what they were
  read,    // dst is read
};
struct Move {
  MoveKind kind;
  std::byte* dst;        // at a multiple of 64 bytes
  const std::byte* src;  // copy only; may not overlap dst
  std::size_t bytes;
  std::size_t streams;  // 1: first byte to last; 4: four quarters side by side
};

struct Kernels {
  std::string_view name;  // "baseline", "avx2", "avx512", "neon"
  void (*weighted_sum)(const WeightedSum&, WeightedSumStats&);
  // Two chunks block by block in turn: the bits of two calls of weighted_sum, but more reads under way at once. Both
  // have the same number of inputs, dtypes, count and `streams`.
  void (*weighted_sum_pair)(const std::array<WeightedSum, 2>&, std::array<WeightedSumStats, 2>&);
  GatherStats (*gather)(const Gather&);
  // Copies bytes and returns their hash; dst null: hash only.
  std::uint64_t (*copy_hash)(std::byte* dst, const std::byte* src, std::size_t bytes, std::uint64_t chunk,
                             bool streams);
  // Returns the hash of the new theta's bytes.
  std::uint64_t (*outer_step)(const OuterStep&);
  // w = theta + (w - snapshot): keeps the steps made since the snapshot. theta bit for bit where w == snapshot.
  void (*blend_delta)(std::byte* w, const std::byte* theta, const std::byte* snapshot, DType dtype, std::size_t count);
  // w = (1 - alpha) w + alpha theta.
  void (*blend_elastic)(std::byte* w, const std::byte* theta, float alpha, DType dtype, std::size_t count);
  // sum (a - b)^2.
  double (*distance_sq)(const std::byte* a, const std::byte* b, DType dtype, std::size_t count);
  // read: the exclusive or of the 64-bit words of dst, so that no compiler drops the reading; bytes beyond the last
  // whole `streams` lines are left out. Else 0.
  std::uint64_t (*move)(const Move&);
};

// The table in use: the best that this CPU and build have, or the one that FLODL_ISA names.
// A name that this build or CPU lacks is Code::invalid_argument, listing what there is.
Result<const Kernels*> kernels();
// Every table that can run here, best last ("baseline" always).
std::span<const Kernels* const> available_kernels();

// Order matters: combine(h) of hashes in chunk order.
std::uint64_t combine_hashes(std::span<const std::uint64_t> hashes);

}  // namespace flodl
