// A layout as a list of pieces of work, the same on every host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flodl/kernels.h"
#include "flodl/layout.h"

namespace flodl {

// At most kChunkBytes of one section. The index of a chunk in its list seeds its hash.
struct Chunk {
  std::size_t section;
  std::uint64_t offset;             // bytes from the start of the layout
  std::uint64_t first;              // element of the section at `offset`
  std::size_t count;                // elements
  std::uint64_t parameters_before;  // elements of parameter sections in front of it: its place in a velocity
};

// Ascending; the gaps between sections belong to no chunk.
std::vector<Chunk> cut(const Layout& layout);

// Elements in sections of Rule::parameter: the length of a velocity.
std::uint64_t parameter_count(const Layout& layout);

constexpr std::size_t chunk_elements(DType dtype) { return kChunkBytes / bytes_of(dtype); }

constexpr bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// Copies every section from one image of the layout to another (dst null: hash only) on the calling thread.
// The hash equals that of a reduce or a commit which left the same bytes. `dst` and `src` may not overlap.
std::uint64_t copy_sections(const Kernels& kernels, const Layout& layout, std::byte* dst, const std::byte* src,
                            bool streams);

}  // namespace flodl
