#include "flodl/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "child_process.h"
#include "core/available_memory.h"
#include "doctest/doctest.h"
#include "transport/socket.h"

namespace flodl {
namespace {

using testing::ChildProcess;

SharedMemory created(std::size_t bytes) {
  Result<SharedMemory> memory = SharedMemory::create(bytes);
  REQUIRE_MESSAGE(memory.is_ok(), memory.status().message());
  return std::move(memory.value());
}

SharedMemory adopted(Result<int> descriptor, Access access) {
  REQUIRE_MESSAGE(descriptor.is_ok(), descriptor.status().message());
  Result<SharedMemory> memory = SharedMemory::adopt(descriptor.value(), access);
  REQUIRE_MESSAGE(memory.is_ok(), memory.status().message());
  return std::move(memory.value());
}

bool is_open(int descriptor) { return ::fcntl(descriptor, F_GETFD) >= 0; }

void send_descriptor(int socket, int descriptor) {
  const std::byte byte{1};
  const Sent sent = send_bytes(socket, std::span(&byte, 1), {}, std::span(&descriptor, 1));
  REQUIRE(sent.bytes == 1);
}

Descriptor receive_descriptor(int socket) {
  std::byte byte{};
  Received received = receive_bytes(socket, std::span(&byte, 1));
  if (received.descriptors.size() != 1) std::abort();
  return std::move(received.descriptors.front());
}

}  // namespace

static_assert(!std::is_copy_constructible_v<SharedMemory>);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "a rank page is shared between processes");

TEST_CASE("new memory is zero, of the asked size, and writable") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{1'000'003}}) {
    CAPTURE(bytes);
    const SharedMemory memory = created(bytes);
    CHECK(memory.size() == bytes);
    CHECK(std::all_of(memory.data(), memory.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
    std::memset(memory.data(), 0x5A, bytes);
    CHECK(memory.data()[bytes - 1] == std::byte{0x5A});
  }
}

TEST_CASE("a writable duplicate is the same memory") {
  const SharedMemory memory = created(4096);
  const SharedMemory other = adopted(memory.duplicate(Access::read_write), Access::read_write);
  CHECK(other.size() == memory.size());
  other.data()[17] = std::byte{42};
  CHECK(memory.data()[17] == std::byte{42});
}

TEST_CASE("a read-only duplicate sees every write and makes none") {
  const SharedMemory memory = created(4096);
  const SharedMemory reader = adopted(memory.duplicate(Access::read_only), Access::read_only);
  memory.data()[5] = std::byte{9};
  CHECK(reader.data()[5] == std::byte{9});

  const int descriptor = reader.descriptor();
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) == MAP_FAILED);
  CHECK(errno == EACCES);
  CHECK(::mprotect(reader.data(), 4096, PROT_READ | PROT_WRITE) != 0);
  CHECK(::pwrite(descriptor, "x", 1, 0) < 0);
  CHECK(::ftruncate(descriptor, 0) != 0);
  CHECK_FALSE(SharedMemory::adopt(::dup(descriptor), Access::read_write).is_ok());
  CHECK(reader.duplicate(Access::read_write).status().code() == Code::state);
  const SharedMemory second = adopted(reader.duplicate(Access::read_only), Access::read_only);
  CHECK(second.data()[5] == std::byte{9});
  CHECK(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, second.descriptor(), 0) == MAP_FAILED);
}

#if defined(__linux__)
TEST_CASE("nobody can shrink memory under another's mapping") {
  const SharedMemory memory = created(8192);
  CHECK(::ftruncate(memory.descriptor(), 4096) != 0);
  CHECK(::ftruncate(memory.descriptor(), 16384) != 0);
  CHECK(errno == EPERM);
}

TEST_CASE("a reader without privileges cannot reopen its descriptor for writing") {
  constexpr uid_t kNobody = 65534;
  ChildProcess child([] {
    if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0) return 2;
    Result<SharedMemory> memory = SharedMemory::create(4096);
    if (!memory.is_ok()) return 3;
    Result<int> reader = memory.value().duplicate(Access::read_only);
    if (!reader.is_ok()) return 4;
    const std::string path = "/proc/self/fd/" + std::to_string(reader.value());
    return ::open(path.c_str(), O_RDWR | O_CLOEXEC) < 0 && errno == EACCES ? 0 : 1;
  });
  CHECK(child.wait_for_end() == 0);
}
#endif

TEST_CASE("memory outlives its creator's object") {
  Result<int> descriptor = Status();
  {
    const SharedMemory memory = created(4096);
    memory.data()[0] = std::byte{7};
    descriptor = memory.duplicate(Access::read_only);
  }
  CHECK(adopted(descriptor, Access::read_only).data()[0] == std::byte{7});
}

