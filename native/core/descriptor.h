// File descriptors with an owner (not on Windows). All of them are close-on-exec.
#pragma once

#include <utility>

#include "flodl/status.h"

namespace flodl {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const { return value_; }
  explicit operator bool() const { return value_ >= 0; }
  int release() { return std::exchange(value_, -1); }
  void reset(int value = -1);  // closes what it held

 private:
  int value_ = -1;
};

struct Pipe {
  Descriptor read_end;
  Descriptor write_end;
};

Result<Descriptor> duplicate_descriptor(int descriptor);
Result<Pipe> make_pipe();
Status set_close_on_exec(int descriptor);
Status set_non_blocking(int descriptor);

}  // namespace flodl
