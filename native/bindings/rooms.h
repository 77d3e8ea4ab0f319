// What each room adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace flodl::bindings {

void bind_core(nanobind::module_& module);
void bind_transport(nanobind::module_& module);
void bind_kernels(nanobind::module_& module);
void bind_averager(nanobind::module_& module);

}  // namespace flodl::bindings
