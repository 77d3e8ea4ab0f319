#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/held.h"
#include "bindings/rooms.h"
#include "core/descriptor.h"
#include "flodl/endpoint.h"
#include "flodl/events.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace flodl::bindings {
namespace {

// Closes the descriptors that nobody took.
class HeldEvent {
 public:
  explicit HeldEvent(Event event) : event_(std::move(event)) {}
  HeldEvent(HeldEvent&& other) noexcept : event_(std::move(other.event_)) { other.event_.descriptors.clear(); }
  HeldEvent& operator=(HeldEvent&&) = delete;
  ~HeldEvent() {
#if !defined(_WIN32)  // where no event carries any
    for (const int descriptor : event_.descriptors) Descriptor closes(descriptor);
#endif
  }

  const Event& event() const { return event_; }
  nb::bytes payload() const { return nb::bytes(event_.payload.data(), event_.payload.size()); }
  std::vector<int> take_descriptors() { return std::exchange(event_.descriptors, {}); }

 private:
  Event event_;
};

nb::list wait(const HeldEndpoint& endpoint, double timeout_s) {
  const std::shared_ptr<Endpoint> held = endpoint.get();
  std::vector<Event> events = unlocked([&] { return held->wait(timeout_s); });
  // First in owning hands, all of them: an exception further down must not leak descriptors.
  std::vector<HeldEvent> owned;
  owned.reserve(events.size());
  for (Event& event : events) owned.emplace_back(std::move(event));
  nb::list result;
  for (HeldEvent& event : owned) result.append(nb::cast(std::move(event)));
  return result;
}

void send(const HeldEndpoint& endpoint, std::uint64_t link, const nb::bytes& payload,
          const std::vector<int>& descriptors) {
  const std::span bytes(static_cast<const std::byte*>(payload.data()), payload.size());
  const std::shared_ptr<Endpoint> held = endpoint.get();
  check(unlocked([&] { return held->send(link, bytes, descriptors); }));
}

void bind_event(nb::module_& module) {
  nb::enum_<EventKind>(module, "EventKind")
      .value("message", EventKind::message)
      .value("link_closed", EventKind::link_closed)
      .value("link_silent", EventKind::link_silent)
      .value("link_heard", EventKind::link_heard)
      .value("stream_data", EventKind::stream_data)
      .value("stream_closed", EventKind::stream_closed)
      .value("child_exited", EventKind::child_exited)
      .value("child_stopped", EventKind::child_stopped)
      .value("signal", EventKind::signal)
      .value("task_done", EventKind::task_done)
      .value("woken", EventKind::woken);

  nb::class_<HeldEvent>(module, "Event")
      .def_prop_ro("kind", [](const HeldEvent& self) { return self.event().kind; })
      .def_prop_ro("id", [](const HeldEvent& self) { return self.event().id; })
      .def_prop_ro("generation", [](const HeldEvent& self) { return self.event().generation; })
      .def_prop_ro("status", [](const HeldEvent& self) { return self.event().status; })
      .def_prop_ro("seconds", [](const HeldEvent& self) { return self.event().seconds; })
      .def_prop_ro("reason", [](const HeldEvent& self) { return self.event().reason; })
      .def_prop_ro("payload", &HeldEvent::payload)
      .def("take_descriptors", &HeldEvent::take_descriptors);
}

}  // namespace

HeldEndpoint::HeldEndpoint(double heartbeat_s, double silence_s)
    : endpoint_(take(Endpoint::create({.heartbeat_s = heartbeat_s, .silence_s = silence_s}))) {}

std::shared_ptr<Endpoint> HeldEndpoint::get() const {
  if (!endpoint_) raise({Code::state, "endpoint: it is closed"});
  return endpoint_;
}

void HeldEndpoint::enroll(const std::shared_ptr<HostSlot>& host) {
  std::erase_if(hosts_, [](const std::weak_ptr<HostSlot>& known) { return known.expired(); });
  hosts_.push_back(host);
}

void HeldEndpoint::close() {
  if (!endpoint_) return;
  std::vector<std::shared_ptr<HostState>> hosts;
  for (const std::weak_ptr<HostSlot>& known : std::exchange(hosts_, {})) {
    if (const std::shared_ptr<HostSlot> slot = known.lock()) hosts.push_back(std::move(slot->state));
  }
  std::shared_ptr<Endpoint> endpoint = std::move(endpoint_);
  unlocked([&] {
    endpoint->wake();
    hosts.clear();
    endpoint.reset();
  });
}

void bind_transport(nb::module_& module) {
  bind_event(module);
  nb::class_<HeldEndpoint>(module, "Endpoint")
      .def(nb::init<double, double>(), "heartbeat_s"_a = 1.0, "silence_s"_a = 0.0)
      .def(
          "add_link",
          [](const HeldEndpoint& self, int descriptor, std::uint32_t generation) {
            return take(self.get()->add_link(descriptor, generation));
          },
          "descriptor"_a, "generation"_a)
      .def(
          "add_stream",
          [](const HeldEndpoint& self, int descriptor) { return take(self.get()->add_stream(descriptor)); },
          "descriptor"_a)
      .def("send", &send, "link"_a, "payload"_a, "descriptors"_a = nb::tuple())
      .def(
          "flush",
          [](const HeldEndpoint& self, std::uint64_t link, double timeout_s) {
            const std::shared_ptr<Endpoint> held = self.get();
            check(unlocked([&] { return held->flush(link, timeout_s); }));
          },
          "link"_a, "timeout_s"_a)
      .def(
          "close_link", [](const HeldEndpoint& self, std::uint64_t link) { self.get()->close_link(link); }, "link"_a)
      .def(
          "watch_child",
          [](const HeldEndpoint& self, int pid, bool kills_group) { check(self.get()->watch_child(pid, kills_group)); },
          "pid"_a, "kills_group"_a)
      .def(
          "set_lifeline", [](const HeldEndpoint& self, std::uint64_t link) { check(self.get()->set_lifeline(link)); },
          "link"_a)
      .def("signal_descriptor", [](const HeldEndpoint& self) { return self.get()->signal_descriptor(); })
      .def("wait", &wait, "timeout_s"_a, nb::sig("def wait(self, timeout_s: float) -> list[Event]"))
      .def("wake", [](const HeldEndpoint& self) { self.get()->wake(); })
      .def("close", &HeldEndpoint::close);
}

}  // namespace flodl::bindings
