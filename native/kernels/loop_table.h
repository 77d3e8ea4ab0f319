// What each instruction set's file provides: loops over plain pointers.
//
// Nothing here is an inline function, and the loops use no inline function of the standard library: a copy compiled
// with AVX flags could otherwise be the one that the linker keeps for everybody.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "flodl/layout.h"

namespace flodl {

struct SumArguments {
  const void* const* inputs;
  const float* weights;
  size_t width;  // inputs and weights
  void* out;
  size_t count;
  uint64_t chunk;
  bool streams;
  bool* is_finite;      // out: `width` of them
  double* distance_sq;  // out: `width` of them
};

struct GatherArguments {
  const void* src;
  void* dst;
  size_t count;
  uint64_t chunk;
  bool streams;
};

enum class OuterFormula : uint8_t { pass, nesterov, heavy_ball };

struct OuterArguments {
  OuterFormula formula;
  bool takes_consensus;  // theta = consensus bit for bit, whatever the velocity
  float lr;
  float momentum;
  const void* theta_prev;
  void* theta;
  float* velocity;
  void* const* copies;
  size_t copy_count;
  size_t count;
  uint64_t chunk;
  bool streams;
};

enum class MovePass : uint8_t { copy, update, read };

struct MoveArguments {
  MovePass pass;
  void* dst;
  const void* src;  // copy only
  size_t bytes;
  size_t streams;    // 1 or 4
  const void* mask;  // update only: 64 bytes that each line is combined with by exclusive or
};

struct Digest {
  double norm_sq;
  uint64_t hash;
  bool is_finite;
};

struct LoopTable {
  Digest (*weighted_sum)(const SumArguments&, DType in, DType out);
  void (*weighted_sum_pair)(const SumArguments* two, Digest* digests, DType in, DType out);
  Digest (*gather)(const GatherArguments&, DType dtype);
  uint64_t (*outer_step)(const OuterArguments&, DType dtype);
  void (*blend_delta)(void* w, const void* theta, const void* snapshot, DType dtype, size_t count);
  void (*blend_elastic)(void* w, const void* theta, float alpha, DType dtype, size_t count);
  double (*distance_sq)(const void* a, const void* b, DType dtype, size_t count);
  uint64_t (*move)(const MoveArguments&);
};

extern const LoopTable baseline_loops;
extern const LoopTable avx2_loops;
extern const LoopTable avx512_loops;
extern const LoopTable neon_loops;

}  // namespace flodl
