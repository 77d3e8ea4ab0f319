#include "bindings/errors.h"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace flodl::bindings {
namespace {

const char* class_of(Code code) {
  switch (code) {
    case Code::wire:
      return "WireError";
    case Code::link:
      return "LinkError";
    case Code::ok:
    case Code::invalid_argument:
    case Code::system:
    case Code::memory:
    case Code::state:
      return "NativeError";
  }
  return "NativeError";
}

}  // namespace

void raise(const Status& failure) {
  const nb::object type = nb::module_::import_("flodl.errors").attr(class_of(failure.code()));
  const nb::object error = type(nb::str(failure.message().c_str(), failure.message().size()));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace flodl::bindings
