#include "averager/chunks.h"

#include <algorithm>

namespace flodl {

std::vector<Chunk> cut(const Layout& layout) {
  std::vector<Chunk> chunks;
  std::uint64_t parameters = 0;
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const Section& section = layout.sections[s];
    const std::uint64_t step = chunk_elements(section.dtype);
    for (std::uint64_t first = 0; first < section.count; first += step) {
      const auto count = static_cast<std::size_t>(std::min(step, section.count - first));
      chunks.push_back({s, section.offset + first * bytes_of(section.dtype), first, count, parameters});
      if (section.rule == Rule::parameter) parameters += count;
    }
  }
  return chunks;
}

std::uint64_t parameter_count(const Layout& layout) {
  std::uint64_t total = 0;
  for (const Section& section : layout.sections) {
    if (section.rule == Rule::parameter) total += section.count;
  }
  return total;
}

std::uint64_t copy_sections(const Kernels& kernels, const Layout& layout, std::byte* dst, const std::byte* src,
                            bool streams) {
  const std::vector<Chunk> chunks = cut(layout);
  std::vector<std::uint64_t> hashes;
  hashes.reserve(chunks.size());
  for (const Chunk& chunk : chunks) {
    const std::size_t bytes = chunk.count * bytes_of(layout.sections[chunk.section].dtype);
    std::byte* to = dst == nullptr ? nullptr : dst + chunk.offset;
    hashes.push_back(kernels.copy_hash(to, src + chunk.offset, bytes, hashes.size(), streams));
  }
  return combine_hashes(hashes);
}

}  // namespace flodl
