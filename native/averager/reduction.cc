#include "averager/reduction.h"

#include <algorithm>

#include "averager/buffers.h"

namespace flodl {
namespace {

// From here on the output leaves the cache before anyone reads it, and reading it for ownership is waste.
constexpr std::uint64_t kStreamBytes = std::uint64_t{8} << 20;

}  // namespace

Reduction::Reduction(const Kernels& kernels, const Layout& layout, std::span<const Chunk> chunks,
                     std::span<const ReductionInput> inputs, std::byte* out)
    : kernels_(kernels),
      layout_(layout),
      chunks_(chunks),
      out_(out),
      streams_(layout.bytes >= kStreamBytes),
      hashes_(chunks.size()),
      norm_sq_(chunks.size()),
      distance_sq_(chunks.size() * inputs.size()),
      is_finite_(chunks.size() * inputs.size(), 1) {
  for (const ReductionInput& input : inputs) {
    data_.push_back(input.data);
    weights_.push_back(input.weight);
    buffer_weights_.push_back(input.buffer_weight);
  }
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    const Rule rule = layout.sections[chunks[c].section].rule;
    const bool is_mean = rule == Rule::parameter || rule == Rule::buffer;
    const bool is_pair = is_mean && c + 1 < chunks.size() && chunks[c + 1].section == chunks[c].section &&
                         chunks[c + 1].count == chunks[c].count;
    pieces_.push_back({c, is_pair});
    if (is_pair) ++c;
  }
}

void Reduction::run(std::size_t piece) noexcept {
  const Piece& part = pieces_[piece];
  switch (layout_.sections[chunks_[part.first].section].rule) {
    case Rule::parameter:
      return run_mean(part, weights_);
    case Rule::buffer:
      return run_mean(part, buffer_weights_);
    case Rule::pooled_var:
      return run_pooled(part.first);
    case Rule::largest:
      return run_largest(part.first);
  }
}

std::span<const std::byte* const> Reduction::at(std::uint64_t offset, Places& storage) const {
  for (std::size_t k = 0; k < data_.size(); ++k) storage[k] = data_[k] + offset;
  return std::span(storage).first(data_.size());
}

void Reduction::run_mean(const Piece& piece, std::span<const float> weights) {
  std::array<Places, 2> storage;
  std::array<WeightedSumStats, 2> stats;
  const WeightedSum first = mean_of(piece.first, weights, storage[0]);
  if (!piece.is_pair) {
    kernels_.weighted_sum(first, stats[0]);
  } else {
    kernels_.weighted_sum_pair({first, mean_of(piece.first + 1, weights, storage[1])}, stats);
    keep(piece.first + 1, stats[1]);
  }
  keep(piece.first, stats[0]);
}

WeightedSum Reduction::mean_of(std::size_t index, std::span<const float> weights, Places& storage) const {
  const Chunk& chunk = chunks_[index];
  const DType dtype = layout_.sections[chunk.section].dtype;
  return {.inputs = at(chunk.offset, storage),
          .weights = weights,
          .dtype = dtype,
          .out = out_ + chunk.offset,
          .out_dtype = dtype,
          .count = chunk.count,
          .chunk = index,
          .streams = streams_};
}

void Reduction::keep(std::size_t index, const WeightedSumStats& stats) {
  hashes_[index] = stats.hash;
  for (std::size_t k = 0; k < data_.size(); ++k) is_finite_[row(index) + k] = stats.is_finite[k];
  if (layout_.sections[chunks_[index].section].rule != Rule::parameter) return;
  norm_sq_[index] = stats.norm_sq;
  for (std::size_t k = 0; k < data_.size(); ++k) distance_sq_[row(index) + k] = stats.distance_sq[k];
}

void Reduction::run_pooled(std::size_t index) {
  const Chunk& chunk = chunks_[index];
  const Section& section = layout_.sections[chunk.section];
  const std::size_t size = bytes_of(section.dtype);
  Places variances, means;
  std::byte* out = out_ + chunk.offset;
  pool_variance({.variances = at(chunk.offset, variances),
                 .means = at(section.mean_offset + chunk.first * size, means),
                 .weights = buffer_weights_,
                 .dtype = section.dtype,
                 .out = out,
                 .count = chunk.count},
                std::span(is_finite_).subspan(row(index), data_.size()));
  hashes_[index] = kernels_.copy_hash(nullptr, out, chunk.count * size, index, false);
}

void Reduction::run_largest(std::size_t index) {
  const Chunk& chunk = chunks_[index];
  const DType dtype = layout_.sections[chunk.section].dtype;
  std::byte* out = out_ + chunk.offset;
  Places storage;
  take_largest(at(chunk.offset, storage), dtype, out, chunk.count);
  hashes_[index] = kernels_.copy_hash(nullptr, out, chunk.count * bytes_of(dtype), index, false);
}

ReduceResult Reduction::finish() const {
  const std::size_t inputs = data_.size();
  ReduceResult result;
  result.is_finite.assign(inputs, true);
  result.distance_sq.assign(inputs, 0.0);
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    result.norm_sq += norm_sq_[c];
    for (std::size_t k = 0; k < inputs; ++k) {
      result.distance_sq[k] += distance_sq_[row(c) + k];
      if (is_finite_[row(c) + k] == 0) result.is_finite[k] = false;
    }
  }
  result.hash = combine_hashes(hashes_);
  const auto bad = std::find(result.is_finite.begin(), result.is_finite.end(), false);
  if (bad != result.is_finite.end()) {
    result.first_nonfinite = find_nonfinite(static_cast<std::size_t>(bad - result.is_finite.begin()));
  }
  return result;
}

std::string Reduction::find_nonfinite(std::size_t input) const {
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    if (is_finite_[row(c) + input] != 0) continue;
    const Chunk& chunk = chunks_[c];
    const DType dtype = layout_.sections[chunk.section].dtype;
    const std::size_t element = first_nonfinite(data_[input] + chunk.offset, dtype, chunk.count);
    return "offset " + std::to_string(chunk.offset + element * bytes_of(dtype)) + " of contribution " +
           std::to_string(input) + " (element " + std::to_string(chunk.first + element) + " of section " +
           std::to_string(chunk.section) + ")";
  }
  return {};
}

}  // namespace flodl
