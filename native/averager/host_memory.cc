#include "flodl/host_memory.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "averager/chunks.h"
#include "averager/reduction.h"
#include "flodl/pool.h"

namespace flodl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxThreads = 256;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Status check_settings(const OuterSettings& outer, std::size_t threads) {
  if (threads == 0 || threads > kMaxThreads) {
    return {Code::invalid_argument, "host memory: " + std::to_string(threads) + " threads; 1 to 256 are possible"};
  }
  if (!std::isfinite(outer.lr) || !std::isfinite(outer.momentum) || outer.momentum < 0.0f) {
    return {Code::invalid_argument, "host memory: outer lr " + std::to_string(outer.lr) + " and momentum " +
                                        std::to_string(outer.momentum) + " must be finite, momentum not negative"};
  }
  return {};
}

Status check_weight(float weight, std::size_t position, bool is_only) {
  if (!std::isfinite(weight) || weight < 0.0f || (is_only && weight != 1.0f)) {
    return {Code::invalid_argument, "reduce: weight " + std::to_string(weight) + " of contribution " +
                                        std::to_string(position) +
                                        (is_only ? "; the only one has 1" : "; finite and not negative is needed")};
  }
  return {};
}

class Memory final : public HostMemory {
 public:
  Memory(const Layout& layout, const OuterSettings& outer, std::size_t threads, EventQueue& queue,
         const Kernels& kernels)
      : layout_(layout),
        outer_(outer),
        queue_(queue),
        kernels_(kernels),
        chunks_(cut(layout_)),
        velocity_(outer.rule == OuterRule::none ? 0 : parameter_count(layout_)),
        pool_(threads) {}

  Status allocate();

  Result<std::uint64_t> open_rank() override;
  Result<int> rank_descriptor(std::uint64_t memory) const override;
  const RankPage* rank_page(std::uint64_t memory) const override;
  Status close_rank(std::uint64_t memory) override;

  Result<int> buffer_descriptor(int buffer) const override;
  int committed() const override;
  const std::byte* buffer(int index) const override;
  std::span<const float> velocity() const override { return velocity_; }
  Status write_velocity(std::span<const float> values) override;

  Status start_reduce(std::uint64_t task, std::span<const Contribution> contributions) override;
  Result<ReduceResult> reduce_result() const override;
  Status start_commit(std::uint64_t task, bool is_seed, float momentum_share) override;
  Result<CommitResult> commit_result() const override;

 private:
  enum class Running { nothing, reduce, commit };

  // With mutex_ held.
  Status check_idle(const char* what) const;
  Result<std::vector<ReductionInput>> inputs_of(std::span<const Contribution> contributions) const;

  // On a pool thread, after the last chunk.
  void finish_reduce(std::shared_ptr<const Reduction> reduction, std::uint64_t task, Clock::time_point start);
  void post_done(std::uint64_t task);
  void step_chunk(const OuterSettings& step, std::size_t index, const std::byte* theta_prev, std::byte* theta,
                  std::span<std::uint64_t> hashes);
  void finish_commit(std::uint64_t hash, std::uint64_t task, Clock::time_point start);

  const Layout layout_;
  const OuterSettings outer_;
  EventQueue& queue_;
  const Kernels& kernels_;
  const std::vector<Chunk> chunks_;
  std::array<SharedMemory, 2> buffers_;
  std::vector<float> velocity_;  // written by a commit, or while no task runs

  mutable std::mutex mutex_;  // guards everything below but the pool
  Running running_ = Running::nothing;
  int committed_ = 0;
  std::map<std::uint64_t, SharedMemory> ranks_;
  std::uint64_t next_rank_ = 1;
  std::set<std::uint64_t> read_by_task_;
  std::shared_ptr<const Reduction> pending_;  // what made the pending buffer; empty after a commit
  std::optional<ReduceResult> reduced_;
  std::optional<CommitResult> committed_result_;

  Pool pool_;  // last: its destructor waits for the task that uses the rest
};

Status Memory::allocate() {
  for (SharedMemory& buffer : buffers_) {
    Result<SharedMemory> made = SharedMemory::create(layout_.bytes);
    if (!made.is_ok()) return made.status();
    buffer = std::move(made.value());
    if (Status touched = buffer.prefault(); !touched.is_ok()) return touched;
  }
  return {};
}

Result<std::uint64_t> Memory::open_rank() {
  Result<SharedMemory> made = SharedMemory::create(kRankPageBytes + layout_.bytes);
  if (!made.is_ok()) return made.status();
  if (Status touched = made.value().prefault(); !touched.is_ok()) return touched;
  const std::lock_guard lock(mutex_);
  ranks_.emplace(next_rank_, std::move(made.value()));
  return next_rank_++;
}

