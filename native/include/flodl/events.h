// What wakes a driver: one queue that links, children, signals and tasks all post to.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace flodl {

enum class EventKind : std::uint8_t {
  message,        // id = link; payload; descriptors (the receiver owns them); generation
  link_closed,    // id = link; reason. The last event of that link
  link_silent,    // id = link; seconds = how long nothing was heard. Once per silence
  link_heard,     // id = link; a link reported silent is heard again
  stream_data,    // id = stream; payload = raw bytes of a pipe
  stream_closed,  // id = stream
  child_exited,   // id = pid; status = exit code, or -signal
  child_stopped,  // id = pid; seconds = for how long by now: silence_s at least. Once per stop
  signal,         // id = signal number
  task_done,      // id = task; reason empty, or why it failed
  woken,          // somebody called wake()
};

struct Event {
  EventKind kind;
  std::uint64_t id = 0;
  std::uint32_t generation = 0;
  int status = 0;
  double seconds = 0.0;
  std::string reason{};
  std::vector<std::byte> payload{};
  std::vector<int> descriptors{};
};

// Any thread posts, one thread waits. Events come out in the order posted.
class EventQueue {
 public:
  using Clock = std::chrono::steady_clock;

  void post(Event event);
  // Everything queued, or empty once `deadline` has passed.
  std::vector<Event> wait_until(Clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;
};

}  // namespace flodl
