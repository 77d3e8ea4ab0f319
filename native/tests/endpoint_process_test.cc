// Children, lifelines, pipes and signals.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "child_process.h"
#include "doctest/doctest.h"
#include "event_log.h"
#include "flodl/endpoint.h"

namespace flodl {
namespace {

using testing::add_link;
using testing::ChildProcess;
using testing::EventLog;
using testing::make_endpoint;
using testing::make_socket_pair;
using testing::SocketPair;
using testing::text_of;

int exit_status(Endpoint& endpoint, EventLog& log, ChildProcess& child, bool kills_group = false) {
  const Status watched = endpoint.watch_child(child.pid(), kills_group);
  REQUIRE_MESSAGE(watched.is_ok(), watched.message());
  return log.next(EventKind::child_exited, static_cast<std::uint64_t>(child.release())).status;
}

// Waits for a byte, so that the parent knows that the child came this far.
void expect_byte(int descriptor) {
  char byte = 0;
  REQUIRE(::read(descriptor, &byte, 1) == 1);
}

void write_byte(int descriptor) {
  const char byte = '.';
  (void)!::write(descriptor, &byte, 1);
}

Pipe new_pipe() {
  Result<Pipe> pipe = make_pipe();
  REQUIRE(pipe.is_ok());
  return std::move(pipe.value());
}

}  // namespace

TEST_CASE("exit codes and signals of children are reported") {
  ChildProcess fine([] { return 0; });
  ChildProcess seven([] { return 7; });
  ChildProcess killed([] {
    testing::sleep_until_killed();
    return 0;
  });
  ChildProcess aborted([] {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    ::signal(SIGABRT, SIG_DFL);
    ::raise(SIGABRT);
    return 0;
  });
  const auto endpoint = make_endpoint();
  EventLog log(*endpoint);
  CHECK(exit_status(*endpoint, log, fine) == 0);
  CHECK(exit_status(*endpoint, log, seven) == 7);
  REQUIRE(endpoint->watch_child(killed.pid(), false).is_ok());
  CHECK(endpoint->watch_child(killed.pid(), false).code() == Code::state);
  killed.signal(SIGKILL);
  CHECK(log.next(EventKind::child_exited, static_cast<std::uint64_t>(killed.release())).status == -SIGKILL);
  CHECK(exit_status(*endpoint, log, aborted) == -SIGABRT);
}

TEST_CASE("a child that exited before it was watched is reported and reaped") {
  ChildProcess child([] { return 3; });
  siginfo_t about{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(child.pid()), &about, WEXITED | WNOWAIT) == 0);
  const auto endpoint = make_endpoint();
  EventLog log(*endpoint);
  const int pid = child.pid();
  CHECK(exit_status(*endpoint, log, child) == 3);
  CHECK(::waitpid(pid, nullptr, WNOHANG) < 0);
}

TEST_CASE("a child that is stopped before it ever spoke is reported, and can be continued") {
  SocketPair line = make_socket_pair();
  ChildProcess child([&] {
    line.ours.reset();
    testing::is_end_of_file(line.theirs.get());
    return 4;
  });
  line.theirs.reset();
  auto endpoint = Endpoint::create({.heartbeat_s = 0.02, .silence_s = 0.1});
  REQUIRE(endpoint.is_ok());
  EventLog log(*endpoint.value());
  const auto link = endpoint.value()->add_link(line.ours.release(), 0);
  REQUIRE(link.is_ok());
  REQUIRE(endpoint.value()->watch_child(child.pid(), false).is_ok());
  child.signal(SIGSTOP);
  CHECK(log.next(EventKind::child_stopped, static_cast<std::uint64_t>(child.pid())).seconds >= 0.1);
  child.signal(SIGCONT);
  endpoint.value()->close_link(link.value());
  CHECK(log.next(EventKind::child_exited, static_cast<std::uint64_t>(child.release())).status == 4);
}

