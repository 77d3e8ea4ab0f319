#include "flodl/endpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/thread.h"
#include "transport/child.h"
#include "transport/local_endpoint.h"
#include "transport/socket.h"

namespace flodl {
namespace {

Status no_link(std::uint64_t link) { return Status(Code::link, "link " + std::to_string(link) + " is closed"); }

EventQueue::Clock::time_point deadline_after(double timeout_s) {
  constexpr double kLongest = 1e8;  // three years; the clock's type holds no infinity
  const double seconds = std::isnan(timeout_s) ? 0.0 : std::clamp(timeout_s, 0.0, kLongest);
  return EventQueue::Clock::now() +
         std::chrono::duration_cast<EventQueue::Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::create(const EndpointOptions& options) {
  if (!(options.heartbeat_s > 0)) {
    return Status(Code::invalid_argument,
                  "heartbeat_s is " + std::to_string(options.heartbeat_s) + ", must be above 0");
  }
  if (!(options.silence_s >= 0)) {
    return Status(Code::invalid_argument,
                  "silence_s is " + std::to_string(options.silence_s) + ", must not be below 0");
  }
  Result<std::unique_ptr<Poller>> poller = Poller::create();
  if (!poller.is_ok()) return poller.status();
  Result<Pipe> signals = make_pipe();
  if (!signals.is_ok()) return signals.status();
  for (const Descriptor* end : {&signals.value().read_end, &signals.value().write_end}) {
    if (Status status = set_non_blocking(end->get()); !status.is_ok()) return status;
  }
  auto endpoint = std::make_unique<LocalEndpoint>(options, std::move(poller.value()), std::move(signals.value()));
  if (Status status = endpoint->start(); !status.is_ok()) return status;
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

LocalEndpoint::LocalEndpoint(const EndpointOptions& options, std::unique_ptr<Poller> poller, Pipe signals)
    : creator_pid_(::getpid()), poller_(std::move(poller)), signals_(std::move(signals)), liveness_(options) {}

Status LocalEndpoint::start() {
  if (Status status = poller_->add(signals_.read_end.get(), kSignalToken); !status.is_ok()) return status;
  thread_ = std::make_unique<std::thread>(start_thread("flodl-io", [this] { run(); }));
  return {};
}

LocalEndpoint::~LocalEndpoint() {
  // A forked child has a copy of this object but not its thread: it lets go, and disturbs nothing of the parent's.
  if (creator_pid_ != ::getpid()) {
    (void)thread_.release();
    return;
  }
  {
    Lock lock(mutex_);
    is_stopping_ = true;
  }
  poller_->wake();
  if (thread_) thread_->join();
  for (const Event& event : queue_.wait_until(Clock::now())) {
    for (const int descriptor : event.descriptors) Descriptor unclaimed(descriptor);
  }
}

LocalEndpoint::LinkPointer LocalEndpoint::find_link(std::uint64_t link) const {
  const auto found = links_.find(link);
  return found == links_.end() || found->second->is_closing ? nullptr : found->second;
}

Result<std::uint64_t> LocalEndpoint::add_link(int descriptor, std::uint32_t generation) {
  Descriptor socket(descriptor);
  if (Status status = prepare_socket(descriptor); !status.is_ok()) return status;
  Lock lock(mutex_);
  const std::uint64_t id = next_token_++;
  if (Status status = poller_->add(descriptor, id); !status.is_ok()) return status;
  links_.emplace(id, std::make_shared<LinkState>(id, std::move(socket), generation));
  liveness_.add(id, Clock::now());
  poller_->wake();  // its deadlines are new
  return id;
}

Result<std::uint64_t> LocalEndpoint::add_stream(int descriptor) {
  Descriptor stream(descriptor);
  if (Status status = set_close_on_exec(descriptor); !status.is_ok()) return status;
  if (Status status = set_non_blocking(descriptor); !status.is_ok()) return status;
  Lock lock(mutex_);
  const std::uint64_t id = next_token_++;
  if (Status status = poller_->add(descriptor, id); !status.is_ok()) return status;
  streams_.emplace(id, StreamState{.descriptor = std::move(stream), .is_paused = false, .unread_bytes = 0});
  return id;
}

Status LocalEndpoint::send(std::uint64_t link, std::span<const std::byte> payload, std::span<const int> descriptors) {
  Lock lock(mutex_);
  const LinkPointer state = find_link(link);
  if (!state) return no_link(link);
  Status sent = state->link.send(payload, descriptors);
  if (sent.is_ok()) liveness_.sent(link, Clock::now());
  after_write(*state);
  return sent;
}

// Keeps what is watched in step with what is queued, and hands a broken link to the I/O thread.
void LocalEndpoint::after_write(LinkState& state) {
  const bool is_broken = !state.link.write_failure().is_ok();
  const bool has_queued = state.link.has_queued();
  if (state.is_watching_writes != has_queued) {
    const Status watched = poller_->watch_writes(state.link.socket(), state.link.id(), has_queued);
    state.is_watching_writes = watched.is_ok() == has_queued;
  }
  if (is_broken) {
    unsettled_.push_back(state.link.id());
    poller_->wake();
  }
  if (is_broken || !has_queued) settled_.notify_all();
}

Status LocalEndpoint::flush(std::uint64_t link, double timeout_s) {
  const auto deadline = deadline_after(timeout_s);
  Lock lock(mutex_);
  LinkPointer state = find_link(link);
  settled_.wait_until(lock, deadline, [&] {
    state = find_link(link);
    return !state || !state->link.has_queued();
  });
  if (!state) return no_link(link);
  if (const Status& failure = state->link.write_failure(); !failure.is_ok()) return failure;
  if (!state->link.has_queued()) return {};
  return Status(Code::state, "link " + std::to_string(link) + ": the peer did not take all bytes within " +
                                 std::to_string(timeout_s) + " s");
}

void LocalEndpoint::close_link(std::uint64_t link) {
  Lock lock(mutex_);
  const LinkPointer state = find_link(link);
  if (!state) return;
  state->is_closing = true;
  unsettled_.push_back(link);
  settled_.notify_all();
  poller_->wake();
}

Status LocalEndpoint::watch_child(int pid, bool kills_group) {
  Lock lock(mutex_);
  for (const auto& [token, child] : children_) {
    if (child.pid == pid) return Status(Code::state, "process " + std::to_string(pid) + " is watched already");
  }
  if (Status status = check_child(pid); !status.is_ok()) return status;
  const std::uint64_t token = next_token_++;
  children_.emplace(token, WatchedChild{pid, kills_group});
  Status watched = poller_->add_process(pid, token);
  if (!watched.is_ok()) children_.erase(token);
  return watched;
}

Status LocalEndpoint::set_lifeline(std::uint64_t link) {
  Lock lock(mutex_);
  const LinkPointer state = find_link(link);
  if (!state) return no_link(link);
  state->is_lifeline = true;
  return {};
}

std::vector<Event> LocalEndpoint::wait(double timeout_s) {
  std::vector<Event> events = queue_.wait_until(deadline_after(timeout_s));
  if (events.empty()) return events;
  Lock lock(mutex_);
  for (const Event& event : events) note_taken(event);
  resume_streams();
  return events;
}

void LocalEndpoint::note_taken(const Event& event) {
  const std::size_t bytes = event.payload.size() + kEventBytes;
  if (event.kind == EventKind::message) {
    if (const auto found = links_.find(event.id); found != links_.end()) found->second->unread_bytes -= bytes;
  } else if (event.kind == EventKind::stream_data) {
    if (const auto found = streams_.find(event.id); found != streams_.end()) found->second.unread_bytes -= bytes;
  }
}

void LocalEndpoint::resume_streams() {
  for (auto& [id, stream] : streams_) {
    if (!stream.is_paused || stream.unread_bytes > kStreamResumeBytes) continue;
    stream.is_paused = !poller_->add(stream.descriptor.get(), id).is_ok();
  }
}

void LocalEndpoint::wake() { queue_.post(Event{.kind = EventKind::woken}); }

}  // namespace flodl
