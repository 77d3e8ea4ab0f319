#include "flodl/events.h"

#include <iterator>
#include <utility>

namespace flodl {

void EventQueue::post(Event event) {
  // Notified under the lock: the waiter may destroy the queue as soon as it has the event.
  std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  ready_.notify_one();
}

std::vector<Event> EventQueue::wait_until(Clock::time_point deadline) {
  std::deque<Event> taken;
  {
    std::unique_lock lock(mutex_);
    ready_.wait_until(lock, deadline, [this] { return !events_.empty(); });
    taken.swap(events_);
  }
  return {std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end())};
}

}  // namespace flodl
