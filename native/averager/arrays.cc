#include "averager/arrays.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <string>

#include "averager/chunks.h"

namespace flodl {
namespace {

struct Range {
  const char* name;
  const std::byte* data;
  std::size_t elements;
  std::size_t element_bytes;
  bool is_written = false;

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::uintptr_t end() const { return begin() + elements * element_bytes; }
};

Status refuse(const std::string& what) { return {Code::invalid_argument, what}; }

Status check_range(const Range& range) {
  if (range.elements == 0) return {};
  const std::string name = range.name;
  if (range.elements > kMaxLayoutBytes / range.element_bytes) {
    return refuse(name + ": " + std::to_string(range.elements) + " elements are more than any layout has");
  }
  if (range.data == nullptr) return refuse(name + ": null address for " + std::to_string(range.elements) + " elements");
  if (range.begin() % range.element_bytes != 0) {
    return refuse(name + ": the address is not a multiple of the element's " + std::to_string(range.element_bytes) +
                  " bytes");
  }
  if (range.end() < range.begin()) return refuse(name + ": reaches past the end of the address space");
  return {};
}

// Every range by itself, and no written one overlaps another.
Status check_ranges(const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    if (Status fine = check_range(range); !fine.is_ok()) return fine;
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    for (std::size_t j = i + 1; j < ranges.size(); ++j) {
      const Range& a = ranges[i];
      const Range& b = ranges[j];
      if ((a.is_written || b.is_written) && a.begin() < b.end() && b.begin() < a.end()) {
        return refuse(std::string(a.name) + " overlaps " + b.name);
      }
    }
  }
  return {};
}

Status check_floating(const char* name, DType dtype) {
  return is_floating(dtype) ? Status() : refuse(std::string(name) + ": f32, bf16, f16 or f64 is needed");
}

// Calls piece(first, count, chunk) for `count` elements cut by `step`.
template <typename Piece>
void for_chunks(std::size_t count, std::size_t step, Piece piece) {
  std::uint64_t chunk = 0;
  for (std::size_t first = 0; first < count; first += step) piece(first, std::min(step, count - first), chunk++);
}

Status check_sum(const WeightedSum& job) {
  if (job.inputs.empty() || job.inputs.size() > kMaxInputs || job.inputs.size() != job.weights.size()) {
    return refuse("inputs: " + std::to_string(job.inputs.size()) + " with " + std::to_string(job.weights.size()) +
                  " weights; 1 to 256, one weight each");
  }
  if (Status fine = check_floating("dtype", job.dtype); !fine.is_ok()) return fine;
  if (Status fine = check_floating("out_dtype", job.out_dtype); !fine.is_ok()) return fine;
  if ((job.out_dtype == DType::f64) != (job.dtype == DType::f64)) return refuse("out_dtype: f64 goes with f64 only");
  for (const float weight : job.weights) {
    if (!std::isfinite(weight)) return refuse("weights: " + std::to_string(weight) + " is not finite");
  }
  if (job.inputs.size() == 1 && job.weights[0] != 1.0f) return refuse("weights: the only input has weight 1");
  std::vector<Range> ranges = {{"out", job.out, job.count, bytes_of(job.out_dtype), true}};
  for (const std::byte* input : job.inputs) ranges.push_back({"an input", input, job.count, bytes_of(job.dtype)});
  return check_ranges(ranges);
}

Status check_step(const OuterStep& job) {
  if (Status fine = check_floating("dtype", job.dtype); !fine.is_ok()) return fine;
  if (job.rule == OuterRule::none) return refuse("rule: none has no step");
  if (!std::isfinite(job.lr) || !std::isfinite(job.momentum)) return refuse("lr, momentum: finite numbers are needed");
  const std::size_t size = bytes_of(job.dtype);
  std::vector<Range> ranges = {{"theta_prev", job.theta_prev, job.count, size},
                               {"theta", job.theta, job.count, size, true},
                               {"velocity", reinterpret_cast<const std::byte*>(job.velocity), job.count, 4, true}};
  for (const std::byte* copy : job.copies) ranges.push_back({"a copy", copy, job.count, size, true});
  return check_ranges(ranges);
}

Status check_pair(const Range& a, const Range& b, DType dtype) {
  if (Status fine = check_floating("dtype", dtype); !fine.is_ok()) return fine;
  return check_ranges({a, b});
}

}  // namespace

