#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "core/descriptor.h"
#include "transport/poller.h"

namespace flodl {
namespace {

constexpr std::uint64_t kWakeToken = 0;
#if defined(SYS_pidfd_open)
constexpr long kPidfdOpen = SYS_pidfd_open;
#else
constexpr long kPidfdOpen = 434;  // the same on every architecture; older headers do not name it
#endif

// Rounded up, so that a wait never ends just before its deadline and spins to it.
int milliseconds_of(std::chrono::nanoseconds timeout) {
  if (timeout.count() < 0) return -1;
  const auto rounded = std::chrono::ceil<std::chrono::milliseconds>(timeout).count();
  return static_cast<int>(std::min<std::int64_t>(rounded, std::numeric_limits<int>::max()));
}

class EpollPoller : public Poller {
 public:
  EpollPoller(Descriptor epoll, Descriptor waker) : epoll_(std::move(epoll)), waker_(std::move(waker)) {}

  Status add(int descriptor, std::uint64_t token) override {
    return control(EPOLL_CTL_ADD, descriptor, EPOLLIN, token);
  }

  Status watch_writes(int descriptor, std::uint64_t token, bool wanted) override {
    return control(EPOLL_CTL_MOD, descriptor, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN, token);
  }

  void remove(int descriptor) override { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr); }

  Status add_process(int pid, std::uint64_t token) override {
    Descriptor process(static_cast<int>(::syscall(kPidfdOpen, pid, 0)));
    if (!process) return Status::from_errno("pidfd_open (Linux 5.3 or later)", errno);
    std::lock_guard lock(mutex_);
    if (Status status = add(process.get(), token); !status.is_ok()) return status;
    processes_.emplace(token, std::move(process));
    return {};
  }

  void remove_process(std::uint64_t token) override {
    std::lock_guard lock(mutex_);
    const auto found = processes_.find(token);
    if (found == processes_.end()) return;
    remove(found->second.get());
    processes_.erase(found);
  }

  std::vector<Ready> wait(std::chrono::nanoseconds timeout) override {
    std::array<epoll_event, 64> events;
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds_of(timeout));
    std::vector<Ready> ready;
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kWakeToken) {
        std::uint64_t wakes = 0;
        (void)!::read(waker_.get(), &wakes, sizeof wakes);
        continue;
      }
      ready.push_back(Ready{.token = event.data.u64,
                            .is_readable = (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0,
                            .is_writable = (event.events & EPOLLOUT) != 0});
    }
    return ready;
  }

  void wake() override {
    const std::uint64_t one = 1;
    (void)!::write(waker_.get(), &one, sizeof one);  // EAGAIN: it is awake already
  }

 private:
  Status control(int operation, int descriptor, std::uint32_t events, std::uint64_t token) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = token;
    if (::epoll_ctl(epoll_.get(), operation, descriptor, &event) != 0) return Status::from_errno("epoll_ctl", errno);
    return {};
  }

  Descriptor epoll_;
  Descriptor waker_;
  std::mutex mutex_;
  std::map<std::uint64_t, Descriptor> processes_;
};

}  // namespace

Result<std::unique_ptr<Poller>> Poller::create() {
  Descriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return Status::from_errno("epoll_create1", errno);
  Descriptor waker(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!waker) return Status::from_errno("eventfd", errno);
  const int waker_number = waker.get();
  auto poller = std::make_unique<EpollPoller>(std::move(epoll), std::move(waker));
  if (Status status = poller->add(waker_number, kWakeToken); !status.is_ok()) return status;
  return std::unique_ptr<Poller>(std::move(poller));
}

}  // namespace flodl
