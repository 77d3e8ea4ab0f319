#include "flodl/pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/thread.h"

namespace flodl {
namespace {

struct Job {
  std::size_t count;
  std::function<void(std::size_t)> task;
  std::function<void()> done;           // may be empty
  std::atomic<std::size_t> claimed{0};  // passes `count`: every thread that finds nothing adds one
  std::atomic<std::size_t> finished{0};
  bool is_ended = false;  // guarded by the pool's mutex

  Job(std::size_t n, std::function<void(std::size_t)> body, std::function<void()> end)
      : count(n), task(std::move(body)), done(std::move(end)) {}
};

}  // namespace

struct Pool::State {
  std::mutex mutex;
  std::condition_variable changed;        // the first job, or `is_stopping`
  std::deque<std::shared_ptr<Job>> jobs;  // only the first one runs
  bool is_stopping = false;
  std::vector<std::thread> threads;

  bool has_work() const {
    return !jobs.empty() && jobs.front()->claimed.load() < std::max<std::size_t>(jobs.front()->count, 1);
  }

  void push(std::shared_ptr<Job> job) {
    std::lock_guard lock(mutex);
    jobs.push_back(std::move(job));
    changed.notify_all();
  }

  // Does a share of the first job; whoever ends its last index ends the job.
  void help(Job& job) {
    // An empty job has one claim to give away, so that exactly one thread ends it.
    const std::size_t claims = std::max<std::size_t>(job.count, 1);
    std::size_t ended = 0;
    for (std::size_t i = job.claimed.fetch_add(1); i < claims; i = job.claimed.fetch_add(1)) {
      if (job.count > 0) job.task(i);
      ended = job.finished.fetch_add(1) + 1;
    }
    if (ended == claims) end(job);
  }

  void end(Job& job) {
    if (job.done) job.done();
    std::lock_guard lock(mutex);
    job.is_ended = true;
    jobs.pop_front();
    changed.notify_all();
  }

  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return has_work() || (is_stopping && jobs.empty()); });
      if (!has_work()) return;
      const std::shared_ptr<Job> job = jobs.front();
      lock.unlock();
      help(*job);
      lock.lock();
    }
  }
};

Pool::Pool(std::size_t threads) : state_(std::make_unique<State>()) {
  for (std::size_t i = 0; i < std::max<std::size_t>(threads, 1); ++i) {
    state_->threads.push_back(start_thread("flodl-pool", [state = state_.get()] { state->serve(); }));
  }
}

Pool::~Pool() {
  {
    std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
    state_->changed.notify_all();
  }
  for (std::thread& thread : state_->threads) thread.join();
}

std::size_t Pool::threads() const { return state_->threads.size(); }

void Pool::start(std::size_t count, std::function<void(std::size_t)> task, std::function<void()> done) {
  state_->push(std::make_shared<Job>(count, std::move(task), std::move(done)));
}

void Pool::run(std::size_t count, const std::function<void(std::size_t)>& task) {
  const auto job = std::make_shared<Job>(count, std::cref(task), nullptr);
  state_->push(job);
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return job->is_ended || state_->jobs.front() == job; });
  if (job->is_ended) return;
  lock.unlock();
  state_->help(*job);
  lock.lock();
  state_->changed.wait(lock, [&] { return job->is_ended; });
}

}  // namespace flodl