Result<int> Memory::rank_descriptor(std::uint64_t memory) const {
  const std::lock_guard lock(mutex_);
  const auto rank = ranks_.find(memory);
  if (rank == ranks_.end()) {
    return Status(Code::invalid_argument, "rank descriptor: no rank memory " + std::to_string(memory));
  }
  return rank->second.duplicate(Access::read_write);
}

const RankPage* Memory::rank_page(std::uint64_t memory) const {
  const std::lock_guard lock(mutex_);
  const auto rank = ranks_.find(memory);
  return rank == ranks_.end() ? nullptr : reinterpret_cast<const RankPage*>(rank->second.data());
}

Status Memory::close_rank(std::uint64_t memory) {
  const std::lock_guard lock(mutex_);
  const auto rank = ranks_.find(memory);
  if (rank == ranks_.end()) {
    return {Code::invalid_argument, "close rank: no rank memory " + std::to_string(memory)};
  }
  if (read_by_task_.contains(memory)) {
    return {Code::state, "close rank: the running reduce reads rank memory " + std::to_string(memory)};
  }
  ranks_.erase(rank);
  return {};
}

Result<int> Memory::buffer_descriptor(int buffer) const {
  if (buffer != 0 && buffer != 1) {
    return Status(Code::invalid_argument, "buffer descriptor: no buffer " + std::to_string(buffer) + "; 0 and 1 exist");
  }
  return buffers_[static_cast<std::size_t>(buffer)].duplicate(Access::read_only);
}

int Memory::committed() const {
  const std::lock_guard lock(mutex_);
  return committed_;
}

const std::byte* Memory::buffer(int index) const {
  return index == 0 || index == 1 ? buffers_[static_cast<std::size_t>(index)].data() : nullptr;
}

Status Memory::write_velocity(std::span<const float> values) {
  const std::lock_guard lock(mutex_);
  if (Status idle = check_idle("velocity"); !idle.is_ok()) return idle;
  if (values.size() != velocity_.size()) {
    return {Code::invalid_argument, "velocity: " + std::to_string(values.size()) + " values; this layout has " +
                                        std::to_string(velocity_.size())};
  }
  std::copy(values.begin(), values.end(), velocity_.begin());
  return {};
}

Status Memory::check_idle(const char* what) const {
  if (running_ == Running::nothing) return {};
  return {Code::state, std::string(what) + ": a " + (running_ == Running::reduce ? "reduce" : "commit") +
                           " is running; wait for its task_done"};
}

Result<std::vector<ReductionInput>> Memory::inputs_of(std::span<const Contribution> contributions) const {
  if (contributions.empty() || contributions.size() > kMaxInputs) {
    return Status(Code::invalid_argument,
                  "reduce: " + std::to_string(contributions.size()) + " contributions; 1 to 256 are possible");
  }
  std::vector<ReductionInput> inputs;
  std::set<std::uint64_t> seen;
  for (const Contribution& contribution : contributions) {
    const auto rank = ranks_.find(contribution.memory);
    if (rank == ranks_.end() || !seen.insert(contribution.memory).second) {
      return Status(Code::invalid_argument, "reduce: contribution " + std::to_string(inputs.size()) + " is " +
                                                (rank == ranks_.end() ? "no rank memory: " : "named twice: memory ") +
                                                std::to_string(contribution.memory));
    }
    for (const float weight : {contribution.weight, contribution.buffer_weight}) {
      if (Status fine = check_weight(weight, inputs.size(), contributions.size() == 1); !fine.is_ok()) return fine;
    }
    inputs.push_back({rank->second.data() + kRankPageBytes, contribution.weight, contribution.buffer_weight});
  }
  return inputs;
}

Status Memory::start_reduce(std::uint64_t task, std::span<const Contribution> contributions) try {
  const std::lock_guard lock(mutex_);
  if (Status idle = check_idle("reduce"); !idle.is_ok()) return idle;
  Result<std::vector<ReductionInput>> inputs = inputs_of(contributions);
  if (!inputs.is_ok()) return inputs.status();
  std::byte* out = buffers_[static_cast<std::size_t>(1 - committed_)].data();
  const auto start = Clock::now();
  auto reduction = std::make_shared<Reduction>(kernels_, layout_, chunks_, inputs.value(), out);
  std::set<std::uint64_t> read;
  for (const Contribution& contribution : contributions) read.insert(contribution.memory);
  // The end of the job waits for mutex_, so it sees what is set below.
  pool_.start(
      reduction->pieces(), [reduction](std::size_t piece) { reduction->run(piece); },
      [this, reduction, task, start] { finish_reduce(reduction, task, start); });
  read_by_task_.swap(read);
  running_ = Running::reduce;
  pending_.reset();
  reduced_.reset();
  return {};
} catch (const std::bad_alloc&) {
  return {Code::memory, "reduce: no memory for the figures of " + std::to_string(chunks_.size()) + " chunks"};
}