Result<std::uint64_t> copy_hash_array(std::byte* dst, const std::byte* src, std::size_t bytes, bool streams) {
  std::vector<Range> ranges = {{"src", src, bytes, 1}};
  if (dst != nullptr) ranges.push_back({"dst", dst, bytes, 1, true});
  if (Status fine = check_ranges(ranges); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  std::vector<std::uint64_t> hashes;
  for_chunks(bytes, kChunkBytes, [&](std::size_t first, std::size_t count, std::uint64_t chunk) {
    std::byte* to = dst == nullptr ? nullptr : dst + first;
    hashes.push_back(table.value()->copy_hash(to, src + first, count, chunk, streams));
  });
  return combine_hashes(hashes);
}

Result<GatherStats> gather_array(const Gather& job) {
  const std::size_t size = bytes_of(job.dtype);
  std::vector<Range> ranges = {{"src", job.src, job.count, size}};
  if (job.dst != nullptr) ranges.push_back({"dst", job.dst, job.count, size, true});
  if (Status fine = check_ranges(ranges); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  GatherStats total{.norm_sq = 0.0, .is_finite = true, .hash = 0};
  std::vector<std::uint64_t> hashes;
  for_chunks(job.count, chunk_elements(job.dtype), [&](std::size_t first, std::size_t count, std::uint64_t chunk) {
    Gather part = job;
    part.src = job.src + first * size;
    part.dst = job.dst == nullptr ? nullptr : job.dst + first * size;
    part.count = count;
    part.chunk = chunk;
    const GatherStats stats = table.value()->gather(part);
    total.norm_sq += stats.norm_sq;
    total.is_finite = total.is_finite && stats.is_finite;
    hashes.push_back(stats.hash);
  });
  total.hash = combine_hashes(hashes);
  return total;
}

Result<ArraySum> weighted_sum_array(const WeightedSum& job) {
  if (Status fine = check_sum(job); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  const std::size_t inputs = job.inputs.size();
  ArraySum total{.is_finite = std::vector<bool>(inputs, true), .distance_sq = std::vector<double>(inputs, 0.0)};
  std::vector<std::uint64_t> hashes;
  const auto keep = [&](const WeightedSumStats& stats) {
    total.norm_sq += stats.norm_sq;
    for (std::size_t k = 0; k < inputs; ++k) {
      total.distance_sq[k] += stats.distance_sq[k];
      if (!stats.is_finite[k]) total.is_finite[k] = false;
    }
    hashes.push_back(stats.hash);
  };
  const std::size_t step = chunk_elements(job.out_dtype);
  std::array<std::vector<const std::byte*>, 2> places;
  std::array<WeightedSumStats, 2> stats;
  const auto part_at = [&](std::size_t first, std::vector<const std::byte*>& storage) {
    storage.clear();
    for (const std::byte* input : job.inputs) storage.push_back(input + first * bytes_of(job.dtype));
    WeightedSum part = job;
    part.inputs = storage;
    part.out = job.out + first * bytes_of(job.out_dtype);
    part.count = std::min(step, job.count - first);
    part.chunk = first / step;
    return part;
  };
  for (std::size_t first = 0; first < job.count; first += step) {
    const WeightedSum part = part_at(first, places[0]);
    if (job.count - first < 2 * step) {
      table.value()->weighted_sum(part, stats[0]);
      keep(stats[0]);
      continue;
    }
    first += step;
    table.value()->weighted_sum_pair({part, part_at(first, places[1])}, stats);
    keep(stats[0]);
    keep(stats[1]);
  }
  total.hash = combine_hashes(hashes);
  return total;
}

Result<std::uint64_t> outer_step_array(const OuterStep& job) {
  if (Status fine = check_step(job); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  const std::size_t size = bytes_of(job.dtype);
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte*> copies(job.copies.size());
  for_chunks(job.count, chunk_elements(job.dtype), [&](std::size_t first, std::size_t count, std::uint64_t chunk) {
    std::transform(job.copies.begin(), job.copies.end(), copies.begin(),
                   [&](std::byte* copy) { return copy + first * size; });
    OuterStep part = job;
    part.theta_prev = job.theta_prev + first * size;
    part.theta = job.theta + first * size;
    part.velocity = job.velocity + first;
    part.copies = copies;
    part.count = count;
    part.chunk = chunk;
    hashes.push_back(table.value()->outer_step(part));
  });
  return combine_hashes(hashes);
}

Status blend_delta_array(std::byte* w, const std::byte* theta, const std::byte* snapshot, DType dtype,
                         std::size_t count) {
  const std::size_t size = bytes_of(dtype);
  if (Status fine = check_floating("dtype", dtype); !fine.is_ok()) return fine;
  Status fine =
      check_ranges({{"w", w, count, size, true}, {"theta", theta, count, size}, {"snapshot", snapshot, count, size}});
  if (!fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (table.is_ok()) table.value()->blend_delta(w, theta, snapshot, dtype, count);
  return table.status();
}

Status blend_elastic_array(std::byte* w, const std::byte* theta, float alpha, DType dtype, std::size_t count) {
  if (!std::isfinite(alpha)) return refuse("alpha: " + std::to_string(alpha) + " is not finite");
  const std::size_t size = bytes_of(dtype);
  Status fine = check_pair({"w", w, count, size, true}, {"theta", theta, count, size}, dtype);
  if (!fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (table.is_ok()) table.value()->blend_elastic(w, theta, alpha, dtype, count);
  return table.status();
}

Result<double> distance_sq_array(const std::byte* a, const std::byte* b, DType dtype, std::size_t count) {
  const std::size_t size = bytes_of(dtype);
  if (Status fine = check_pair({"a", a, count, size}, {"b", b, count, size}, dtype); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  double total = 0.0;
  for_chunks(count, chunk_elements(dtype), [&](std::size_t first, std::size_t part, std::uint64_t) {
    total += table.value()->distance_sq(a + first * size, b + first * size, dtype, part);
  });
  return total;
}

Result<std::uint64_t> copy_layout(const Layout& layout, std::byte* dst, const std::byte* src, bool streams) {
  if (Status fine = layout.check(); !fine.is_ok()) return fine;
  std::vector<Range> ranges = {{"src", src, layout.bytes, 1}};
  if (dst != nullptr) ranges.push_back({"dst", dst, layout.bytes, 1, true});
  if (Status fine = check_ranges(ranges); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  return copy_sections(*table.value(), layout, dst, src, streams);
}

}  // namespace flodl
