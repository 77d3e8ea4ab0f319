// The kernels over arrays of any length: checked, cut into chunks from the first byte, combined in order,
// on the calling thread. Code::invalid_argument names the argument that broke the contract; then nothing was written.
// What is written may overlap nothing else. `chunk` of a job is ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flodl/kernels.h"
#include "flodl/status.h"

namespace flodl {

struct ArraySum {
  std::vector<bool> is_finite;      // per input
  std::vector<double> distance_sq;  // per input
  double norm_sq = 0.0;
  std::uint64_t hash = 0;  // chunks are cut by the bytes of `out`: equal to copy_hash of what was written
};

// dst null: hash only.
Result<std::uint64_t> copy_hash_array(std::byte* dst, const std::byte* src, std::size_t bytes, bool streams);
// Any dtype; integers count as finite and have no norm.
Result<GatherStats> gather_array(const Gather& job);
Result<ArraySum> weighted_sum_array(const WeightedSum& job);
Result<std::uint64_t> outer_step_array(const OuterStep& job);
Status blend_delta_array(std::byte* w, const std::byte* theta, const std::byte* snapshot, DType dtype,
                         std::size_t count);
Status blend_elastic_array(std::byte* w, const std::byte* theta, float alpha, DType dtype, std::size_t count);
Result<double> distance_sq_array(const std::byte* a, const std::byte* b, DType dtype, std::size_t count);
// See copy_sections(); `dst` null: hash only.
Result<std::uint64_t> copy_layout(const Layout& layout, std::byte* dst, const std::byte* src, bool streams);

}  // namespace flodl
