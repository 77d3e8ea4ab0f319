// Objects of C++ as Python holds them. Their own fields are guarded by the GIL.
#pragma once

#include <memory>
#include <vector>

#include "flodl/endpoint.h"
#include "flodl/host_memory.h"
#include "flodl/layout.h"

namespace flodl::bindings {

// A host memory posts to its endpoint's queue, so it holds the endpoint; a thread inside a call holds both.
struct HostState {
  std::shared_ptr<Endpoint> endpoint;
  std::unique_ptr<HostMemory> memory;  // destroyed first: its destructor waits for the running task
  Layout layout;
};
// Empty once the endpoint was closed.
struct HostSlot {
  std::shared_ptr<HostState> state;
};

class HeldEndpoint {
 public:
  HeldEndpoint(double heartbeat_s, double silence_s);
  ~HeldEndpoint() { close(); }
  HeldEndpoint(const HeldEndpoint&) = delete;
  HeldEndpoint& operator=(const HeldEndpoint&) = delete;

  // Raises NativeError once closed.
  std::shared_ptr<Endpoint> get() const;
  // A host memory that ends with this endpoint.
  void enroll(const std::shared_ptr<HostSlot>& host);
  // Wakes a thread that waits; what runs now ends before memory and endpoint do. Again: does nothing.
  void close();

 private:
  std::shared_ptr<Endpoint> endpoint_;
  std::vector<std::weak_ptr<HostSlot>> hosts_;
};

}  // namespace flodl::bindings
