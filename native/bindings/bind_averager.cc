#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "averager/arrays.h"
#include "bindings/errors.h"
#include "bindings/held.h"
#include "bindings/names.h"
#include "bindings/rooms.h"
#include "bindings/slices.h"
#include "flodl/host_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flodl::bindings {
namespace {

// Sections come straight from Python; Layout::check() judges them.
struct HeldSection {
  Section section;
  HeldSection(const std::string& rule, const std::string& dtype, std::uint64_t offset, std::uint64_t count,
              std::uint64_t mean_offset)
      : section{rule_named(rule), dtype_named(dtype), offset, count, mean_offset} {}
};

Layout layout_of(std::uint64_t bytes, const std::vector<HeldSection>& sections) {
  Layout layout;
  layout.bytes = bytes;
  for (const HeldSection& held : sections) layout.sections.push_back(held.section);
  return layout;
}

class HeldHostMemory {
  // The members that deduce their type come before those that use them.
  std::shared_ptr<HostState> state() const {
    if (!slot_->state) raise({Code::state, "host memory: its endpoint is closed"});
    return slot_->state;
  }
  // Calls with the GIL released; a failure raises, a value comes back.
  template <typename Call>
  auto with(Call call) const {
    const std::shared_ptr<HostState> held = state();
    auto outcome = unlocked([&] { return call(*held->memory); });
    if constexpr (std::is_same_v<decltype(outcome), Status>) {
      check(outcome);
    } else {
      return take(std::move(outcome));
    }
  }

 public:
  HeldHostMemory(std::uint64_t layout_bytes, const std::vector<HeldSection>& sections, const std::string& outer_rule,
                 float outer_lr, float outer_momentum, std::size_t threads, HeldEndpoint& endpoint)
      : slot_(std::make_shared<HostSlot>()) {
    auto state = std::make_shared<HostState>();
    state->endpoint = endpoint.get();
    state->layout = layout_of(layout_bytes, sections);
    const OuterSettings outer{.rule = outer_rule_named(outer_rule), .lr = outer_lr, .momentum = outer_momentum};
    state->memory =
        take(unlocked([&] { return HostMemory::create(state->layout, outer, threads, state->endpoint->queue()); }));
    slot_->state = std::move(state);
    endpoint.enroll(slot_);
  }
  ~HeldHostMemory() {
    std::shared_ptr<HostState> last = std::move(slot_->state);
    unlocked([&] { last.reset(); });
  }
  HeldHostMemory(const HeldHostMemory&) = delete;
  HeldHostMemory& operator=(const HeldHostMemory&) = delete;

  std::uint64_t open_rank() const {
    return with([](HostMemory& memory) { return memory.open_rank(); });
  }
  int rank_descriptor(std::uint64_t rank) const {
    return with([&](HostMemory& memory) { return memory.rank_descriptor(rank); });
  }
  std::pair<std::uint64_t, std::uint64_t> rank_steps(std::uint64_t rank) const {
    const RankPage* page = state()->memory->rank_page(rank);
    if (page == nullptr) raise({Code::invalid_argument, "rank steps: no rank memory " + std::to_string(rank)});
    return {page->steps_started.load(std::memory_order_acquire), page->steps_finished.load(std::memory_order_acquire)};
  }
  void close_rank(std::uint64_t rank) const {
    with([&](HostMemory& memory) { return memory.close_rank(rank); });
  }
  int buffer_descriptor(int buffer) const {
    return with([&](HostMemory& memory) { return memory.buffer_descriptor(buffer); });
  }
  int committed() const { return state()->memory->committed(); }
  nb::bytes read_committed(std::size_t offset, std::size_t size) const {
    const std::shared_ptr<HostState> held = state();
    return slice({held->memory->buffer(held->memory->committed()), held->layout.bytes}, offset, size);
  }
  nb::bytes read_velocity() const {
    const std::shared_ptr<HostState> held = state();
    const std::span<const std::byte> velocity = std::as_bytes(held->memory->velocity());
    return slice(velocity, 0, velocity.size());
  }
  void write_velocity(const nb::bytes& values) const {
    if (values.size() % sizeof(float) != 0) {
      raise({Code::invalid_argument, "velocity: " + std::to_string(values.size()) + " bytes are no fp32 values"});
    }
    // Bytes need not be aligned for floats.
    std::vector<float> copy(values.size() / sizeof(float));
    if (!copy.empty()) std::memcpy(copy.data(), values.c_str(), values.size());
    with([&](HostMemory& memory) { return memory.write_velocity(copy); });
  }
  void start_reduce(std::uint64_t task, const std::vector<std::tuple<std::uint64_t, float, float>>& named) const {
    std::vector<Contribution> contributions;
    for (const auto& [memory, weight, buffer_weight] : named) contributions.push_back({memory, weight, buffer_weight});
    with([&](HostMemory& memory) { return memory.start_reduce(task, contributions); });
  }
  ReduceResult reduce_result() const {
    return with([](HostMemory& memory) { return memory.reduce_result(); });
  }
  void start_commit(std::uint64_t task, bool is_seed, float momentum_share) const {
    with([&](HostMemory& memory) { return memory.start_commit(task, is_seed, momentum_share); });
  }
  CommitResult commit_result() const {
    return with([](HostMemory& memory) { return memory.commit_result(); });
  }

