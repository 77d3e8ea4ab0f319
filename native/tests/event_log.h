// Waiting for one event of an endpoint, and keeping the others.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/descriptor.h"
#include "doctest/doctest.h"
#include "flodl/endpoint.h"

namespace flodl::testing {

inline constexpr double kLongestWait_s = 20.0;  // a failure, never a pace

inline std::unique_ptr<Endpoint> make_endpoint(const EndpointOptions& options = {}) {
  Result<std::unique_ptr<Endpoint>> endpoint = Endpoint::create(options);
  REQUIRE_MESSAGE(endpoint.is_ok(), endpoint.status().message());
  return std::move(endpoint.value());
}

inline std::uint64_t add_link(Endpoint& endpoint, Descriptor socket, std::uint32_t generation = 0) {
  const Result<std::uint64_t> link = endpoint.add_link(socket.release(), generation);
  REQUIRE_MESSAGE(link.is_ok(), link.status().message());
  return link.value();
}

inline std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class EventLog {
 public:
  explicit EventLog(Endpoint& endpoint) : endpoint_(endpoint) {}
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;
  ~EventLog() {
    for (const Event& event : kept_) {
      for (const int descriptor : event.descriptors) Descriptor unclaimed(descriptor);
    }
  }

  // The first such event, kept or new; empty once the time is over.
  std::optional<Event> find(const std::function<bool(const Event&)>& is_wanted, double timeout_s = kLongestWait_s) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    std::size_t seen = 0;
    while (true) {
      for (; seen < kept_.size(); ++seen) {
        if (!is_wanted(kept_[seen])) continue;
        Event event = std::move(kept_[seen]);
        kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(seen));
        return event;
      }
      const std::chrono::duration<double> left = deadline - std::chrono::steady_clock::now();
      if (left.count() <= 0) return std::nullopt;
      for (Event& event : endpoint_.wait(left.count())) kept_.push_back(std::move(event));
    }
  }

  Event next(EventKind kind, std::uint64_t id) {
    std::optional<Event> event = find([&](const Event& e) { return e.kind == kind && e.id == id; });
    REQUIRE_MESSAGE(event.has_value(), "no event of kind ", static_cast<int>(kind), " of ", id);
    return std::move(*event);
  }

  // Events that came and were not asked for.
  std::size_t count(EventKind kind) const {
    std::size_t found = 0;
    for (const Event& event : kept_) found += event.kind == kind ? 1 : 0;
    return found;
  }

 private:
  Endpoint& endpoint_;
  std::deque<Event> kept_;
};

}  // namespace flodl::testing
