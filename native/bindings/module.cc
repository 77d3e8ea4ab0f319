#include <nanobind/nanobind.h>

#include "bindings/rooms.h"

NB_MODULE(_native, module) {
  module.doc() = "The native core of flodl; flodl.native is its only importer.";
  flodl::bindings::bind_core(module);
  flodl::bindings::bind_transport(module);
  flodl::bindings::bind_averager(module);
  flodl::bindings::bind_kernels(module);
}
