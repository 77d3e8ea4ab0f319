#include "bindings/slices.h"

#include <cstring>
#include <string>

#include "bindings/errors.h"

namespace nb = nanobind;

namespace flodl::bindings {

nb::bytes slice(std::span<const std::byte> memory, std::size_t offset, std::size_t size) {
  if (offset > memory.size() || size > memory.size() - offset) {
    raise({Code::invalid_argument, "read: " + std::to_string(size) + " bytes from " + std::to_string(offset) +
                                       " reach past the end of " + std::to_string(memory.size())});
  }
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (made == nullptr) throw nb::python_error();
  const nb::bytes result = nb::steal<nb::bytes>(made);
  if (size != 0) {
    char* to = PyBytes_AsString(made);
    unlocked([&] { return std::memcpy(to, memory.data() + offset, size); });
  }
  return result;
}

}  // namespace flodl::bindings
