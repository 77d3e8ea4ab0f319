// The relay's memory of one host: what ranks sealed, the committed theta, and the pending result.
//
// Two buffers take turns: `committed` stands until the next commit, `pending` is written by a reduce. Only the caller
// knows who still reads the pending one (adopting, joining, evaluating, saving) and starts no reduce before they ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flodl/events.h"
#include "flodl/kernels.h"
#include "flodl/layout.h"
#include "flodl/memory.h"

namespace flodl {

struct Contribution {
  std::uint64_t memory;  // from open_rank; stays valid after its rank died
  float weight;          // p_k of parameters
  float buffer_weight;   // q_k of buffers
};

struct ReduceResult {
  std::uint64_t task = 0;
  std::vector<bool> is_finite;      // per contribution, in order
  std::vector<double> distance_sq;  // parameters only: sum (theta_k - consensus)^2
  double norm_sq = 0.0;             // parameters only, of the consensus
  std::uint64_t hash = 0;           // of the pending buffer
  std::string first_nonfinite;      // "offset N of contribution K"; empty if all finite
  double seconds = 0.0;
};

struct CommitResult {
  std::uint64_t task = 0;
  std::uint64_t hash = 0;  // of the committed theta, after the outer step
  double seconds = 0.0;
};

struct OuterSettings {
  OuterRule rule = OuterRule::none;
  float lr = 1.0f;
  float momentum = 0.0f;
};

class HostMemory {
 public:
  // Reserves and prefaults both buffers, and the velocity where `outer` needs one.
  static Result<std::unique_ptr<HostMemory>> create(const Layout& layout, const OuterSettings& outer,
                                                    std::size_t threads, EventQueue& queue);
  virtual ~HostMemory() = default;  // waits for a running task

  // kRankPageBytes + layout.bytes of memory that a rank writes and this host holds.
  virtual Result<std::uint64_t> open_rank() = 0;
  // A descriptor to send to the rank (writable); the caller closes it.
  virtual Result<int> rank_descriptor(std::uint64_t memory) const = 0;
  virtual const RankPage* rank_page(std::uint64_t memory) const = 0;
  // Code::state while a running task reads it.
  virtual Status close_rank(std::uint64_t memory) = 0;

  // A read-only descriptor of buffer 0 or 1; the caller closes it.
  virtual Result<int> buffer_descriptor(int buffer) const = 0;
  virtual int committed() const = 0;  // 0 or 1
  virtual const std::byte* buffer(int index) const = 0;
  virtual std::span<const float> velocity()
      const = 0;  // layout order of parameter sections; empty without an outer step
  // Replaces the velocity by one of the same length, as velocity() gave it. Code::state while a task runs.
  virtual Status write_velocity(std::span<const float> values) = 0;

  // Sums the contributions, in the order given, into the pending buffer; ends as task_done. One task at a time.
  virtual Status start_reduce(std::uint64_t task, std::span<const Contribution> contributions) = 0;
  virtual Result<ReduceResult> reduce_result() const = 0;
  // Applies the outer step to pending (unless `is_seed`: round 0, or a restored state), then swaps; ends as task_done.
  // momentum_share: 0 to 1, of the momentum in this step.
  virtual Status start_commit(std::uint64_t task, bool is_seed, float momentum_share = 1.0f) = 0;
  virtual Result<CommitResult> commit_result() const = 0;
};

}  // namespace flodl