 private:
  std::shared_ptr<HostSlot> slot_;
};

void bind_results(nb::module_& module) {
  nb::class_<ReduceResult>(module, "ReduceResult")
      .def_ro("task", &ReduceResult::task)
      .def_ro("is_finite", &ReduceResult::is_finite)
      .def_ro("distance_sq", &ReduceResult::distance_sq)
      .def_ro("norm_sq", &ReduceResult::norm_sq)
      .def_ro("hash", &ReduceResult::hash)
      .def_ro("first_nonfinite", &ReduceResult::first_nonfinite)
      .def_ro("seconds", &ReduceResult::seconds);
  nb::class_<CommitResult>(module, "CommitResult")
      .def_ro("task", &CommitResult::task)
      .def_ro("hash", &CommitResult::hash)
      .def_ro("seconds", &CommitResult::seconds);
}

}  // namespace

void bind_averager(nb::module_& module) {
  nb::class_<HeldSection>(module, "Section")
      .def(nb::init<const std::string&, const std::string&, std::uint64_t, std::uint64_t, std::uint64_t>(), "rule"_a,
           "dtype"_a, "offset"_a, "count"_a, "mean_offset"_a = 0);
  bind_results(module);
  nb::class_<HeldHostMemory>(module, "HostMemory")
      .def(nb::init<std::uint64_t, const std::vector<HeldSection>&, const std::string&, float, float, std::size_t,
                    HeldEndpoint&>(),
           "layout_bytes"_a, "sections"_a, "outer_rule"_a, "outer_lr"_a, "outer_momentum"_a, "threads"_a, "endpoint"_a,
           nb::keep_alive<1, 8>())
      .def("open_rank", &HeldHostMemory::open_rank)
      .def("rank_descriptor", &HeldHostMemory::rank_descriptor, "memory"_a)
      .def("rank_steps", &HeldHostMemory::rank_steps, "memory"_a)
      .def("close_rank", &HeldHostMemory::close_rank, "memory"_a)
      .def("buffer_descriptor", &HeldHostMemory::buffer_descriptor, "buffer"_a)
      .def("committed", &HeldHostMemory::committed)
      .def("read_committed", &HeldHostMemory::read_committed, "offset"_a, "size"_a)
      .def("read_velocity", &HeldHostMemory::read_velocity)
      .def("write_velocity", &HeldHostMemory::write_velocity, "values"_a)
      .def("start_reduce", &HeldHostMemory::start_reduce, "task"_a, "contributions"_a)
      .def("reduce_result", &HeldHostMemory::reduce_result)
      .def("start_commit", &HeldHostMemory::start_commit, "task"_a, "is_seed"_a, "momentum_share"_a = 1.0f)
      .def("commit_result", &HeldHostMemory::commit_result);
  module.def(
      "copy_layout",
      [](std::uintptr_t dst, std::uintptr_t src, std::uint64_t layout_bytes, const std::vector<HeldSection>& sections,
         bool streams) {
        const Layout layout = layout_of(layout_bytes, sections);
        return take(unlocked([&] {
          return copy_layout(layout, reinterpret_cast<std::byte*>(dst), reinterpret_cast<const std::byte*>(src),
                             streams);
        }));
      },
      "dst"_a, "src"_a, "layout_bytes"_a, "sections"_a, "streams"_a = false);
}

}  // namespace flodl::bindings