void Memory::post_done(std::uint64_t task) {
  Event event{};
  event.kind = EventKind::task_done;
  event.id = task;
  queue_.post(std::move(event));
}

void Memory::finish_reduce(std::shared_ptr<const Reduction> reduction, std::uint64_t task, Clock::time_point start) {
  ReduceResult result = reduction->finish();
  result.task = task;
  {
    const std::lock_guard lock(mutex_);
    result.seconds = seconds_since(start);
    reduced_ = std::move(result);
    pending_ = std::move(reduction);
    read_by_task_.clear();
    running_ = Running::nothing;
  }
  post_done(task);
}

Result<ReduceResult> Memory::reduce_result() const {
  const std::lock_guard lock(mutex_);
  if (!reduced_) return Status(Code::state, "reduce result: no reduce has ended since the last one was started");
  return *reduced_;
}

Status Memory::start_commit(std::uint64_t task, bool is_seed, float momentum_share) try {
  const std::lock_guard lock(mutex_);
  if (Status idle = check_idle("commit"); !idle.is_ok()) return idle;
  if (!pending_) return {Code::state, "commit: nothing is pending; a reduce must end first"};
  if (!reduced_->first_nonfinite.empty()) {
    return {Code::state, "commit: the pending result is not finite at " + reduced_->first_nonfinite +
                             "; reduce again without that contribution"};
  }
  if (!(momentum_share >= 0.0f && momentum_share <= 1.0f)) {
    return {Code::invalid_argument,
            "commit: " + std::to_string(momentum_share) + " of the momentum; 0 to 1 are possible"};
  }
  const auto start = Clock::now();
  OuterSettings step = outer_;
  step.momentum *= momentum_share;
  const bool steps = outer_.rule != OuterRule::none && !is_seed;
  const std::byte* theta_prev = buffers_[static_cast<std::size_t>(committed_)].data();
  std::byte* theta = buffers_[static_cast<std::size_t>(1 - committed_)].data();
  const std::span<const std::uint64_t> reduced = pending_->hashes();
  auto hashes = std::make_shared<std::vector<std::uint64_t>>(reduced.begin(), reduced.end());
  pool_.start(
      steps ? chunks_.size() : 0,
      [this, step, theta_prev, theta, hashes](std::size_t chunk) {
        step_chunk(step, chunk, theta_prev, theta, *hashes);
      },
      [this, hashes, task, start] { finish_commit(combine_hashes(*hashes), task, start); });
  running_ = Running::commit;
  committed_result_.reset();
  return {};
} catch (const std::bad_alloc&) {
  return {Code::memory, "commit: no memory for the hashes of " + std::to_string(chunks_.size()) + " chunks"};
}

void Memory::step_chunk(const OuterSettings& step, std::size_t index, const std::byte* theta_prev, std::byte* theta,
                        std::span<std::uint64_t> hashes) {
  const Chunk& chunk = chunks_[index];
  const Section& section = layout_.sections[chunk.section];
  if (section.rule != Rule::parameter) return;
  hashes[index] = kernels_.outer_step({.rule = step.rule,
                                       .lr = step.lr,
                                       .momentum = step.momentum,
                                       .dtype = section.dtype,
                                       .theta_prev = theta_prev + chunk.offset,
                                       .theta = theta + chunk.offset,
                                       .velocity = velocity_.data() + chunk.parameters_before,
                                       .copies = {},
                                       .count = chunk.count,
                                       .chunk = index});
}

void Memory::finish_commit(std::uint64_t hash, std::uint64_t task, Clock::time_point start) {
  {
    const std::lock_guard lock(mutex_);
    committed_ = 1 - committed_;
    pending_.reset();
    committed_result_ = CommitResult{.task = task, .hash = hash, .seconds = seconds_since(start)};
    running_ = Running::nothing;
  }
  post_done(task);
}

Result<CommitResult> Memory::commit_result() const {
  const std::lock_guard lock(mutex_);
  if (!committed_result_)
    return Status(Code::state, "commit result: no commit has ended since the last one was started");
  return *committed_result_;
}

}  // namespace

Result<std::unique_ptr<HostMemory>> HostMemory::create(const Layout& layout, const OuterSettings& outer,
                                                       std::size_t threads, EventQueue& queue) try {
  if (Status fine = layout.check(); !fine.is_ok()) return fine;
  if (Status fine = check_settings(outer, threads); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  auto memory = std::make_unique<Memory>(layout, outer, threads, queue, *table.value());
  if (Status allocated = memory->allocate(); !allocated.is_ok()) return allocated;
  return std::unique_ptr<HostMemory>(std::move(memory));
} catch (const std::bad_alloc&) {
  return Status(Code::memory,
                "host memory: no memory for a velocity of " + std::to_string(parameter_count(layout)) + " fp32 values");
}

}  // namespace flodl
