// The endpoint of processes on one host. endpoint.cc: what callers do; io_thread.cc: what the I/O thread does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/descriptor.h"
#include "flodl/endpoint.h"
#include "transport/link.h"
#include "transport/liveness.h"
#include "transport/poller.h"

namespace flodl {

class LocalEndpoint final : public Endpoint {
 public:
  LocalEndpoint(const EndpointOptions& options, std::unique_ptr<Poller> poller, Pipe signals);
  ~LocalEndpoint() override;
  Status start();

  Result<std::uint64_t> add_link(int descriptor, std::uint32_t generation) override;
  Result<std::uint64_t> add_stream(int descriptor) override;
  Status send(std::uint64_t link, std::span<const std::byte> payload, std::span<const int> descriptors) override;
  Status flush(std::uint64_t link, double timeout_s) override;
  void close_link(std::uint64_t link) override;
  Status watch_child(int pid, bool kills_group) override;
  Status set_lifeline(std::uint64_t link) override;
  int signal_descriptor() const override { return signals_.write_end.get(); }
  std::vector<Event> wait(double timeout_s) override;
  void wake() override;
  EventQueue& queue() override { return queue_; }

 private:
  using Clock = std::chrono::steady_clock;

  // All fields but the reading half of `link` are guarded by mutex_. Only the I/O thread removes and closes.
  struct LinkState {
    LinkState(std::uint64_t id, Descriptor socket, std::uint32_t generation)
        : link(id, std::move(socket), generation) {}
    Link link;
    bool is_lifeline = false;
    bool is_closing = false;  // close_link() was called
    bool is_watching_writes = false;
    std::size_t unread_bytes = 0;  // posted, not yet taken by wait()
  };
  struct StreamState {
    Descriptor descriptor;
    bool is_paused = false;  // not watched until wait() has taken enough
    std::size_t unread_bytes = 0;
  };
  struct WatchedChild {
    int pid = 0;
    bool kills_group = false;
  };
  using LinkPointer = std::shared_ptr<LinkState>;
  using Lock = std::unique_lock<std::mutex>;

  // Called with mutex_ held.
  LinkPointer find_link(std::uint64_t link) const;
  void after_write(LinkState& state);
  void note_taken(const Event& event);
  void resume_streams();

  // I/O thread only.
  void run();
  void settle_links();
  void dispatch(const Poller::Ready& ready);
  void read_link(const LinkPointer& state);
  void drain_link(const LinkPointer& state, const std::string& reason);
  bool take_reading(const LinkPointer& state, Reading reading);
  void write_link(const LinkPointer& state);
  void end_link(const LinkPointer& state, const std::string& reason);
  void read_stream(std::uint64_t stream);
  void end_child(std::uint64_t token);
  void read_signals();
  void tick(Liveness::Time planned, Liveness::Time woke);

  const int creator_pid_;
  const std::unique_ptr<Poller> poller_;
  const Pipe signals_;
  EventQueue queue_;
  std::vector<std::byte> buffer_;  // I/O thread only

  std::mutex mutex_;
  std::condition_variable settled_;  // a link's queue emptied, or the link went
  std::uint64_t next_token_ = 2;     // 0 is the poller's, 1 the signal pipe's
  std::map<std::uint64_t, LinkPointer> links_;
  std::map<std::uint64_t, StreamState> streams_;
  std::map<std::uint64_t, WatchedChild> children_;
  std::vector<std::uint64_t> unsettled_;  // links to close, or whose peer a write found gone
  Liveness liveness_;
  bool is_stopping_ = false;

  std::unique_ptr<std::thread> thread_;  // last: it uses all of the above
};

inline constexpr std::uint64_t kSignalToken = 1;
// What one event costs beyond its payload, so that many small ones are bounded too.
inline constexpr std::size_t kEventBytes = 256;
// A stream's reader pauses above the first and goes on below the second; its writer then waits on a full pipe.
inline constexpr std::size_t kStreamPauseBytes = std::size_t{4} << 20;
inline constexpr std::size_t kStreamResumeBytes = std::size_t{1} << 20;

}  // namespace flodl
