// Bytes of native memory, copied out for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

namespace flodl::bindings {

// memory[offset : offset + size]; raises NativeError where that reaches past the end. Copies with the GIL released.
nanobind::bytes slice(std::span<const std::byte> memory, std::size_t offset, std::size_t size);

}  // namespace flodl::bindings
