// The rules for buffers that are no weighted mean: pooled variances and integer counters.
#pragma once

#include <cstddef>
#include <span>

#include "flodl/layout.h"

namespace flodl {

// One chunk of a running variance: out = sum q_k (var_k + mean_k^2) - (sum q_k mean_k)^2, never below zero.
// Every multiply and add is rounded apart, inputs in order, in fp32 (f64 for f64); the mean is not rounded to
// `dtype` in between. One input is copied bit for bit.
struct PooledVariance {
  std::span<const std::byte* const> variances;  // each `count` elements of `dtype`
  std::span<const std::byte* const> means;      // the same elements of the paired running mean
  std::span<const float> weights;               // q_k, one per input
  DType dtype;                                  // f32, bf16, f16, f64
  std::byte* out;
  std::size_t count;
};
// is_finite[k]: every variance of input k is finite (its means belong to their own section).
void pool_variance(const PooledVariance& job, std::span<unsigned char> is_finite);

// out[i] = the largest of inputs[k][i]; integers and booleans.
void take_largest(std::span<const std::byte* const> inputs, DType dtype, std::byte* out, std::size_t count);

// The first element that is NaN or infinite, or `count`.
std::size_t first_nonfinite(const std::byte* data, DType dtype, std::size_t count);

}  // namespace flodl
