// A host memory whose tasks are run to their end, and ranks in processes of their own.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "averager_reference.h"
#include "doctest/doctest.h"
#include "flodl/host_memory.h"

namespace flodl::test {

// ---- a host, and tasks run to their end ----

inline void wait_for(EventQueue& queue, std::uint64_t task) {
  const auto deadline = EventQueue::Clock::now() + std::chrono::seconds(60);
  const std::vector<Event> events = queue.wait_until(deadline);
  REQUIRE(events.size() == 1);
  REQUIRE(events[0].kind == EventKind::task_done);
  REQUIRE(events[0].id == task);
  REQUIRE(events[0].reason.empty());
}

struct Host {
  EventQueue queue;
  Layout layout;
  std::unique_ptr<HostMemory> memory;
  std::uint64_t tasks = 0;

  explicit Host(const Layout& shape, const OuterSettings& outer = {}, std::size_t threads = 2) : layout(shape) {
    auto made = HostMemory::create(layout, outer, threads, queue);
    REQUIRE_MESSAGE(made.is_ok(), made.status().message());
    memory = std::move(made.value());
  }

  std::uint64_t open() {
    const auto opened = memory->open_rank();
    REQUIRE_MESSAGE(opened.is_ok(), opened.status().message());
    return opened.value();
  }

  // What a rank of this process would do: through its own mapping.
  std::uint64_t open_with(const Image& image) {
    const std::uint64_t rank = open();
    write(rank, image);
    return rank;
  }
  void write(std::uint64_t rank, const Image& image) {
    auto mapped = SharedMemory::adopt(memory->rank_descriptor(rank).value(), Access::read_write);
    REQUIRE(mapped.is_ok());
    REQUIRE(mapped.value().size() == kRankPageBytes + layout.bytes);
    std::memcpy(mapped.value().data() + kRankPageBytes, image.data(), image.size());
  }

  ReduceResult reduce(const std::vector<Contribution>& contributions) {
    const std::uint64_t task = ++tasks;
    const Status started = memory->start_reduce(task, contributions);
    REQUIRE_MESSAGE(started.is_ok(), started.message());
    wait_for(queue, task);
    const auto result = memory->reduce_result();
    REQUIRE(result.is_ok());
    CHECK(result.value().task == task);
    return result.value();
  }
  CommitResult commit(bool is_seed, float momentum_share = 1.0f) {
    const std::uint64_t task = ++tasks;
    const Status started = memory->start_commit(task, is_seed, momentum_share);
    REQUIRE_MESSAGE(started.is_ok(), started.message());
    wait_for(queue, task);
    const auto result = memory->commit_result();
    REQUIRE(result.is_ok());
    CHECK(result.value().task == task);
    return result.value();
  }

  bool pending_is(const Image& image) const { return is(1 - memory->committed(), image); }
  bool committed_is(const Image& image) const { return is(memory->committed(), image); }
  bool is(int buffer, const Image& image) const {
    return std::memcmp(memory->buffer(buffer), image.data(), image.size()) == 0;
  }
};

// A field of /proc/self/status, such as "VmRSS:"; 0 where there is none.
inline std::size_t memory_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0) return std::stoul(line.substr(field.size()));
  }
  return 0;
}

// ---- a rank in a process of its own ----

// Forked at once, before anything starts a thread; then does as it is told through a socket pair.
class Writer {
 public:
  Writer() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(ends[0]);
      serve(ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    socket_ = ends[0];
  }
  ~Writer() { kill(); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  struct Order {
    std::uint64_t seed;
    std::uint64_t bytes;  // of the layout's image to write before reporting
    Section section;      // the layout has this one only
  };

  // Sends the rank's memory and waits until the child has written as much as ordered.
  void write(Host& host, std::uint64_t rank, const Order& order) {
    const int descriptor = host.memory->rank_descriptor(rank).value();
    send(order, descriptor);
    ::close(descriptor);
    char answer = 0;
    REQUIRE(::read(socket_, &answer, 1) == 1);
    REQUIRE(answer == 's');
  }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(pid_, &status, 0) == pid_);
    pid_ = 0;
    ::close(socket_);
  }

 private:
  union Control {
    cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
  };

  void send(const Order& order, int descriptor) const {
    Control control{};
    iovec part{const_cast<Order*>(&order), sizeof order};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.space;
    message.msg_controllen = sizeof control.space;
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(&control.header), &descriptor, sizeof(int));
    REQUIRE(::sendmsg(socket_, &message, 0) == static_cast<ssize_t>(sizeof order));
  }

  // The child's life: an order, memory, a report, until the socket closes or somebody kills it.
  static void serve(int socket) {
    while (true) {
      Order order{};
      Control control{};
      iovec part{&order, sizeof order};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control.space;
      message.msg_controllen = sizeof control.space;
      if (::recvmsg(socket, &message, MSG_WAITALL) != static_cast<ssize_t>(sizeof order)) return;
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(&control.header), sizeof(int));
      auto mapped = SharedMemory::adopt(descriptor, Access::read_write);
      if (!mapped.is_ok()) return;
      obey(order, mapped.value());
      if (::write(socket, "s", 1) != 1) return;
    }
  }

  static void obey(const Order& order, const SharedMemory& memory) {
    auto* page = reinterpret_cast<RankPage*>(memory.data());
    page->steps_started.fetch_add(1);
    std::byte* image = memory.data() + kRankPageBytes;
    for (std::uint64_t i = 0; i < order.bytes / bytes_of(order.section.dtype); ++i) {
      store(image, order.section.dtype, i, value_of(order.section, noise(order.seed, 0, i)));
    }
    page->steps_finished.fetch_add(1);
  }

  pid_t pid_ = 0;
  int socket_ = -1;
};

}  // namespace flodl::test