TEST_CASE("descriptors are close-on-exec and close with the object") {
  int first = -1;
  {
    const SharedMemory memory = created(64);
    first = memory.descriptor();
    for (const Access access : {Access::read_only, Access::read_write}) {
      const SharedMemory copy = adopted(memory.duplicate(access), access);
      CHECK((::fcntl(copy.descriptor(), F_GETFD) & FD_CLOEXEC) != 0);
    }
    CHECK((::fcntl(first, F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK_FALSE(is_open(first));
}

TEST_CASE("moving keeps the mapping and empties the source") {
  SharedMemory first = created(4096);
  std::byte* const address = first.data();
  SharedMemory second(std::move(first));
  CHECK(second.data() == address);
  CHECK(first.data() == nullptr);
  CHECK(first.prefault().code() == Code::state);
  CHECK(first.duplicate(Access::read_only).status().code() == Code::state);
  SharedMemory third = created(64);
  const int third_descriptor = third.descriptor();
  third = std::move(second);
  CHECK(third.data() == address);
  CHECK_FALSE(is_open(third_descriptor));
  third.data()[0] = std::byte{1};
}

TEST_CASE("what cannot be memory is refused, and its descriptor closed") {
  CHECK(SharedMemory::create(0).status().code() == Code::invalid_argument);
  CHECK_FALSE(SharedMemory::adopt(-1, Access::read_only).is_ok());

  Result<Pipe> pipe = make_pipe();
  const int read_end = pipe.value().read_end.release();
  const Result<SharedMemory> adopted_pipe = SharedMemory::adopt(read_end, Access::read_only);
  CHECK(adopted_pipe.status().code() == Code::invalid_argument);
  CHECK(adopted_pipe.status().message().find("size is 0") != std::string::npos);
  CHECK_FALSE(is_open(read_end));
}

TEST_CASE("too much memory is an error, not a dead process") {
  std::vector<std::size_t> sizes = {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 62,
                                    std::size_t{1} << 46};
  if (const auto available = available_memory()) sizes.push_back(*available + (std::size_t{1} << 32));
  for (const std::size_t bytes : sizes) {
    CAPTURE(bytes);
    const Result<SharedMemory> memory = SharedMemory::create(bytes);
    REQUIRE_FALSE(memory.is_ok());
    CHECK(memory.status().code() == Code::memory);
    CHECK(memory.status().message().find(std::to_string(bytes)) != std::string::npos);
  }
}

TEST_CASE("prefault touches what is there and changes nothing") {
  const SharedMemory memory = created((std::size_t{4} << 20) + 1);
  memory.data()[4096] = std::byte{3};
  CHECK(memory.prefault().is_ok());
  CHECK(memory.data()[4096] == std::byte{3});
  const SharedMemory reader = adopted(memory.duplicate(Access::read_only), Access::read_only);
  CHECK(reader.prefault().is_ok());
  const SharedMemory writable_seen_read_only = adopted(memory.duplicate(Access::read_write), Access::read_only);
  CHECK(writable_seen_read_only.prefault().is_ok());
#if defined(__linux__)
  std::vector<unsigned char> resident(((std::size_t{4} << 20) + 4096) / 4096);
  REQUIRE(::mincore(memory.data(), memory.size(), resident.data()) == 0);
  CHECK(std::all_of(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; }));
#endif
}

TEST_CASE("what a killed writer left is still there") {
  testing::SocketPair sockets = testing::make_socket_pair();
  const SharedMemory memory = created(kRankPageBytes);
  ChildProcess child([&] {
    sockets.ours.reset();
    Result<SharedMemory> mine =
        SharedMemory::adopt(receive_descriptor(sockets.theirs.get()).release(), Access::read_write);
    if (!mine.is_ok()) return 1;
    auto* page = reinterpret_cast<RankPage*>(mine.value().data());
    page->steps_started = 12;
    page->steps_finished = 11;
    const char ready = 'r';
    (void)!::write(sockets.theirs.get(), &ready, 1);
    testing::sleep_until_killed();
    return 0;
  });
  sockets.theirs.reset();
  const Result<int> descriptor = memory.duplicate(Access::read_write);
  send_descriptor(sockets.ours.get(), descriptor.value());
  Descriptor sent(descriptor.value());
  char ready = 0;
  REQUIRE(::read(sockets.ours.get(), &ready, 1) == 1);
  child.signal(SIGKILL);
  CHECK(WIFSIGNALED(child.wait_for_end()));
  const auto* page = reinterpret_cast<const RankPage*>(memory.data());
  CHECK(page->steps_started == 12);
  CHECK(page->steps_finished == 11);
}

}  // namespace flodl
