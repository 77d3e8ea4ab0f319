// When to send a heartbeat, which links have fallen silent and which children stand still: decided from the times it is
// told, with no clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "flodl/endpoint.h"

namespace flodl {

class Liveness {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Liveness(const EndpointOptions& options);

  void add(std::uint64_t link, Time now);
  void remove(std::uint64_t link);
  void sent(std::uint64_t link, Time now);
  // How long the link had been silent, if that had been reported.
  std::optional<double> heard(std::uint64_t link, Time now);
  // The judge was to run at `planned`. If it is more than 1 s late, it could not have heard: all ages start anew.
  void woke(Time planned, Time now);

  // What a look at a child showed. How long it has been stopped, once that has reached silence_s; once per stop.
  std::optional<double> looked(int child, bool is_stopped, Time now);
  void forget(int child);

  struct Due {
    std::vector<std::uint64_t> heartbeats;                 // counted as sent
    std::vector<std::pair<std::uint64_t, double>> silent;  // link and age in seconds; once per silence
  };
  Due due(Time now);
  // When due() next has something to say. Empty without links.
  std::optional<Time> next_deadline() const;

 private:
  struct Ages {
    Time sent;
    Time heard;
    bool is_silent = false;
  };

  std::chrono::steady_clock::duration heartbeat_;
  std::optional<std::chrono::steady_clock::duration> silence_;
  std::map<std::uint64_t, Ages> links_;
  struct Stop {
    Time since;
    bool is_told = false;
  };
  std::map<int, Stop> stops_;  // by process
};

}  // namespace flodl