TEST_CASE("what is no child cannot be watched") {
  ChildProcess child([] { return 0; });
  const int pid = child.pid();
  child.wait_for_end();
  const auto endpoint = make_endpoint();
  CHECK(endpoint->watch_child(pid, true).code() == Code::system);
  CHECK(endpoint->watch_child(::getppid(), true).code() != Code::ok);
  for (const int nobody : {1, 0, -1}) CHECK(endpoint->watch_child(nobody, true).code() == Code::invalid_argument);
}

TEST_CASE("what a child had started ends with its group") {
  Pipe alive = new_pipe();  // held by the grandchild; its end of file is the grandchild's end
  ChildProcess child([&] {
    ::setsid();
    if (::fork() == 0) {
      write_byte(alive.write_end.get());
      testing::sleep_until_killed();
    }
    alive.write_end.reset();
    testing::sleep_until_killed();
    return 0;
  });
  alive.write_end.reset();
  expect_byte(alive.read_end.get());
  const auto endpoint = make_endpoint();
  EventLog log(*endpoint);
  REQUIRE(endpoint->watch_child(child.pid(), true).is_ok());
  child.signal(SIGKILL);
  CHECK(log.next(EventKind::child_exited, static_cast<std::uint64_t>(child.release())).status == -SIGKILL);
  CHECK(testing::is_end_of_file(alive.read_end.get()));
}

TEST_CASE("without being asked, nothing but the child ends") {
  Pipe alive = new_pipe();
  Pipe orders = new_pipe();
  ChildProcess child([&] {
    ::setsid();
    orders.write_end.reset();
    if (::fork() != 0) return 0;
    testing::is_end_of_file(orders.read_end.get());
    write_byte(alive.write_end.get());  // it lived on until told
    return 0;
  });
  alive.write_end.reset();
  const auto endpoint = make_endpoint();
  EventLog log(*endpoint);
  CHECK(exit_status(*endpoint, log, child, false) == 0);
  orders.write_end.reset();
  expect_byte(alive.read_end.get());
  CHECK(testing::is_end_of_file(alive.read_end.get()));
}

TEST_CASE("at the end of its lifeline a process and all it started are gone, whatever its threads do") {
  SocketPair line = make_socket_pair();
  Pipe alive = new_pipe();
  ChildProcess child([&] {
    ::setsid();
    line.ours.reset();
    if (::fork() == 0) {
      line.theirs.reset();
      testing::sleep_until_killed();
    }
    auto endpoint = Endpoint::create({});
    if (!endpoint.is_ok()) return 1;
    const Result<std::uint64_t> link = endpoint.value()->add_link(line.theirs.release(), 0);
    if (!link.is_ok() || !endpoint.value()->set_lifeline(link.value()).is_ok()) return 2;
    write_byte(alive.write_end.get());
    testing::sleep_until_killed();  // the main thread never looks at its endpoint
    return 3;
  });
  line.theirs.reset();
  alive.write_end.reset();
  expect_byte(alive.read_end.get());
  line.ours.reset();
  CHECK(testing::is_end_of_file(alive.read_end.get()));
  const int status = child.wait_for_end();
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
}

TEST_CASE("a lifeline ends nobody else's group") {
  SocketPair line = make_socket_pair();
  Pipe sibling_pipe = new_pipe();
  // The child stays in this test's own group. Were that killed, this test would be, too.
  ChildProcess child([&] {
    line.ours.reset();
    sibling_pipe.read_end.reset();
    auto endpoint = Endpoint::create({});
    if (!endpoint.is_ok()) return 1;
    const Result<std::uint64_t> link = endpoint.value()->add_link(line.theirs.release(), 0);
    if (!link.is_ok() || !endpoint.value()->set_lifeline(link.value()).is_ok()) return 2;
    write_byte(sibling_pipe.write_end.get());
    testing::sleep_until_killed();
    return 3;
  });
  line.theirs.reset();
  sibling_pipe.write_end.reset();
  expect_byte(sibling_pipe.read_end.get());
  line.ours.reset();
  const int status = child.wait_for_end();
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
}

