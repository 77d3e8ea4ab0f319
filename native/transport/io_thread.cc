#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "transport/child.h"
#include "transport/local_endpoint.h"

namespace flodl {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;
constexpr std::size_t kStreamChunkBytes = std::size_t{64} << 10;
// Reads of one source before the others have their turn.
constexpr int kReadsPerTurn = 8;

Event event_of(EventKind kind, std::uint64_t id) { return Event{.kind = kind, .id = id}; }

}  // namespace

void LocalEndpoint::run() {
  buffer_.resize(kReadBytes);
  while (true) {
    settle_links();
    std::optional<Liveness::Time> deadline;
    {
      Lock lock(mutex_);
      if (is_stopping_) return;
      deadline = liveness_.next_deadline();
    }
    auto timeout = std::chrono::nanoseconds(-1);
    if (deadline) timeout = std::max(std::chrono::nanoseconds(*deadline - Clock::now()), std::chrono::nanoseconds(0));
    const std::vector<Poller::Ready> all_ready = poller_->wait(timeout);
    const Liveness::Time woke = Clock::now();
    // Reading comes before judging: what arrived while this thread slept counts as heard.
    for (const Poller::Ready& ready : all_ready) dispatch(ready);
    // A deadline that came up meanwhile is judged in the next turn, which knows how late it is.
    if (deadline && woke >= *deadline) tick(*deadline, woke);
  }
}

void LocalEndpoint::settle_links() {
  std::vector<std::pair<LinkPointer, std::string>> broken;
  std::vector<LinkPointer> closing;
  {
    Lock lock(mutex_);
    for (const std::uint64_t id : std::exchange(unsettled_, {})) {
      const auto found = links_.find(id);
      if (found == links_.end()) continue;
      if (found->second->is_closing) {
        closing.push_back(found->second);
      } else {
        broken.emplace_back(found->second, found->second->link.write_failure().message());
      }
    }
  }
  for (const LinkPointer& state : closing) end_link(state, "closed here");
  for (const auto& [state, reason] : broken) drain_link(state, reason);
}

void LocalEndpoint::dispatch(const Poller::Ready& ready) {
  LinkPointer state;
  bool is_stream = false;
  bool is_child = false;
  {
    Lock lock(mutex_);
    state = find_link(ready.token);
    is_stream = streams_.contains(ready.token);
    is_child = children_.contains(ready.token);
  }
  if (ready.token == kSignalToken) read_signals();
  if (is_stream) read_stream(ready.token);
  if (is_child) end_child(ready.token);
  // Writing first: reading may end the link.
  if (state && ready.is_writable) write_link(state);
  if (state && ready.is_readable) read_link(state);
}

void LocalEndpoint::write_link(const LinkPointer& state) {
  Lock lock(mutex_);
  if (state->link.write_queued().is_ok()) liveness_.sent(state->link.id(), Clock::now());
  after_write(*state);
}

void LocalEndpoint::read_link(const LinkPointer& state) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    Reading reading = state->link.read(buffer_);
    const bool may_have_more = reading.bytes == buffer_.size();
    if (!take_reading(state, std::move(reading)) || !may_have_more) return;
  }
}

// The peer is gone, but what it said before it went is still to be heard.
void LocalEndpoint::drain_link(const LinkPointer& state, const std::string& reason) {
  while (true) {
    Reading reading = state->link.read(buffer_);
    const bool is_empty = reading.bytes == 0 && !reading.has_ended;
    if (is_empty) return end_link(state, reason);
    if (!take_reading(state, std::move(reading))) return;
  }
}

// Posts what was read. False once the link is closed.
bool LocalEndpoint::take_reading(const LinkPointer& state, Reading reading) {
  const std::uint64_t id = state->link.id();
  std::optional<double> silent_for;
  bool is_flooded = false;
  {
    Lock lock(mutex_);
    if (reading.bytes > 0) silent_for = liveness_.heard(id, Clock::now());
    for (const Incoming& message : reading.messages) state->unread_bytes += message.payload.size() + kEventBytes;
    is_flooded = state->unread_bytes > kMaxQueuedBytes;
  }
  if (silent_for) {
    Event heard = event_of(EventKind::link_heard, id);
    heard.seconds = *silent_for;
    queue_.post(std::move(heard));
  }
  for (Incoming& message : reading.messages) {
    Event event = event_of(EventKind::message, id);
    event.generation = message.generation;
    event.payload = std::move(message.payload);
    for (Descriptor& descriptor : message.descriptors) event.descriptors.push_back(descriptor.release());
    queue_.post(std::move(event));
  }
  if (is_flooded && !reading.has_ended) {
    reading.has_ended = true;
    reading.reason = "more than " + std::to_string(kMaxQueuedBytes) + " bytes of messages were not taken in here";
  }
  if (reading.has_ended) end_link(state, reading.reason);
  return !reading.has_ended;
}

