#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "core/available_memory.h"
#include "core/descriptor.h"
#include "flodl/memory.h"

namespace flodl {
namespace {

Status not_enough(std::size_t bytes, const std::string& why) {
  return Status(Code::memory, "cannot reserve " + std::to_string(bytes) + " bytes of shared memory: " + why);
}

Result<std::byte*> map(int descriptor, std::size_t bytes, Access access) {
  const int protection = access == Access::read_write ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = ::mmap(nullptr, bytes, protection, MAP_SHARED, descriptor, 0);
  if (address == MAP_FAILED) return Status::from_errno("mmap of " + std::to_string(bytes) + " bytes", errno);
  return static_cast<std::byte*>(address);
}

struct NewObject {
  Descriptor writable;
  Descriptor read_only;  // macOS: there is no way to make one later
};

#if defined(__linux__)

// Reserves in steps, so that a signal costs one step and not the progress made.
Status reserve(int descriptor, std::size_t bytes) {
  constexpr std::size_t kStep = std::size_t{256} << 20;
  for (std::size_t offset = 0; offset < bytes;) {
    const std::size_t step = std::min(kStep, bytes - offset);
    if (::fallocate(descriptor, 0, static_cast<off_t>(offset), static_cast<off_t>(step)) == 0) {
      offset += step;
    } else if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG) {
      return not_enough(bytes, Status::from_errno("fallocate", errno).message());
    } else if (errno != EINTR) {
      return Status::from_errno("fallocate", errno);
    }
  }
  return {};
}

Result<NewObject> create_object(std::size_t bytes) {
  // Without this check the kernel would make room by killing processes before it refused.
  const auto available = available_memory();
  if (available && bytes > *available) return not_enough(bytes, std::to_string(*available) + " are available");
  Descriptor object(::memfd_create("flodl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!object) return Status::from_errno("memfd_create", errno);
  // Readable only by reopening: a receiver of a read-only descriptor cannot reopen it for writing.
  if (::fchmod(object.get(), S_IRUSR) != 0) return Status::from_errno("fchmod", errno);
  if (::ftruncate(object.get(), static_cast<off_t>(bytes)) != 0) return not_enough(bytes, "ftruncate refused");
  if (Status status = reserve(object.get(), bytes); !status.is_ok()) return status;
  // No holder can shrink it under another one's mapping (SIGBUS).
  if (::fcntl(object.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Status::from_errno("fcntl(F_ADD_SEALS)", errno);
  }
  return NewObject{std::move(object), Descriptor()};
}

Result<Descriptor> reopen_read_only(int descriptor) {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  Descriptor reopened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reopened) return Status::from_errno("opening " + path, errno);
  return reopened;
}

#else

Result<NewObject> create_object(std::size_t bytes) {
  std::random_device random;
  char name[32];  // macOS takes at most 31 characters
  std::snprintf(name, sizeof name, "/flodl-%08x%08x", random(), random());
  NewObject object;
  object.writable.reset(::shm_open(name, O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  if (!object.writable) return Status::from_errno("shm_open", errno);
  object.read_only.reset(::shm_open(name, O_RDONLY, 0));
  const int error = errno;
  ::shm_unlink(name);
  if (!object.read_only) return Status::from_errno("shm_open for reading", error);
  for (const int descriptor : {object.writable.get(), object.read_only.get()}) {
    if (Status status = set_close_on_exec(descriptor); !status.is_ok()) return status;
  }
  if (::ftruncate(object.writable.get(), static_cast<off_t>(bytes)) != 0) return not_enough(bytes, "ftruncate refused");
  return object;
}

Result<Descriptor> reopen_read_only(int /*descriptor*/) {
  return Status(Code::state, "only the creator of shared memory can give read-only descriptors of it on this system");
}

#endif

bool is_opened_read_only(int descriptor) { return (::fcntl(descriptor, F_GETFL) & O_ACCMODE) == O_RDONLY; }

Status touch(std::byte* data, std::size_t bytes, Access access) {
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ and _WRITE, Linux 5.14; older C libraries do not name them
  constexpr int kPopulateWrite = 23;
  const int advice = access == Access::read_write ? kPopulateWrite : kPopulateRead;
  int outcome = 0;
  do {
    outcome = ::madvise(data, bytes, advice);
  } while (outcome != 0 && errno == EINTR);
  if (outcome == 0) return {};
  if (errno != EINVAL && errno != ENOSYS) return Status::from_errno("madvise(MADV_POPULATE)", errno);
#endif
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < bytes; offset += page) {
    auto* byte = reinterpret_cast<unsigned char*>(data + offset);
    if (access == Access::read_write) {
      __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);  // others may be writing here
    } else {
      (void)__atomic_load_n(byte, __ATOMIC_RELAXED);
    }
  }
  return {};
}

}  // namespace

Result<SharedMemory> SharedMemory::create(std::size_t bytes) {
  if (bytes == 0) return Status(Code::invalid_argument, "shared memory of 0 bytes");
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max())) {
    return not_enough(bytes, "larger than the address space");
  }
  Result<NewObject> object = create_object(bytes);
  if (!object.is_ok()) return object.status();
  Result<std::byte*> mapped = map(object.value().writable.get(), bytes, Access::read_write);
  if (!mapped.is_ok()) return mapped.status();
  SharedMemory memory;
  memory.data_ = mapped.value();
  memory.size_ = bytes;
  memory.access_ = Access::read_write;
  memory.descriptor_ = object.value().writable.release();
  memory.read_only_descriptor_ = object.value().read_only.release();
  return memory;
}

Result<SharedMemory> SharedMemory::adopt(int descriptor, Access access) {
  Descriptor owned(descriptor);
  struct stat about{};
  if (::fstat(descriptor, &about) != 0) return Status::from_errno("fstat of shared memory", errno);
  if (about.st_size <= 0) return Status(Code::invalid_argument, "the descriptor holds no memory: its size is 0");
  if (Status status = set_close_on_exec(descriptor); !status.is_ok()) return status;
  const auto bytes = static_cast<std::size_t>(about.st_size);
  Result<std::byte*> mapped = map(descriptor, bytes, access);
  if (!mapped.is_ok()) return mapped.status();
  SharedMemory memory;
  memory.data_ = mapped.value();
  memory.size_ = bytes;
  memory.access_ = access;
  memory.descriptor_ = owned.release();
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { swap(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  SharedMemory taken(std::move(other));
  swap(taken);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
  Descriptor writable(descriptor_);
  Descriptor read_only(read_only_descriptor_);
}

void SharedMemory::swap(SharedMemory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(access_, other.access_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(read_only_descriptor_, other.read_only_descriptor_);
}

Result<int> SharedMemory::duplicate(Access access) const {
  if (data_ == nullptr) return Status(Code::state, "no shared memory to duplicate");
  const bool is_read_only = is_opened_read_only(descriptor_);
  if (access == Access::read_write && is_read_only) {
    return Status(Code::state, "shared memory received read-only cannot be given away writable");
  }
  Result<Descriptor> copy = [&]() -> Result<Descriptor> {
    if (access == Access::read_write || is_read_only) return duplicate_descriptor(descriptor_);
    if (read_only_descriptor_ >= 0) return duplicate_descriptor(read_only_descriptor_);
    return reopen_read_only(descriptor_);
  }();
  if (!copy.is_ok()) return copy.status();
  return copy.value().release();
}

Status SharedMemory::prefault() const {
  if (data_ == nullptr) return Status(Code::state, "no shared memory to touch");
  return touch(data_, size_, access_);
}

}  // namespace flodl
