// Links: order, size, descriptors, ends, silence.
#include "flodl/endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"
#include "doctest/doctest.h"
#include "event_log.h"
#include "flodl/frame.h"
#include "flodl/memory.h"
#include "frame_vectors.h"
#include "transport/socket.h"

namespace flodl {
namespace {

using testing::add_link;
using testing::bytes_of;
using testing::ChildProcess;
using testing::EventLog;
using testing::make_endpoint;
using testing::make_socket_pair;
using testing::SocketPair;
using testing::text_of;

constexpr double kNever = 3600.0;

// Two endpoints with one link between them.
struct ConnectedEndpoints {
  explicit ConnectedEndpoints(const EndpointOptions& options = {})
      : a(make_endpoint(options)), b(make_endpoint(options)) {
    SocketPair sockets = make_socket_pair();
    link_a = add_link(*a, std::move(sockets.ours), 1);
    link_b = add_link(*b, std::move(sockets.theirs), 2);
  }
  std::unique_ptr<Endpoint> a;
  std::unique_ptr<Endpoint> b;
  std::uint64_t link_a = 0;
  std::uint64_t link_b = 0;
};

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) count += ::fcntl(descriptor, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

void send_numbers(Endpoint& endpoint, std::uint64_t link, int count) {
  for (int i = 0; i < count; ++i) {
    const Status sent = endpoint.send(link, bytes_of(std::to_string(i)), {});
    if (!sent.is_ok()) FAIL(sent.message());
  }
}

void check_numbers(Endpoint& endpoint, std::uint64_t link, int count) {
  EventLog log(endpoint);
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    if (text_of(log.next(EventKind::message, link).payload) != std::to_string(i)) ++wrong;
  }
  CHECK(wrong == 0);
}

void write_all(int socket, std::span<const std::byte> bytes) {
  REQUIRE(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

// The inode tells whether two descriptors are the same memory.
bool is_same_memory(int descriptor, const SharedMemory& memory) {
  struct stat a{};
  struct stat b{};
  return ::fstat(descriptor, &a) == 0 && ::fstat(memory.descriptor(), &b) == 0 && a.st_ino == b.st_ino;
}

}  // namespace

TEST_CASE("options that make no sense are refused by name") {
  CHECK(Endpoint::create({.heartbeat_s = 0.0}).status().message().find("heartbeat_s") != std::string::npos);
  CHECK(Endpoint::create({.silence_s = -1.0}).status().message().find("silence_s") != std::string::npos);
}

TEST_CASE("a message arrives with its sender's generation") {
  ConnectedEndpoints both;
  REQUIRE(both.a->send(both.link_a, bytes_of("hello"), {}).is_ok());
  REQUIRE(both.b->send(both.link_b, {}, {}).is_ok());
  const Event at_b = EventLog(*both.b).next(EventKind::message, both.link_b);
  CHECK(text_of(at_b.payload) == "hello");
  CHECK(at_b.generation == 1);
  const Event at_a = EventLog(*both.a).next(EventKind::message, both.link_a);
  CHECK(at_a.payload.empty());
  CHECK(at_a.generation == 2);
}

TEST_CASE("10,000 small frames each way keep their order") {
  constexpr int kFrames = 10'000;
  ConnectedEndpoints both;
  std::thread other([&] { send_numbers(*both.b, both.link_b, kFrames); });
  send_numbers(*both.a, both.link_a, kFrames);
  other.join();
  check_numbers(*both.a, both.link_a, kFrames);
  check_numbers(*both.b, both.link_b, kFrames);
}

TEST_CASE("large frames arrive whole, and small ones behind them in order") {
  ConnectedEndpoints both;
  std::string large(std::size_t{32} << 20, 'x');
  large.back() = 'y';
  REQUIRE(both.a->send(both.link_a, bytes_of(large), {}).is_ok());
  REQUIRE(both.a->send(both.link_a, bytes_of("after"), {}).is_ok());
  EventLog log(*both.b);
  const Event first = log.next(EventKind::message, both.link_b);
  CHECK((first.payload.size() == large.size() && text_of(first.payload) == large));
  CHECK(text_of(log.next(EventKind::message, both.link_b).payload) == "after");
  CHECK(both.a->flush(both.link_a, testing::kLongestWait_s).is_ok());
}

TEST_CASE("what does not fit in a frame is refused and the link goes on") {
  ConnectedEndpoints both;
  const std::vector<std::byte> too_long(kMaxFrameBytes + 1);
  CHECK(both.a->send(both.link_a, too_long, {}).code() == Code::invalid_argument);
  const std::vector<int> too_many(kMaxDescriptors + 1, 0);
  CHECK(both.a->send(both.link_a, {}, too_many).code() == Code::invalid_argument);
  const std::vector<int> not_open = {1'000'000};
  CHECK(both.a->send(both.link_a, {}, not_open).code() == Code::invalid_argument);
  CHECK(both.a->send(999, {}, {}).code() == Code::link);
  REQUIRE(both.a->send(both.link_a, bytes_of("fine"), {}).is_ok());
  CHECK(text_of(EventLog(*both.b).next(EventKind::message, both.link_b).payload) == "fine");
}

TEST_CASE("descriptors come with their own frame") {
  ConnectedEndpoints both;
  std::vector<SharedMemory> memories;
  for (int i = 0; i < 3; ++i) memories.push_back(std::move(SharedMemory::create(4096).value()));
  const std::vector<int> one = {memories[0].descriptor()};
  const std::vector<int> two = {memories[1].descriptor(), memories[2].descriptor()};
  const std::string large(std::size_t{2} << 20, 'x');  // makes the later frames wait in the queue
  REQUIRE(both.a->send(both.link_a, bytes_of("none"), {}).is_ok());
  REQUIRE(both.a->send(both.link_a, bytes_of("one"), one).is_ok());
  REQUIRE(both.a->send(both.link_a, bytes_of(large), {}).is_ok());
  REQUIRE(both.a->send(both.link_a, bytes_of(large), two).is_ok());
  REQUIRE(both.a->send(both.link_a, bytes_of("last"), one).is_ok());
  memories[0].data()[0] = std::byte{77};

  EventLog log(*both.b);
  CHECK(log.next(EventKind::message, both.link_b).descriptors.empty());
  const Event second = log.next(EventKind::message, both.link_b);
  REQUIRE(second.descriptors.size() == 1);
  CHECK((::fcntl(second.descriptors[0], F_GETFD) & FD_CLOEXEC) != 0);
  const auto mapped = SharedMemory::adopt(second.descriptors[0], Access::read_only);
  REQUIRE(mapped.is_ok());
  CHECK(mapped.value().data()[0] == std::byte{77});
  CHECK(log.next(EventKind::message, both.link_b).descriptors.empty());
  const Event fourth = log.next(EventKind::message, both.link_b);
  REQUIRE(fourth.descriptors.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    const Descriptor received(fourth.descriptors[i]);
    CHECK(is_same_memory(received.get(), memories[i + 1]));
  }
  const Event last = log.next(EventKind::message, both.link_b);
  REQUIRE(last.descriptors.size() == 1);
  const Descriptor received(last.descriptors[0]);
  CHECK(text_of(last.payload) == "last");
  CHECK(is_same_memory(received.get(), memories[0]));
}

TEST_CASE("nothing stays open behind an endpoint") {
  ChildProcess idle([] {
    testing::sleep_until_killed();
    return 0;
  });
  const std::size_t before = open_descriptors();
  {
    ConnectedEndpoints both;
    const SharedMemory memory = std::move(SharedMemory::create(4096).value());
    const std::vector<int> one = {memory.descriptor()};
    REQUIRE(both.a->send(both.link_a, bytes_of("taken"), {}).is_ok());
    SocketPair unread = make_socket_pair();
    const std::uint64_t stuck = add_link(*both.a, std::move(unread.ours));
    const std::string large(std::size_t{4} << 20, 'x');
    REQUIRE(both.a->send(stuck, bytes_of(large), one).is_ok());
    REQUIRE(both.a->send(stuck, bytes_of("never written"), one).is_ok());
    REQUIRE(both.a->watch_child(idle.pid(), false).is_ok());
    Pipe pipe = std::move(make_pipe().value());
    REQUIRE(both.a->add_stream(pipe.read_end.release()).is_ok());
    EventLog log(*both.b);
    CHECK(text_of(log.next(EventKind::message, both.link_b).payload) == "taken");
    // Received by the I/O thread and never taken from the queue: that it was is seen by its descriptor only.
    const std::size_t without = open_descriptors();
    REQUIRE(both.a->send(both.link_a, bytes_of("never taken"), one).is_ok());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (open_descriptors() == without && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    CHECK(open_descriptors() == without + 1);
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("closing here says so once, as the last event, and the peer sees the end of file") {
  ConnectedEndpoints both;
  const std::size_t before = open_descriptors();
  both.a->close_link(both.link_a);
  both.a->close_link(both.link_a);
  CHECK(both.a->send(both.link_a, {}, {}).code() == Code::link);
  CHECK(both.a->flush(both.link_a, 1.0).code() == Code::link);
  EventLog log(*both.a);
  CHECK(log.next(EventKind::link_closed, both.link_a).reason == "closed here");
  CHECK(EventLog(*both.b).next(EventKind::link_closed, both.link_b).reason == "end of file");
  CHECK(open_descriptors() == before - 2);
  both.a->wake();
  both.a->close_link(both.link_a);
  CHECK(log.next(EventKind::woken, 0).reason.empty());
  CHECK(log.count(EventKind::link_closed) == 0);
}

TEST_CASE("a killed peer's last words arrive before its end") {
  SocketPair sockets = make_socket_pair();
  ChildProcess child([&] {
    sockets.ours.reset();
    const auto head = encode_header({.generation = 9, .length = 5});
    (void)send_bytes(sockets.theirs.get(), head, bytes_of("words"), {});
    testing::sleep_until_killed();
    return 0;
  });
  sockets.theirs.reset();
  const auto endpoint = make_endpoint();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  EventLog log(*endpoint);
  CHECK(text_of(log.next(EventKind::message, link).payload) == "words");
  child.signal(SIGKILL);
  CHECK(log.next(EventKind::link_closed, link).reason == "end of file");
  CHECK(endpoint->send(link, bytes_of("too late"), {}).code() == Code::link);
}

TEST_CASE("writing to a peer that left gives its last words first, and no SIGPIPE") {
  const auto endpoint = make_endpoint();
  SocketPair sockets = make_socket_pair();
  const auto head = encode_header({.length = 3});
  REQUIRE(send_bytes(sockets.theirs.get(), head, bytes_of("bye"), {}).error == 0);
  sockets.theirs.reset();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  CHECK(endpoint->send(link, bytes_of("hello?"), {}).code() == Code::link);
  EventLog log(*endpoint);
  CHECK(text_of(log.next(EventKind::message, link).payload) == "bye");
  log.next(EventKind::link_closed, link);
  endpoint->wake();
  log.next(EventKind::woken, 0);
  CHECK(log.count(EventKind::link_closed) == 0);
}

TEST_CASE("a peer that reads no more, but stays, is closed when a write finds out") {
  const auto endpoint = make_endpoint();
  EventLog log(*endpoint);
  for (int i = 0; i < 100; ++i) {
    SocketPair sockets = make_socket_pair();
    const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
    REQUIRE(::shutdown(sockets.theirs.get(), SHUT_RD) == 0);
    for (int again = 0; again < 3; ++again) CHECK(endpoint->send(link, bytes_of("hello?"), {}).code() == Code::link);
    CHECK(log.next(EventKind::link_closed, link).reason.find("sending: ") != std::string::npos);
  }
  endpoint->wake();
  log.next(EventKind::woken, 0);
  CHECK(log.count(EventKind::link_closed) == 0);  // one each
}

TEST_CASE("an end of file inside a frame is named") {
  const auto endpoint = make_endpoint();
  SocketPair sockets = make_socket_pair();
  const auto head = encode_header({.length = 3});
  write_all(sockets.theirs.get(), head);
  sockets.theirs.reset();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  CHECK(EventLog(*endpoint).next(EventKind::link_closed, link).reason == "end of file inside a frame");
}

TEST_CASE("a peer that sends nonsense loses its own link only") {
  const auto endpoint = make_endpoint();
  SocketPair good = make_socket_pair();
  const std::uint64_t good_link = add_link(*endpoint, std::move(good.ours));
  EventLog log(*endpoint);
  int bad_vectors = 0;
  for (const auto& vector : testing::read_frame_vectors(FLODL_VECTORS_DIR "/wire/frames.txt")) {
    if (!vector.end.starts_with("error: ")) continue;
    CAPTURE(vector.name);
    ++bad_vectors;
    SocketPair bad = make_socket_pair();
    const std::uint64_t bad_link = add_link(*endpoint, std::move(bad.ours));
    write_all(bad.theirs.get(), vector.bytes);
    for (std::size_t i = 0; i < vector.frames.size(); ++i) log.next(EventKind::message, bad_link);
    const Event closed = log.next(EventKind::link_closed, bad_link);
    CHECK_MESSAGE(closed.reason.find(vector.end.substr(7)) != std::string::npos, closed.reason);
  }
  CHECK(bad_vectors > 10);
  const auto head = encode_header({.length = 5});
  REQUIRE(send_bytes(good.theirs.get(), head, bytes_of("still"), {}).error == 0);
  CHECK(text_of(log.next(EventKind::message, good_link).payload) == "still");
  CHECK(log.count(EventKind::link_closed) == 0);
}

TEST_CASE("descriptors that do not match their frames close the link, and are closed") {
  const auto plain = encode_header({});
  const auto announces = encode_header({.descriptors = 1});
  const auto endpoint = make_endpoint();
  const auto closed_with = [&](std::span<const std::byte> head, const std::vector<int>& descriptors) {
    EventLog log(*endpoint);  // closes what it got
    SocketPair sockets = make_socket_pair();
    const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
    REQUIRE(send_bytes(sockets.theirs.get(), head, {}, descriptors).error == 0);
    return log.next(EventKind::link_closed, link).reason;
  };
  const std::size_t before = open_descriptors();
  CHECK(closed_with(announces, {}) == "frame announces 1 descriptors, 0 came");
  CHECK(closed_with(plain, {0}) == "1 descriptors came that no frame announces");
  CHECK(closed_with(announces, {0, 1}) == "1 descriptors came that no frame announces");
  CHECK(open_descriptors() == before);
}

TEST_CASE("what is no stream socket is refused and closed") {
  const auto endpoint = make_endpoint();
  const std::size_t before = open_descriptors();
  {
    SocketPair datagrams = make_socket_pair(SOCK_DGRAM);
    CHECK(endpoint->add_link(datagrams.ours.release(), 0).status().code() == Code::invalid_argument);
  }
  Pipe pipe = std::move(make_pipe().value());
  CHECK_FALSE(endpoint->add_link(pipe.read_end.release(), 0).is_ok());
  pipe.write_end.reset();
  CHECK_FALSE(endpoint->add_link(-1, 0).is_ok());
  CHECK(open_descriptors() == before);
}

TEST_CASE("flush waits for the kernel, not for ever") {
  const auto endpoint = make_endpoint();
  SocketPair sockets = make_socket_pair();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  CHECK(endpoint->flush(link, 0.0).is_ok());
  const std::string large(std::size_t{4} << 20, 'x');
  REQUIRE(endpoint->send(link, bytes_of(large), {}).is_ok());
  CHECK(endpoint->flush(link, 0.02).code() == Code::state);
  std::thread reader([&] {
    std::vector<std::byte> buffer(1 << 16);
    std::size_t total = 0;
    while (total < large.size() + kFrameHeaderBytes) {
      const ssize_t bytes = ::read(sockets.theirs.get(), buffer.data(), buffer.size());
      if (bytes <= 0) return;
      total += static_cast<std::size_t>(bytes);
    }
  });
  CHECK(endpoint->flush(link, testing::kLongestWait_s).is_ok());
  reader.join();
  REQUIRE(endpoint->send(link, bytes_of(large), {}).is_ok());
  sockets.theirs.reset();
  CHECK(endpoint->flush(link, testing::kLongestWait_s).code() == Code::link);
}

TEST_CASE("a peer that never reads cannot fill this process") {
  const auto endpoint = make_endpoint();
  SocketPair sockets = make_socket_pair();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  const std::string large(std::size_t{48} << 20, 'x');
  Status sent;
  int accepted = 0;
  while (sent.is_ok() && accepted < 100) {
    sent = endpoint->send(link, bytes_of(large), {});
    if (sent.is_ok()) ++accepted;
  }
  CHECK(accepted == 5);
  CHECK(sent.code() == Code::link);
  CHECK(sent.message().find("link " + std::to_string(link)) != std::string::npos);
  CHECK(endpoint->flush(link, 0.0).code() == Code::state);  // still open
}

TEST_CASE("an idle peer is kept alive by heartbeats alone") {
  // The judge's silence is three heartbeats of the peer; the test sees two of them pass.
  const auto judge = make_endpoint({.heartbeat_s = kNever, .silence_s = 1.2});
  const auto peer = make_endpoint({.heartbeat_s = 0.1});
  SocketPair quiet = make_socket_pair();
  SocketPair idle = make_socket_pair();
  const std::uint64_t idle_link = add_link(*judge, std::move(idle.ours));
  add_link(*peer, std::move(idle.theirs));
  // Nobody sends here: the clock of this test.
  const std::uint64_t quiet_link = add_link(*judge, std::move(quiet.ours));
  EventLog log(*judge);
  CHECK(log.next(EventKind::link_silent, quiet_link).seconds >= 1.2);
  CHECK_FALSE(log.find([&](const Event& e) { return e.id == idle_link; }, 1.3).has_value());
  CHECK(log.count(EventKind::link_silent) == 0);
  CHECK(log.count(EventKind::message) == 0);
}

TEST_CASE("a peer that never says a word is reported without anything else happening") {
  const auto endpoint = make_endpoint({.heartbeat_s = kNever, .silence_s = 0.1});
  SocketPair sockets = make_socket_pair();
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  CHECK(EventLog(*endpoint).next(EventKind::link_silent, link).seconds >= 0.1);
}

TEST_CASE("a judge that was stopped does not blame its peers") {
  SocketPair sockets = make_socket_pair();
  ChildProcess judge([&] {
    sockets.theirs.reset();
    auto endpoint = Endpoint::create({.heartbeat_s = kNever, .silence_s = 0.3});
    if (!endpoint.is_ok() || !endpoint.value()->add_link(sockets.ours.release(), 0).is_ok()) return 1;
    ::raise(SIGSTOP);
    const std::vector<Event> events = endpoint.value()->wait(testing::kLongestWait_s);
    if (events.size() != 1 || events[0].kind != EventKind::link_silent) return 2;
    return events[0].seconds < 2.0 ? 0 : 3;  // counted from when it ran again
  });
  REQUIRE(::waitpid(judge.pid(), nullptr, WUNTRACED) == judge.pid());
  // How long it stands still is what is tested: beyond its silence, by more than a second.
  pollfd nothing{sockets.theirs.get(), POLLIN, 0};
  CHECK(::poll(&nothing, 1, 2500) == 0);
  judge.signal(SIGCONT);
  const int status = judge.wait_for_end();
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a stopped peer falls silent once and is heard again") {
  SocketPair sockets = make_socket_pair();
  ChildProcess child([&] {
    sockets.ours.reset();
    auto endpoint = Endpoint::create({.heartbeat_s = 0.05});
    if (!endpoint.is_ok() || !endpoint.value()->add_link(sockets.theirs.release(), 0).is_ok()) return 1;
    testing::sleep_until_killed();
    return 0;
  });
  sockets.theirs.reset();
  const auto endpoint = make_endpoint({.heartbeat_s = 0.1, .silence_s = 0.3});
  const std::uint64_t link = add_link(*endpoint, std::move(sockets.ours));
  EventLog log(*endpoint);
  child.signal(SIGSTOP);
  CHECK(log.next(EventKind::link_silent, link).seconds >= 0.3);
  child.signal(SIGCONT);
  CHECK(log.next(EventKind::link_heard, link).seconds >= 0.3);
  child.signal(SIGSTOP);
  CHECK(log.next(EventKind::link_silent, link).seconds >= 0.3);
  child.signal(SIGKILL);
  log.next(EventKind::link_closed, link);
}

TEST_CASE("many threads may send on one link") {
  constexpr int kThreads = 4;
  constexpr int kFrames = 500;
  ConnectedEndpoints both;
  std::vector<std::thread> senders;
  for (int i = 0; i < kThreads; ++i) {
    senders.emplace_back([&] { send_numbers(*both.a, both.link_a, kFrames); });
  }
  for (std::thread& sender : senders) sender.join();
  EventLog log(*both.b);
  std::vector<int> seen(kFrames, 0);
  for (int i = 0; i < kThreads * kFrames; ++i) {
    ++seen[static_cast<std::size_t>(std::stoi(text_of(log.next(EventKind::message, both.link_b).payload)))];
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == kThreads; }));
}

TEST_CASE("wait ends at its deadline, at wake, and gives what tasks post") {
  const auto endpoint = make_endpoint();
  CHECK(endpoint->wait(0.0).empty());
  CHECK(endpoint->wait(-1.0).empty());
  std::thread other([&] {
    endpoint->wake();
    endpoint->queue().post(Event{.kind = EventKind::task_done, .id = 5});
  });
  EventLog log(*endpoint);
  CHECK(log.next(EventKind::task_done, 5).reason.empty());
  CHECK(log.count(EventKind::woken) == 1);
  other.join();
}

}  // namespace flodl
