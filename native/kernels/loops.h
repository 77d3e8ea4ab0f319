// The loops of one instruction set. Included once by each of baseline.cc, avx2.cc, avx512.cc and neon.cc, which name
// the variant (FLODL_VARIANT, a namespace) and choose its registers; see registers.h.
#pragma once

#include "kernels/blocks.h"
#include "kernels/loop_table.h"
#include "kernels/weighted_sum.h"

namespace flodl::FLODL_VARIANT {
namespace {

// Calls visit(D{}) with the float format; false for any other dtype.
template <typename Visit>
bool visit_float(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::f32:
      visit(F32{});
      return true;
    case DType::bf16:
      visit(Bf16{});
      return true;
    case DType::f16:
      visit(F16{});
      return true;
    case DType::f64:
      visit(F64{});
      return true;
    default:
      return false;
  }
}

// ---- weighted sum ----

// Calls visit(In{}, Out{}).
template <typename Visit>
void visit_sum(DType in, DType out, const Visit& visit) {
  visit_float(in, [&](auto from) {
    if constexpr (sizeof(typename decltype(from)::Wide) == 8) {
      visit(from, F64{});
    } else if (out == DType::f32) {
      visit(from, F32{});
    } else if (out == DType::bf16) {
      visit(from, Bf16{});
    } else {
      visit(from, F16{});
    }
  });
}

Digest weighted_sum_of(const SumArguments& given, DType in, DType out) {
  Digest digest{};
  visit_sum(in, out, [&](auto from, auto to) { digest = weighted_sum<decltype(from), decltype(to)>(given); });
  return digest;
}

void weighted_sum_pair_of(const SumArguments* two, Digest* digests, DType in, DType out) {
  visit_sum(in, out, [&](auto from, auto to) { weighted_sum_pair<decltype(from), decltype(to)>(two, digests); });
}

// ---- gather ----

template <typename D>
Digest gather(const GatherArguments& given) {
  using Storage = typename D::Storage;
  alignas(64) Storage room[kBlock];
  Totals norm;
  norm.clear();
  Hash hash(given.chunk, given.count * sizeof(Storage));
  const auto* src = static_cast<const Storage*>(given.src);
  for (size_t at = 0; at < given.count; at += kBlock) {
    const size_t count = smaller(kBlock, given.count - at);
    Storage* const dst = given.dst == nullptr ? nullptr : static_cast<Storage*>(given.dst) + at;
    hash_and_copy(hash, dst, src + at, count * sizeof(Storage), given.streams);
    reduce_storage_norm<D>(norm, whole_block(src + at, count, room));
  }
  if (given.streams) fence_streams();
  const double norm_sq = norm.sum();
  return {norm_sq, hash.finish(), is_all_finite<D>(norm_sq, src, given.count)};
}

// Bytes as they are: no norm, nothing that could be infinite. `count` is bytes.
Digest gather_bytes(const GatherArguments& given) {
  Hash hash(given.chunk, given.count);
  hash_and_copy(hash, given.dst, given.src, given.count, given.streams);
  if (given.streams) fence_streams();
  return {0.0, hash.finish(), true};
}

Digest gather_of(const GatherArguments& given, DType dtype) {
  Digest digest{};
  if (visit_float(dtype, [&](auto format) { digest = gather<decltype(format)>(given); })) return digest;
  return gather_bytes(given);
}

// ---- outer step ----

template <typename D, OuterFormula kFormula, bool kTakesConsensus>
void step_block(const OuterArguments& given, size_t at, size_t count) {
  using Wide = typename D::Wide;
  using Storage = typename D::Storage;
  const Storage* FLODL_RESTRICT theta_prev = static_cast<const Storage*>(given.theta_prev) + at;
  Storage* FLODL_RESTRICT theta = static_cast<Storage*>(given.theta) + at;
  float* FLODL_RESTRICT velocity = given.velocity + at;
  const float lr = given.lr;
  const float momentum = given.momentum;
  for (size_t i = 0; i < count; ++i) {
    const Wide before = D::widen(theta_prev[i]);
    const float gradient = flodl_math::pseudo_gradient<Wide>(before, D::widen(theta[i]));
    const float moving = flodl_math::next_velocity(velocity[i], momentum, gradient);
    velocity[i] = moving;
    if constexpr (!kTakesConsensus) {
      const float direction =
          kFormula == OuterFormula::nesterov ? flodl_math::nesterov_direction(moving, momentum, gradient) : moving;
      theta[i] = D::narrow(flodl_math::outer_theta<Wide>(before, lr, direction));
    }
  }
}

template <typename D>
void step_block_of(const OuterArguments& given, size_t at, size_t count) {
  if (given.formula == OuterFormula::pass) return;
  if (given.takes_consensus) return step_block<D, OuterFormula::heavy_ball, true>(given, at, count);
  if (given.formula == OuterFormula::nesterov) return step_block<D, OuterFormula::nesterov, false>(given, at, count);
  step_block<D, OuterFormula::heavy_ball, false>(given, at, count);
}

template <typename D>
uint64_t outer_step(const OuterArguments& given) {
  using Storage = typename D::Storage;
  Hash hash(given.chunk, given.count * sizeof(Storage));
  for (size_t at = 0; at < given.count; at += kBlock) {
    const size_t count = smaller(kBlock, given.count - at);
    const size_t bytes = count * sizeof(Storage);
    step_block_of<D>(given, at, count);
    const Storage* theta = static_cast<const Storage*>(given.theta) + at;
    hash.update(theta, bytes);
    for (size_t c = 0; c < given.copy_count; ++c) {
      copy_out(static_cast<Storage*>(given.copies[c]) + at, theta, bytes, given.streams);
    }
  }
  if (given.streams) fence_streams();
  return hash.finish();
}

uint64_t outer_step_of(const OuterArguments& given, DType dtype) {
  uint64_t hash = 0;
  visit_float(dtype, [&](auto format) { hash = outer_step<decltype(format)>(given); });
  return hash;
}

// ---- blends and distance ----

template <typename D>
void blend_delta(void* w_bytes, const void* theta_bytes, const void* snapshot_bytes, size_t count) {
  using Storage = typename D::Storage;
  Storage* FLODL_RESTRICT w = static_cast<Storage*>(w_bytes);
  const Storage* FLODL_RESTRICT theta = static_cast<const Storage*>(theta_bytes);
  const Storage* FLODL_RESTRICT snapshot = static_cast<const Storage*>(snapshot_bytes);
  for (size_t i = 0; i < count; ++i) {
    w[i] =
        D::narrow(flodl_math::delta_blend<typename D::Wide>(D::widen(w[i]), D::widen(theta[i]), D::widen(snapshot[i])));
  }
}

template <typename D>
void blend_elastic(void* w_bytes, const void* theta_bytes, float alpha_given, size_t count) {
  using Wide = typename D::Wide;
  using Storage = typename D::Storage;
  Storage* FLODL_RESTRICT w = static_cast<Storage*>(w_bytes);
  const Storage* FLODL_RESTRICT theta = static_cast<const Storage*>(theta_bytes);
  const Wide alpha = alpha_given;
  const Wide keep = Wide{1} - alpha;
  for (size_t i = 0; i < count; ++i) {
    w[i] = D::narrow(flodl_math::elastic_blend<Wide>(D::widen(w[i]), D::widen(theta[i]), alpha, keep));
  }
}

template <typename D>
double distance_sq(const void* a_bytes, const void* b_bytes, size_t count) {
  using Storage = typename D::Storage;
  alignas(64) Storage room[kBlock];
  alignas(64) Storage other_room[kBlock];
  alignas(64) typename D::Wide wide[kBlock];
  Totals totals;
  totals.clear();
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t left = smaller(kBlock, count - at);
    const Storage* a = whole_block(static_cast<const Storage*>(a_bytes) + at, left, room);
    const Storage* b = whole_block(static_cast<const Storage*>(b_bytes) + at, left, other_room);
    for (size_t i = 0; i < kBlock; ++i) wide[i] = D::widen(b[i]);
    reduce_distance<D>(totals, a, wide);
  }
  return totals.sum();
}

