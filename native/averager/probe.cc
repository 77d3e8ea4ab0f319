#include "averager/probe.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "flodl/pool.h"

namespace flodl {
namespace {

constexpr std::uintptr_t kLineBytes = 64;

Status refuse(const std::string& what) { return {Code::invalid_argument, "probe: " + what}; }

Status check(const Move& job, std::size_t threads) {
  if (threads == 0 || threads > 256) return refuse(std::to_string(threads) + " threads; 1 to 256 are possible");
  if (job.streams != 1 && job.streams != 4)
    return refuse(std::to_string(job.streams) + " streams; 1 or 4 are possible");
  if (job.dst == nullptr || job.bytes == 0) return refuse("dst: no memory");
  const auto dst = reinterpret_cast<std::uintptr_t>(job.dst);
  if (dst % kLineBytes != 0) return refuse("dst: the address is not a multiple of 64");
  if (job.kind != MoveKind::copy) return {};
  if (job.src == nullptr) return refuse("src: a copy needs it");
  const auto src = reinterpret_cast<std::uintptr_t>(job.src);
  if (dst < src + job.bytes && src < dst + job.bytes) return refuse("dst overlaps src");
  return {};
}

void run(Pool& pool, std::size_t count, std::function<void(std::size_t)> task) {
  const auto ended = std::make_shared<std::promise<void>>();
  pool.start(count, std::move(task), [ended] { ended->set_value(); });
  ended->get_future().wait();
}

}  // namespace

Result<double> stream_probe(const Move& job, std::size_t threads) {
  if (Status fine = check(job, threads); !fine.is_ok()) return fine;
  Result<const Kernels*> table = kernels();
  if (!table.is_ok()) return table.status();
  Pool pool(threads);
  run(pool, threads, [](std::size_t) {});
  const auto start = std::chrono::steady_clock::now();
  run(pool, (job.bytes + kChunkBytes - 1) / kChunkBytes, [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkBytes;
    Move part = job;
    part.dst = job.dst + first;
    part.src = job.src == nullptr ? nullptr : job.src + first;
    part.bytes = std::min(kChunkBytes, job.bytes - first);
    table.value()->move(part);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace flodl