void LocalEndpoint::end_link(const LinkPointer& state, const std::string& reason) {
  {
    Lock lock(mutex_);
    if (links_.erase(state->link.id()) == 0) return;  // it was both closed here and found broken
    if (state->is_lifeline && !state->is_closing) end_own_group();
    poller_->remove(state->link.socket());
    state->link.close();
    liveness_.remove(state->link.id());
    settled_.notify_all();
  }
  Event closed = event_of(EventKind::link_closed, state->link.id());
  closed.reason = reason;
  queue_.post(std::move(closed));
}

void LocalEndpoint::read_stream(std::uint64_t stream) {
  int descriptor = -1;
  {
    Lock lock(mutex_);
    descriptor = streams_.at(stream).descriptor.get();  // only this thread closes it
  }
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    const ssize_t bytes = ::read(descriptor, buffer_.data(), kStreamChunkBytes);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    Lock lock(mutex_);
    const auto state = streams_.find(stream);
    if (bytes <= 0) {
      poller_->remove(descriptor);
      streams_.erase(state);
      queue_.post(event_of(EventKind::stream_closed, stream));
      return;
    }
    Event data = event_of(EventKind::stream_data, stream);
    data.payload.assign(buffer_.begin(), buffer_.begin() + bytes);
    state->second.unread_bytes += data.payload.size() + kEventBytes;
    queue_.post(std::move(data));
    if (state->second.unread_bytes > kStreamPauseBytes) {
      poller_->remove(descriptor);
      state->second.is_paused = true;
      return;
    }
  }
}

void LocalEndpoint::end_child(std::uint64_t token) {
  WatchedChild child;
  {
    Lock lock(mutex_);
    child = children_.at(token);
    children_.erase(token);
    liveness_.forget(child.pid);
    poller_->remove_process(token);
  }
  const ChildEnd end = reap_child(child.pid, child.kills_group);
  Event exited = event_of(EventKind::child_exited, static_cast<std::uint64_t>(child.pid));
  exited.status = end.status;
  if (!end.is_known) exited.reason = "reaped by somebody else in this process: its status is lost";
  queue_.post(std::move(exited));
}

void LocalEndpoint::read_signals() {
  std::array<unsigned char, 64> numbers;
  const ssize_t count = ::read(signals_.read_end.get(), numbers.data(), numbers.size());
  for (ssize_t i = 0; i < count; ++i) queue_.post(event_of(EventKind::signal, numbers[static_cast<std::size_t>(i)]));
}

void LocalEndpoint::tick(Liveness::Time planned, Liveness::Time woke) {
  Liveness::Due due;
  std::vector<std::pair<int, double>> stopped;
  {
    Lock lock(mutex_);
    liveness_.woke(planned, woke);
    due = liveness_.due(woke);
    for (const std::uint64_t id : due.heartbeats) {
      const LinkPointer state = find_link(id);
      if (!state) continue;
      (void)state->link.send_heartbeat().is_ok();  // after_write sees a failure
      after_write(*state);
    }
    for (const auto& [token, child] : children_) {
      const std::optional<double> seconds = liveness_.looked(child.pid, is_child_stopped(child.pid), woke);
      if (seconds) stopped.emplace_back(child.pid, *seconds);
    }
  }
  for (const auto& [pid, seconds] : stopped) {
    Event event = event_of(EventKind::child_stopped, static_cast<std::uint64_t>(pid));
    event.seconds = seconds;
    queue_.post(std::move(event));
  }
  for (const auto& [id, age] : due.silent) {
    Event silent = event_of(EventKind::link_silent, id);
    silent.seconds = age;
    queue_.post(std::move(silent));
  }
}

}  // namespace flodl
