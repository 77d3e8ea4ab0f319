#include "transport/liveness.h"

#include <algorithm>

namespace flodl {
namespace {

using Duration = std::chrono::steady_clock::duration;

Duration duration_of(double seconds) {
  constexpr double kLongest = 1e8;  // three years; far from what the clock's type cannot hold
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::min(seconds, kLongest)));
}

double seconds_of(Duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

Liveness::Liveness(const EndpointOptions& options) : heartbeat_(duration_of(options.heartbeat_s)) {
  if (options.silence_s > 0) silence_ = duration_of(options.silence_s);
}

void Liveness::add(std::uint64_t link, Time now) { links_[link] = Ages{.sent = now, .heard = now, .is_silent = false}; }

void Liveness::remove(std::uint64_t link) { links_.erase(link); }

void Liveness::sent(std::uint64_t link, Time now) {
  if (const auto found = links_.find(link); found != links_.end()) found->second.sent = now;
}

std::optional<double> Liveness::heard(std::uint64_t link, Time now) {
  const auto found = links_.find(link);
  if (found == links_.end()) return std::nullopt;
  Ages& ages = found->second;
  const double silent_for = seconds_of(now - ages.heard);
  ages.heard = now;
  if (!std::exchange(ages.is_silent, false)) return std::nullopt;
  return silent_for;
}

void Liveness::woke(Time planned, Time now) {
  if (now - planned <= std::chrono::seconds(1)) return;
  for (auto& [link, ages] : links_) {
    if (!ages.is_silent) ages.heard = std::max(ages.heard, now);
  }
  for (auto& [child, stop] : stops_) stop.since = std::max(stop.since, now);
}

std::optional<double> Liveness::looked(int child, bool is_stopped, Time now) {
  if (!is_stopped) {
    stops_.erase(child);
    return std::nullopt;
  }
  Stop& stop = stops_.try_emplace(child, Stop{.since = now}).first->second;
  if (stop.is_told || !silence_ || now - stop.since < *silence_) return std::nullopt;
  stop.is_told = true;
  return seconds_of(now - stop.since);
}

void Liveness::forget(int child) { stops_.erase(child); }

Liveness::Due Liveness::due(Time now) {
  Due due;
  for (auto& [link, ages] : links_) {
    if (now - ages.sent >= heartbeat_) {
      ages.sent = now;
      due.heartbeats.push_back(link);
    }
    if (silence_ && !ages.is_silent && now - ages.heard >= *silence_) {
      ages.is_silent = true;
      due.silent.emplace_back(link, seconds_of(now - ages.heard));
    }
  }
  return due;
}

std::optional<Liveness::Time> Liveness::next_deadline() const {
  std::optional<Time> next;
  for (const auto& [link, ages] : links_) {
    Time deadline = ages.sent + heartbeat_;
    if (silence_ && !ages.is_silent) deadline = std::min(deadline, ages.heard + *silence_);
    next = next ? std::min(*next, deadline) : deadline;
  }
  return next;
}

}  // namespace flodl
