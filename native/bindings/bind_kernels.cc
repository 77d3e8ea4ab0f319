#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "averager/arrays.h"
#include "averager/probe.h"
#include "bindings/errors.h"
#include "bindings/names.h"
#include "bindings/rooms.h"
#include "flodl/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flodl::bindings {
namespace {

using Address = std::uintptr_t;

const std::byte* readable(Address address) { return reinterpret_cast<const std::byte*>(address); }
std::byte* writable(Address address) { return reinterpret_cast<std::byte*>(address); }

std::string isa() { return std::string(take(kernels())->name); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : available_kernels()) names.emplace_back(table->name);
  return names;
}

std::uint64_t copy_hash(Address dst, Address src, std::size_t size, bool streams) {
  return take(unlocked([&] { return copy_hash_array(writable(dst), readable(src), size, streams); }));
}

std::tuple<double, bool, std::uint64_t> gather(Address dst, Address src, const std::string& dtype, std::size_t count,
                                               bool streams) {
  const Gather job{.src = readable(src),
                   .dst = writable(dst),
                   .dtype = dtype_named(dtype),
                   .count = count,
                   .chunk = 0,
                   .streams = streams};
  const GatherStats stats = take(unlocked([&] { return gather_array(job); }));
  return {stats.norm_sq, stats.is_finite, stats.hash};
}

std::tuple<std::vector<bool>, std::vector<double>, double, std::uint64_t> weighted_sum(
    Address out, const std::string& out_dtype, const std::vector<Address>& inputs, const std::vector<float>& weights,
    const std::string& dtype, std::size_t count, bool streams) {
  std::vector<const std::byte*> places;
  for (const Address input : inputs) places.push_back(readable(input));
  const WeightedSum job{.inputs = places,
                        .weights = weights,
                        .dtype = dtype_named(dtype),
                        .out = writable(out),
                        .out_dtype = dtype_named(out_dtype),
                        .count = count,
                        .chunk = 0,
                        .streams = streams};
  ArraySum sum = take(unlocked([&] { return weighted_sum_array(job); }));
  return {std::move(sum.is_finite), std::move(sum.distance_sq), sum.norm_sq, sum.hash};
}

std::uint64_t outer_step(const std::string& rule, float lr, float momentum, Address theta_prev, Address theta,
                         Address velocity, const std::string& dtype, std::size_t count,
                         const std::vector<Address>& copies) {
  std::vector<std::byte*> places;
  for (const Address copy : copies) places.push_back(writable(copy));
  const OuterStep job{.rule = outer_rule_named(rule),
                      .lr = lr,
                      .momentum = momentum,
                      .dtype = dtype_named(dtype),
                      .theta_prev = readable(theta_prev),
                      .theta = writable(theta),
                      .velocity = reinterpret_cast<float*>(velocity),
                      .copies = places,
                      .count = count,
                      .chunk = 0};
  return take(unlocked([&] { return outer_step_array(job); }));
}

void blend_delta(Address w, Address theta, Address snapshot, const std::string& dtype, std::size_t count) {
  const DType type = dtype_named(dtype);
  check(unlocked([&] { return blend_delta_array(writable(w), readable(theta), readable(snapshot), type, count); }));
}

void blend_elastic(Address w, Address theta, float alpha, const std::string& dtype, std::size_t count) {
  const DType type = dtype_named(dtype);
  check(unlocked([&] { return blend_elastic_array(writable(w), readable(theta), alpha, type, count); }));
}

double distance_sq(Address a, Address b, const std::string& dtype, std::size_t count) {
  const DType type = dtype_named(dtype);
  return take(unlocked([&] { return distance_sq_array(readable(a), readable(b), type, count); }));
}

double stream_probe(const std::string& kind, Address dst, Address src, std::size_t size, std::size_t threads,
                    std::size_t streams) {
  const Move job{
      .kind = move_kind_named(kind), .dst = writable(dst), .src = readable(src), .bytes = size, .streams = streams};
  return take(unlocked([&] { return stream_probe(job, threads); }));
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("isa", &isa);
  module.def("available_isas", &available_isas);
  module.def("copy_hash", &copy_hash, "dst"_a, "src"_a, "size"_a, "streams"_a = false);
  module.def("gather", &gather, "dst"_a, "src"_a, "dtype"_a, "count"_a, "streams"_a = false);
  module.def("weighted_sum", &weighted_sum, "out"_a, "out_dtype"_a, "inputs"_a, "weights"_a, "dtype"_a, "count"_a,
             "streams"_a = false);
  module.def("outer_step", &outer_step, "rule"_a, "lr"_a, "momentum"_a, "theta_prev"_a, "theta"_a, "velocity"_a,
             "dtype"_a, "count"_a, "copies"_a = nb::tuple());
  module.def("blend_delta", &blend_delta, "w"_a, "theta"_a, "snapshot"_a, "dtype"_a, "count"_a);
  module.def("blend_elastic", &blend_elastic, "w"_a, "theta"_a, "alpha"_a, "dtype"_a, "count"_a);
  module.def("distance_sq", &distance_sq, "a"_a, "b"_a, "dtype"_a, "count"_a);
  module.def("stream_probe", &stream_probe, "kind"_a, "dst"_a, "src"_a, "size"_a, "threads"_a, "streams"_a);
}

}  // namespace flodl::bindings