void blend_delta_of(void* w, const void* theta, const void* snapshot, DType dtype, size_t count) {
  visit_float(dtype, [&](auto format) { blend_delta<decltype(format)>(w, theta, snapshot, count); });
}

void blend_elastic_of(void* w, const void* theta, float alpha, DType dtype, size_t count) {
  visit_float(dtype, [&](auto format) { blend_elastic<decltype(format)>(w, theta, alpha, count); });
}

double distance_sq_of(const void* a, const void* b, DType dtype, size_t count) {
  double distance = 0.0;
  visit_float(dtype, [&](auto format) { distance = distance_sq<decltype(format)>(a, b, count); });
  return distance;
}

// ---- the bare pass ----

constexpr size_t kLine = 64;

template <size_t kStreams, MovePass kPass>
uint64_t move_streams(const MoveArguments& given) {
  const size_t part = given.bytes / kStreams / kLine * kLine;
  auto* dst = static_cast<unsigned char*>(given.dst);
  const auto* src = static_cast<const unsigned char*>(given.src);
  const auto* mask = static_cast<const unsigned char*>(given.mask);
  Register read[kStreams];
  for (Register& words : read) words = zero();
  for (size_t at = 0; at < part; at += kLine) {
    for (size_t s = 0; s < kStreams; ++s) {
      for (size_t i = s * part + at; i < s * part + at + kLine; i += sizeof(Register)) {
        if constexpr (kPass == MovePass::copy) stream(dst + i, load(src + i));
        if constexpr (kPass == MovePass::update) store(dst + i, bit_xor(load(dst + i), load(mask + i % kLine)));
        if constexpr (kPass == MovePass::read) read[s] = bit_xor(read[s], load(dst + i));
      }
    }
  }
  const size_t done = kStreams * part;
  if constexpr (kPass == MovePass::copy) {
    if (done < given.bytes) memcpy(dst + done, src + done, given.bytes - done);
    fence_streams();
  }
  uint64_t folded = 0;
  for (const Register& words : read) {
    alignas(64) uint64_t each[kRegisterWords];
    store(each, words);
    for (const uint64_t word : each) folded ^= word;
  }
  return folded;
}

template <MovePass kPass>
uint64_t move_pass(const MoveArguments& given) {
  return given.streams == 1 ? move_streams<1, kPass>(given) : move_streams<4, kPass>(given);
}

uint64_t move(const MoveArguments& given) {
  switch (given.pass) {
    case MovePass::copy:
      return move_pass<MovePass::copy>(given);
    case MovePass::update:
      return move_pass<MovePass::update>(given);
    case MovePass::read:
      return move_pass<MovePass::read>(given);
  }
  return 0;
}

constexpr LoopTable kLoops = {weighted_sum_of, weighted_sum_pair_of, gather_of,      outer_step_of,
                              blend_delta_of,  blend_elastic_of,     distance_sq_of, move};

}  // namespace
}  // namespace flodl::FLODL_VARIANT