TEST_CASE("a lifeline that is closed here is no end") {
  const auto endpoint = make_endpoint();
  SocketPair line = make_socket_pair();
  const std::uint64_t link = add_link(*endpoint, std::move(line.ours));
  REQUIRE(endpoint->set_lifeline(link).is_ok());
  endpoint->close_link(link);
  EventLog log(*endpoint);
  CHECK(log.next(EventKind::link_closed, link).reason == "closed here");
  CHECK(endpoint->set_lifeline(link).code() == Code::link);
}

TEST_CASE("a stream gives the bytes of a pipe, then its end") {
  const auto endpoint = make_endpoint();
  Pipe pipe = new_pipe();
  const Result<std::uint64_t> stream = endpoint->add_stream(pipe.read_end.release());
  REQUIRE(stream.is_ok());
  EventLog log(*endpoint);
  REQUIRE(::write(pipe.write_end.get(), "line\n", 5) == 5);
  CHECK(text_of(log.next(EventKind::stream_data, stream.value()).payload) == "line\n");
  pipe.write_end.reset();
  log.next(EventKind::stream_closed, stream.value());
  CHECK_FALSE(endpoint->add_stream(-1).is_ok());
}

TEST_CASE("a stream that nobody takes holds up its writer and loses nothing") {
  constexpr std::size_t kFarTooMuch = std::size_t{24} << 20;
  const auto endpoint = make_endpoint();
  Pipe pipe = new_pipe();
  REQUIRE(set_non_blocking(pipe.write_end.get()).is_ok());
  const Result<std::uint64_t> stream = endpoint->add_stream(pipe.read_end.release());
  REQUIRE(stream.is_ok());
  // Whether the pipe takes bytes again within a time in which an unheld reader empties it many times over.
  const auto takes_bytes = [&](int timeout_ms) {
    pollfd writable{pipe.write_end.get(), POLLOUT, 0};
    return ::poll(&writable, 1, timeout_ms) == 1;
  };
  const std::string chunk(std::size_t{64} << 10, 'x');
  std::size_t written = 0;
  while (written < kFarTooMuch && takes_bytes(300)) {
    const ssize_t bytes = ::write(pipe.write_end.get(), chunk.data(), chunk.size());
    if (bytes > 0) written += static_cast<std::size_t>(bytes);
  }
  CHECK(written < kFarTooMuch);

  EventLog log(*endpoint);
  std::size_t taken = 0;
  const auto take_one = [&] {
    const Event data = log.next(EventKind::stream_data, stream.value());
    CHECK(data.payload.size() <= chunk.size());
    taken += data.payload.size();
  };
  take_one();
  CHECK(takes_bytes(static_cast<int>(testing::kLongestWait_s * 1000)));
  pipe.write_end.reset();
  while (taken < written) take_one();
  CHECK(taken == written);
  log.next(EventKind::stream_closed, stream.value());
}

TEST_CASE("each byte on the signal descriptor is a signal event") {
  const auto endpoint = make_endpoint();
  const unsigned char numbers[] = {SIGINT, SIGTERM, SIGCHLD};
  REQUIRE(::write(endpoint->signal_descriptor(), numbers, sizeof numbers) == sizeof numbers);
  EventLog log(*endpoint);
  for (const unsigned char number : numbers) log.next(EventKind::signal, number);
  CHECK((::fcntl(endpoint->signal_descriptor(), F_GETFL) & O_NONBLOCK) != 0);
}

TEST_CASE("a forked child lets go of an endpoint without disturbing its parent") {
  // The child is forked while the I/O thread runs, as a data loader's worker is; it only destroys its copy.
  auto endpoint = make_endpoint();
  SocketPair sockets = make_socket_pair();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  ChildProcess child([&] {
    endpoint.reset();
    return 0;
  });
  CHECK(child.wait_for_end() == 0);
  const auto peer = make_endpoint();
  const std::uint64_t peer_link = add_link(*peer, std::move(sockets.theirs));
  REQUIRE(peer->send(peer_link, testing::bytes_of("still here"), {}).is_ok());
  CHECK(text_of(EventLog(*endpoint).next(EventKind::message, link).payload) == "still here");
}

}  // namespace flodl
