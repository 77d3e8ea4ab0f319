// A small pool of blocking threads: bulk work in index order, no spinning, no OpenMP.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace flodl {

class Pool {
 public:
  explicit Pool(std::size_t threads);  // at least 1
  ~Pool();                             // waits for the running job

  std::size_t threads() const;
  // Calls task(0..count-1), each once, on the pool's threads; then done() once, on one of them.
  // Jobs run one after another, in the order started. Neither function may throw.
  void start(std::size_t count, std::function<void(std::size_t)> task, std::function<void()> done);
  // start() and wait, with the calling thread helping.
  void run(std::size_t count, const std::function<void(std::size_t)>& task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flodl
