// Status -> Python exception.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "flodl/status.h"

namespace flodl::bindings {

// Throws the class of flodl.errors that stands for this code. Needs the GIL.
[[noreturn]] void raise(const Status& failure);

inline void check(const Status& status) {
  if (!status.is_ok()) raise(status);
}

template <typename T>
T take(Result<T>&& result) {
  if (!result.is_ok()) raise(result.status());
  return std::move(result.value());
}

// Runs `call` with the GIL released; it may touch no Python object.
template <typename Call>
auto unlocked(Call&& call) {
  const nanobind::gil_scoped_release release;
  return call();
}

}  // namespace flodl::bindings
