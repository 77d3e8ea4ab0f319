// An unnamed mapping on Windows is a HANDLE, which the descriptors of this contract cannot carry: refused, not
// imitated.
#include <utility>

#include "flodl/memory.h"

namespace flodl {
namespace {

Status not_here() { return Status(Code::system, "shared memory is not on this platform yet (Windows)"); }

}  // namespace

Result<SharedMemory> SharedMemory::create(std::size_t /*bytes*/) { return not_here(); }
Result<SharedMemory> SharedMemory::adopt(int /*descriptor*/, Access /*access*/) { return not_here(); }
SharedMemory::SharedMemory(SharedMemory&& other) noexcept { swap(other); }
SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  swap(other);
  return *this;
}
SharedMemory::~SharedMemory() = default;

void SharedMemory::swap(SharedMemory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(access_, other.access_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(read_only_descriptor_, other.read_only_descriptor_);
}

Result<int> SharedMemory::duplicate(Access /*access*/) const { return not_here(); }
Status SharedMemory::prefault() const { return not_here(); }

}  // namespace flodl
