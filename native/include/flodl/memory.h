// Shared memory without a name: it vanishes with its last holder, also after kill -9.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "flodl/status.h"

namespace flodl {

enum class Access : unsigned char { read_only, read_write };

// Owns one mapping and one descriptor (memfd on Linux; shm_open with immediate unlink on macOS).
// Descriptors are close-on-exec. Movable, not copyable; the mapping ends with the object.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Zero-filled and reserved: lack of memory is Code::memory here, never a SIGBUS later.
  static Result<SharedMemory> create(std::size_t bytes);
  // Takes ownership of `descriptor`, also on failure. The size is the descriptor's own.
  static Result<SharedMemory> adopt(int descriptor, Access access);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

  // A new descriptor of the same memory, for sending to another process; the caller closes it.
  // With read_only, the receiver cannot map it writable: protection from mistakes, not from an enemy with this user's
  // rights. On macOS only the creator, or who received it read-only, can give read-only descriptors (else Code::state).
  Result<int> duplicate(Access access) const;
  // Touches every page, so that no round pays for first use.
  Status prefault() const;

 private:
  void swap(SharedMemory& other) noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Access access_ = Access::read_only;
  int descriptor_ = -1;
  int read_only_descriptor_ = -1;  // macOS creators only: it cannot be made later
};

// The first page of a rank's memory: what the rank is doing, readable after its death.
// Written by the rank only, read by anyone; each field is independent of the others.
struct RankPage {
  std::atomic<std::uint64_t> steps_started;   // batches whose forward pass began, this generation
  std::atomic<std::uint64_t> steps_finished;  // batches whose optimizer step ended
};
inline constexpr std::size_t kRankPageBytes = 4096;
static_assert(sizeof(RankPage) <= kRankPageBytes);

}  // namespace flodl
