// A model as one flat sequence of bytes, the same on every rank: sections of one dtype and one rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flodl/status.h"

namespace flodl {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i64, i32, i16, i8, u8, boolean };

constexpr std::size_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
      return 2;
    default:
      return 1;
  }
}

enum class Rule : std::uint8_t {
  parameter,   // weighted mean with p_k; the outer optimizer applies
  buffer,      // weighted mean with the sample weights
  pooled_var,  // running variance: sum q (var + mean^2) - mean^2, with its mean at mean_offset
  largest,     // integer buffers: the largest value
};

struct Section {
  Rule rule;
  DType dtype;
  std::uint64_t offset;       // bytes from the start; a multiple of 64
  std::uint64_t count;        // elements; alignment gaps inside a section hold zeros on every rank
  std::uint64_t mean_offset;  // pooled_var only: where the paired running mean (same dtype, count) lies
};

struct Layout {
  std::uint64_t bytes = 0;        // a multiple of 64, at most kMaxLayoutBytes
  std::vector<Section> sections;  // ascending, not overlapping

  // Offsets in range, aligned, ascending; dtype fits the rule; pooled_var's mean is a `buffer` section or part of one.
  Status check() const;
};
inline constexpr std::uint64_t kMaxLayoutBytes = std::uint64_t{1} << 42;

}  // namespace flodl
