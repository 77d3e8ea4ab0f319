#include <sys/types.h>
// sys/event.h needs the types above.
#include <sys/event.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "core/descriptor.h"
#include "transport/poller.h"

namespace flodl {
namespace {

constexpr std::uint64_t kWakeToken = 0;

class KqueuePoller : public Poller {
 public:
  explicit KqueuePoller(Descriptor queue) : queue_(std::move(queue)) {}

  Status start() { return change(kWakeIdent, EVFILT_USER, EV_ADD | EV_CLEAR, 0, kWakeToken); }

  Status add(int descriptor, std::uint64_t token) override {
    return change(static_cast<std::uintptr_t>(descriptor), EVFILT_READ, EV_ADD, 0, token);
  }

  Status watch_writes(int descriptor, std::uint64_t token, bool wanted) override {
    const auto ident = static_cast<std::uintptr_t>(descriptor);
    if (wanted) return change(ident, EVFILT_WRITE, EV_ADD, 0, token);
    (void)change(ident, EVFILT_WRITE, EV_DELETE, 0, token).is_ok();  // ENOENT: was not watched
    return {};
  }

  void remove(int descriptor) override {
    const auto ident = static_cast<std::uintptr_t>(descriptor);
    (void)change(ident, EVFILT_READ, EV_DELETE, 0, 0).is_ok();
    (void)change(ident, EVFILT_WRITE, EV_DELETE, 0, 0).is_ok();
  }

  Status add_process(int pid, std::uint64_t token) override {
    std::lock_guard lock(mutex_);
    const Status status = change(static_cast<std::uintptr_t>(pid), EVFILT_PROC, EV_ADD | EV_ONESHOT, NOTE_EXIT, token);
    processes_[token] = pid;
    if (status.is_ok()) return {};
    // A child that has exited and is not reaped cannot be watched any more: its end is known.
    ended_.push_back(Ready{.token = token, .is_readable = true, .is_writable = false});
    wake();
    return {};
  }

  void remove_process(std::uint64_t token) override {
    std::lock_guard lock(mutex_);
    const auto found = processes_.find(token);
    if (found == processes_.end()) return;
    (void)change(static_cast<std::uintptr_t>(found->second), EVFILT_PROC, EV_DELETE, 0, token).is_ok();
    processes_.erase(found);
  }

  std::vector<Ready> wait(std::chrono::nanoseconds timeout) override {
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    const timespec limit{static_cast<time_t>(whole.count()), static_cast<long>((timeout - whole).count())};
    std::array<struct kevent, 64> events;
    const int count = ::kevent(queue_.get(), nullptr, 0, events.data(), static_cast<int>(events.size()),
                               timeout.count() < 0 ? nullptr : &limit);
    std::vector<Ready> ready = take_ended();
    for (int i = 0; i < count; ++i) {
      const struct kevent& event = events[static_cast<std::size_t>(i)];
      const auto token = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(event.udata));
      if (token == kWakeToken) continue;
      const bool is_write = event.filter == EVFILT_WRITE;
      ready.push_back(Ready{.token = token, .is_readable = !is_write, .is_writable = is_write});
    }
    return ready;
  }

  void wake() override { (void)change(kWakeIdent, EVFILT_USER, 0, NOTE_TRIGGER, kWakeToken).is_ok(); }

 private:
  static constexpr std::uintptr_t kWakeIdent = 0;

  std::vector<Ready> take_ended() {
    std::lock_guard lock(mutex_);
    return std::exchange(ended_, {});
  }

  Status change(std::uintptr_t ident, int filter, int flags, unsigned int what, std::uint64_t token) {
    struct kevent event{};
    EV_SET(&event, ident, static_cast<std::int16_t>(filter), static_cast<std::uint16_t>(flags), what, 0,
           reinterpret_cast<void*>(static_cast<std::uintptr_t>(token)));
    if (::kevent(queue_.get(), &event, 1, nullptr, 0, nullptr) != 0) return Status::from_errno("kevent", errno);
    return {};
  }

  Descriptor queue_;
  std::mutex mutex_;
  std::map<std::uint64_t, int> processes_;
  std::vector<Ready> ended_;
};

}  // namespace

Result<std::unique_ptr<Poller>> Poller::create() {
  Descriptor queue(::kqueue());
  if (!queue) return Status::from_errno("kqueue", errno);
  if (Status status = set_close_on_exec(queue.get()); !status.is_ok()) return status;
  auto poller = std::make_unique<KqueuePoller>(std::move(queue));
  if (Status status = poller->start(); !status.is_ok()) return status;
  return std::unique_ptr<Poller>(std::move(poller));
}

}  // namespace flodl
