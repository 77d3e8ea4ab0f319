#include "flodl/layout.h"

#include <string>

namespace flodl {
namespace {

constexpr std::uint64_t kAlignment = 64;

bool is_known(const Section& section) { return section.rule <= Rule::largest && section.dtype <= DType::boolean; }

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// Only after the section's own range was checked.
std::uint64_t end_of(const Section& section) { return section.offset + section.count * bytes_of(section.dtype); }

Status refuse(std::size_t index, const std::string& what) {
  return Status(Code::invalid_argument, "section " + std::to_string(index) + ": " + what);
}

Status check_section(const Section& section, std::size_t index, std::uint64_t start, std::uint64_t end) {
  if (!is_known(section)) return refuse(index, "rule or dtype is none that this version knows");
  if (section.offset % kAlignment != 0) {
    return refuse(index, "offset " + std::to_string(section.offset) + " is not a multiple of 64");
  }
  if (section.offset < start) {
    return refuse(index, "offset " + std::to_string(section.offset) + " lies before " + std::to_string(start) +
                             ", the end of the section before it");
  }
  if (section.offset > end || section.count > (end - section.offset) / bytes_of(section.dtype)) {
    return refuse(index, std::to_string(section.count) + " elements at offset " + std::to_string(section.offset) +
                             " reach beyond the layout's " + std::to_string(end) + " bytes");
  }
  if (is_float(section.dtype) == (section.rule == Rule::largest)) {
    return refuse(index, section.rule == Rule::largest ? "the largest value is taken of integers only"
                                                       : "a mean is taken of floating-point values only");
  }
  return Status();
}

bool holds_mean(const Section& mean, const Section& variance) {
  if (mean.rule != Rule::buffer || mean.dtype != variance.dtype) return false;
  if (variance.mean_offset < mean.offset || variance.mean_offset > end_of(mean)) return false;
  const std::uint64_t width = bytes_of(mean.dtype);
  return (variance.mean_offset - mean.offset) % width == 0 &&
         variance.count <= (end_of(mean) - variance.mean_offset) / width;
}

}  // namespace

Status Layout::check() const {
  if (bytes % kAlignment != 0 || bytes > kMaxLayoutBytes) {
    return Status(Code::invalid_argument, "layout of " + std::to_string(bytes) +
                                              " bytes: must be a multiple of 64, at most " +
                                              std::to_string(kMaxLayoutBytes));
  }
  std::uint64_t start = 0;
  for (std::size_t i = 0; i < sections.size(); ++i) {
    if (Status status = check_section(sections[i], i, start, bytes); !status.is_ok()) return status;
    start = end_of(sections[i]);
  }
  for (std::size_t i = 0; i < sections.size(); ++i) {
    if (sections[i].rule != Rule::pooled_var) continue;
    bool is_found = false;
    for (const Section& mean : sections) is_found = is_found || holds_mean(mean, sections[i]);
    if (!is_found) {
      return refuse(i, "no buffer section of its dtype holds " + std::to_string(sections[i].count) +
                           " means at offset " + std::to_string(sections[i].mean_offset));
    }
  }
  return Status();
}

}  // namespace flodl
