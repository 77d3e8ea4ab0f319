#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "bindings/errors.h"
#include "bindings/rooms.h"
#include "bindings/slices.h"
#include "flodl/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flodl::bindings {
namespace {

class HeldMemory {
 public:
  HeldMemory(SharedMemory memory, bool writable) : memory_(std::move(memory)), writable_(writable) {}

  static HeldMemory* create(std::size_t size) {
    return new HeldMemory(take(unlocked([&] { return SharedMemory::create(size); })), true);
  }
  static HeldMemory* adopt(int descriptor, bool writable) {
    const Access access = writable ? Access::read_write : Access::read_only;
    return new HeldMemory(take(unlocked([&] { return SharedMemory::adopt(descriptor, access); })), writable);
  }
  int duplicate(bool writable) const {
    return take(memory_.duplicate(writable ? Access::read_write : Access::read_only));
  }
  void prefault() const {
    check(unlocked([&] { return memory_.prefault(); }));
  }
  nb::bytes read(std::size_t offset, std::size_t size) const {
    return slice({memory_.data(), memory_.size()}, offset, size);
  }
  const SharedMemory& memory() const { return memory_; }
  bool writable() const { return writable_; }

 private:
  SharedMemory memory_;
  bool writable_;
};

// Keeps its memory alive (keep_alive below).
class HeldRankPage {
 public:
  explicit HeldRankPage(const HeldMemory& memory) : writable_(memory.writable()) {
    if (memory.memory().size() < kRankPageBytes) {
      raise({Code::invalid_argument, "rank page: the memory is smaller than a page"});
    }
    page_ = reinterpret_cast<RankPage*>(memory.memory().data());
  }
  void start_step() { add(page_->steps_started); }
  void finish_step() { add(page_->steps_finished); }
  std::uint64_t steps_started() const { return page_->steps_started.load(std::memory_order_acquire); }
  std::uint64_t steps_finished() const { return page_->steps_finished.load(std::memory_order_acquire); }

 private:
  void add(std::atomic<std::uint64_t>& counter) const {
    if (!writable_) raise({Code::state, "rank page: this mapping is read-only; the rank's own counts"});
    counter.fetch_add(1, std::memory_order_release);
  }

  RankPage* page_;
  bool writable_;
};

std::map<std::string, std::string> build_info() {
  return {{"compiler", FLODL_COMPILER},
          {"build_type", FLODL_BUILD_TYPE},
          {"sanitizer", FLODL_SANITIZER},
          {"platform", FLODL_PLATFORM}};
}

}  // namespace

void bind_core(nb::module_& module) {
  nb::class_<HeldMemory>(module, "SharedMemory")
      .def_static("create", &HeldMemory::create, "size"_a, nb::rv_policy::take_ownership)
      .def_static("adopt", &HeldMemory::adopt, "descriptor"_a, "writable"_a, nb::rv_policy::take_ownership)
      .def_prop_ro("size", [](const HeldMemory& self) { return self.memory().size(); })
      .def_prop_ro("address",
                   [](const HeldMemory& self) { return reinterpret_cast<std::uintptr_t>(self.memory().data()); })
      .def_prop_ro("descriptor", [](const HeldMemory& self) { return self.memory().descriptor(); })
      .def("duplicate", &HeldMemory::duplicate, "writable"_a)
      .def("prefault", &HeldMemory::prefault)
      .def("read", &HeldMemory::read, "offset"_a, "size"_a);

  nb::class_<HeldRankPage>(module, "RankPage")
      .def(nb::init<const HeldMemory&>(), "memory"_a, nb::keep_alive<1, 2>())
      .def("start_step", &HeldRankPage::start_step)
      .def("finish_step", &HeldRankPage::finish_step)
      .def_prop_ro("steps_started", &HeldRankPage::steps_started)
      .def_prop_ro("steps_finished", &HeldRankPage::steps_finished);

  module.def("build_info", &build_info);
}

}  // namespace flodl::bindings
