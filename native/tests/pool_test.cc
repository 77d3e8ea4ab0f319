#include "flodl/pool.h"

#include <atomic>
#include <future>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "doctest/doctest.h"

namespace flodl {
namespace {

// start() and the end of it as a future.
std::future<void> started(Pool& pool, std::size_t count, std::function<void(std::size_t)> task) {
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> future = ended->get_future();
  pool.start(count, std::move(task), [ended] { ended->set_value(); });
  return future;
}

}  // namespace

TEST_CASE("every index is done once, whatever the number of threads") {
  for (const std::size_t threads : {1, 2, 3, 8}) {
    CAPTURE(threads);
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::size_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(count);
      started(pool, count, [&](std::size_t i) { ++calls[i]; }).get();
      for (const auto& call : calls) CHECK(call == 1);
    }
  }
}

TEST_CASE("a pool of no threads has one") { CHECK(Pool(0).threads() == 1); }

TEST_CASE("one thread takes the indices in order") {
  Pool pool(1);
  std::vector<std::size_t> order;
  started(pool, 100, [&](std::size_t i) { order.push_back(i); }).get();
  REQUIRE(order.size() == 100);
  for (std::size_t i = 0; i < order.size(); ++i) CHECK(order[i] == i);
}

TEST_CASE("indices are claimed in order by many threads") {
  Pool pool(4);
  std::atomic<std::size_t> begun{0};
  std::atomic<bool> is_ordered{true};
  started(pool, 2000, [&](std::size_t i) {
    // Of 4 threads, at most 3 can have claimed a lower index and not begun it yet.
    if (begun.fetch_add(1) + 3 < i) is_ordered = false;
  }).get();
  CHECK(is_ordered);
}

TEST_CASE("jobs run one after another, each with its end before the next") {
  Pool pool(3);
  std::mutex mutex;
  std::vector<int> log;
  std::atomic<int> running{-1};
  std::atomic<bool> has_overlap{false};
  std::promise<void> last;
  constexpr int kJobs = 50;
  for (int job = 0; job < kJobs; ++job) {
    pool.start(
        5,
        [&, job](std::size_t) {
          int nobody = -1;
          if (!running.compare_exchange_strong(nobody, job) && nobody != job) has_overlap = true;
        },
        [&, job] {
          {
            std::lock_guard lock(mutex);
            log.push_back(job);
          }
          running = -1;
          if (job == kJobs - 1) last.set_value();
        });
  }
  last.get_future().get();
  CHECK_FALSE(has_overlap);
  REQUIRE(log.size() == kJobs);
  for (int job = 0; job < kJobs; ++job) CHECK(log[static_cast<std::size_t>(job)] == job);
}

TEST_CASE("the end of a job may start the next") {
  Pool pool(2);
  std::atomic<int> calls{0};
  std::promise<void> ended;
  pool.start(
      3, [&](std::size_t) { ++calls; },
      [&] { pool.start(4, [&](std::size_t) { ++calls; }, [&] { ended.set_value(); }); });
  ended.get_future().get();
  CHECK(calls == 7);
}

TEST_CASE("run waits, and the caller works too") {
  Pool pool(1);
  std::mutex mutex;
  std::set<std::thread::id> workers;
  std::promise<void> both;
  std::shared_future<void> met = both.get_future().share();
  // Two indices that wait for each other need two threads: the pool's one and the caller.
  std::atomic<int> arrived{0};
  pool.run(2, [&](std::size_t) {
    {
      std::lock_guard lock(mutex);
      workers.insert(std::this_thread::get_id());
    }
    if (++arrived == 2) both.set_value();
    met.wait();
  });
  CHECK(workers.size() == 2);
  CHECK(workers.contains(std::this_thread::get_id()));
}

TEST_CASE("run takes its turn behind what was started") {
  Pool pool(2);
  std::atomic<bool> first_ended{false};
  std::atomic<bool> is_in_turn{true};
  pool.start(20, [](std::size_t) {}, [&] { first_ended = true; });
  pool.run(5, [&](std::size_t) {
    if (!first_ended) is_in_turn = false;
  });
  CHECK(is_in_turn);
  pool.run(0, [](std::size_t) { FAIL("no index to do"); });
}

TEST_CASE("runs from several threads all end") {
  Pool pool(2);
  std::atomic<int> calls{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 50; ++j) pool.run(7, [&](std::size_t) { ++calls; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(calls == 4 * 50 * 7);
}

TEST_CASE("a pool that ends has ended all that was started") {
  std::atomic<int> calls{0};
  std::atomic<int> ends{0};
  {
    Pool pool(4);
    for (int i = 0; i < 10; ++i) pool.start(100, [&](std::size_t) { ++calls; }, [&] { ++ends; });
    for (int i = 0; i < 500; ++i) pool.start(0, [&](std::size_t) { ++calls; }, [&] { ++ends; });
  }
  CHECK(calls == 1000);
  CHECK(ends == 510);
}

}  // namespace flodl
