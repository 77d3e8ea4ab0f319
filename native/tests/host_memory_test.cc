// Host memory against a plain reference, with real processes that write, seal and die.
#include "flodl/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "averager/chunks.h"
#include "averager_host.h"
#include "averager_reference.h"
#include "doctest/doctest.h"

namespace {

using namespace flodl;
using namespace flodl::test;

constexpr std::uint64_t kChunkFloats = kChunkBytes / 4;

TEST_CASE("every length around a chunk, any number of threads: the reference's bits, one hash") {
  for (const std::uint64_t count :
       {std::uint64_t{1}, kChunkFloats - 1, kChunkFloats, kChunkFloats + 1, kChunkFloats * 7 / 2}) {
    CAPTURE(count);
    const Layout layout = parameters_only(count);
    const Image a = filled(layout, 1), b = filled(layout, 2), c = filled(layout, 3);
    const Image expected = average(layout, {{&a, 0.5f, 0}, {&b, 0.3f, 0}, {&c, 0.2f, 0}});
    std::vector<ReduceResult> results;
    for (const std::size_t threads : {1, 2, 3}) {
      Host host(layout, {}, threads);
      const std::vector<Contribution> contributions = {
          {host.open_with(a), 0.5f, 0.1f}, {host.open_with(b), 0.3f, 0.1f}, {host.open_with(c), 0.2f, 0.8f}};
      results.push_back(host.reduce(contributions));
      CHECK(host.pending_is(expected));
    }
    CHECK(results[0].hash == hash_of(layout, expected));
    for (const ReduceResult& result : results) {
      CHECK(result.hash == results[0].hash);
      CHECK(result.distance_sq == results[0].distance_sq);
      CHECK(result.norm_sq == results[0].norm_sq);
      CHECK(result.is_finite == std::vector<bool>{true, true, true});
      CHECK(result.first_nonfinite.empty());
    }
  }
}

TEST_CASE("norms and distances count parameters only") {
  const Layout layout = mixed();
  Host host(layout);
  const Image a = filled(layout, 4), b = filled(layout, 5);
  const ReduceResult result = host.reduce({{host.open_with(a), 0.25f, 0.5f}, {host.open_with(b), 0.75f, 0.5f}});
  const Image mean = average(layout, {{&a, 0.25f, 0.5f}, {&b, 0.75f, 0.5f}});
  double norm_sq = 0.0, from_a = 0.0, from_b = 0.0;
  for (const Section& section : layout.sections) {
    if (section.rule != Rule::parameter) continue;
    for (std::uint64_t i = 0; i < section.count; ++i) {
      const auto at = [&](const Image& image) { return load(image.data() + section.offset, section.dtype, i); };
      norm_sq += at(mean) * at(mean);
      from_a += (at(a) - at(mean)) * (at(a) - at(mean));
      from_b += (at(b) - at(mean)) * (at(b) - at(mean));
    }
  }
  CHECK(result.norm_sq == doctest::Approx(norm_sq).epsilon(1e-6));
  REQUIRE(result.distance_sq.size() == 2);
  CHECK(result.distance_sq[0] == doctest::Approx(from_a).epsilon(1e-6));
  CHECK(result.distance_sq[1] == doctest::Approx(from_b).epsilon(1e-6));
}

TEST_CASE("every rule and dtype, with gaps that stay as they were") {
  const Layout layout = mixed();
  REQUIRE(layout.check().is_ok());
  const Image a = filled(layout, 6), b = filled(layout, 7), c = filled(layout, 8);
  const Image expected = average(layout, {{&a, 0.2f, 0.5f}, {&b, 0.3f, 0.3f}, {&c, 0.5f, 0.2f}});
  for (const std::size_t threads : {1, 3}) {
    Host host(layout, {}, threads);
    // Ranks put rubbish into their gaps; none of it may travel.
    Image dirty = a;
    const Section& first = layout.sections[0];
    std::memset(dirty.data() + first.offset + first.count * 4, 0x5a, 64);
    const ReduceResult result = host.reduce(
        {{host.open_with(dirty), 0.2f, 0.5f}, {host.open_with(b), 0.3f, 0.3f}, {host.open_with(c), 0.5f, 0.2f}});
    CHECK(host.pending_is(expected));
    CHECK(result.hash == hash_of(layout, expected));
  }
}

TEST_CASE("a pooled variance is never negative, and exact where ranks agree on nothing but the mean") {
  Layout layout{.bytes = 128,
                .sections = {{Rule::buffer, DType::f32, 0, 4, 0}, {Rule::pooled_var, DType::f32, 64, 4, 0}}};
  Host host(layout);
  std::vector<Contribution> contributions;
  for (const float variance : {0.0f, 1.0f}) {
    Image image(layout.bytes);
    for (std::size_t i = 0; i < 4; ++i) {
      put(image.data(), i, i == 3 ? 1000.1f : 0.0f);  // rounding alone decides the sign of what is left of 1000.1^2
      put(image.data() + 64, i, i == 3 ? 0.0f : variance * static_cast<float>(i));
    }
    contributions.push_back({host.open_with(image), 0.5f, variance == 0.0f ? 0.25f : 0.75f});
  }
  host.reduce(contributions);
  const std::byte* pending = host.memory->buffer(1);
  CHECK(get<float>(pending + 64, 1) == 0.75f);
  CHECK(get<float>(pending + 64, 2) == 1.5f);
  CHECK(get<float>(pending + 64, 3) >= 0.0f);
}

TEST_CASE("one contribution is copied bit for bit, whatever it holds") {
  const Layout layout = mixed();
  Image odd = filled(layout, 9);
  put(odd.data(), 0, -0.0f);
  put(odd.data(), 1, std::numeric_limits<float>::denorm_min());
  Host host(layout);
  const ReduceResult result = host.reduce({{host.open_with(odd), 1.0f, 1.0f}});
  CHECK(host.pending_is(odd));
  CHECK(result.hash == hash_of(layout, odd));
  CHECK(result.distance_sq == std::vector<double>{0.0});
}

TEST_CASE("a writer killed after its seal counts exactly; one killed before is left out") {
  Writer first, second, third;
  const std::uint64_t count = kChunkFloats * 2 + 5;
  const Layout layout = parameters_only(count);
  const Section section = layout.sections[0];
  Host host(layout);
  const std::uint64_t ranks[] = {host.open(), host.open(), host.open()};

  first.write(host, ranks[0], {11, count * 4, section});
  second.write(host, ranks[1], {12, count * 4, section});
  second.kill();
  third.write(host, ranks[2], {13, count * 2, section});  // half of it, then dead
  third.kill();

  const Image a = filled(layout, 11), b = filled(layout, 12);
  Image torn(layout.bytes);
  for (std::uint64_t i = 0; i < count / 2; ++i) {
    store(torn.data(), DType::f32, i, value_of(section, noise(13, 0, i)));
  }
  // An attempt that took the torn one in changes nothing about the next.
  const ReduceResult with_torn =
      host.reduce({{ranks[0], 0.5f, 0.5f}, {ranks[1], 0.25f, 0.25f}, {ranks[2], 0.25f, 0.25f}});
  CHECK(host.pending_is(average(layout, {{&a, 0.5f, 0}, {&b, 0.25f, 0}, {&torn, 0.25f, 0}})));
  const ReduceResult result = host.reduce({{ranks[0], 0.7f, 0.5f}, {ranks[1], 0.3f, 0.5f}});
  const Image expected = average(layout, {{&a, 0.7f, 0}, {&b, 0.3f, 0}});
  CHECK(host.pending_is(expected));
  CHECK(result.hash == hash_of(layout, expected));
  CHECK(result.hash != with_torn.hash);

  CHECK(host.commit(true).hash == result.hash);
  CHECK(host.committed_is(expected));
  // What the dead had done can be read after them, until the host lets go.
  CHECK(host.memory->rank_page(ranks[1])->steps_finished.load() == 1);
  CHECK(host.memory->rank_page(ranks[2])->steps_started.load() == 1);
  CHECK(host.memory->close_rank(ranks[1]).is_ok());
  CHECK(host.memory->rank_page(ranks[1]) == nullptr);
}

TEST_CASE("writers that go on after the reduce are seen by the next one") {
  Writer writer;
  const Layout layout = parameters_only(1000);
  Host host(layout, {}, 1);
  const std::uint64_t rank = host.open();
  for (const std::uint64_t seed : {21, 22, 23}) {
    writer.write(host, rank, {seed, 4000, layout.sections[0]});
    host.reduce({{rank, 1.0f, 1.0f}});
    CHECK(host.pending_is(filled(layout, seed)));
    host.commit(true);
    CHECK(host.committed_is(filled(layout, seed)));
  }
  CHECK(host.memory->rank_page(rank)->steps_started.load() == 3);
}

TEST_CASE("what is not finite is detected, named, never committed, and left out by a restart") {
  const Layout layout = mixed();
  for (const std::size_t s : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{9}}) {
    const Section& section = layout.sections[s];
    const std::uint64_t element = section.count - 2;
    const double bad = s == 2 ? -std::numeric_limits<double>::infinity() : std::nan("");
    Host host(layout);
    const Image a = filled(layout, 31), c = filled(layout, 33);
    Image b = filled(layout, 32);
    store(b.data() + section.offset, section.dtype, element, bad);
    const std::uint64_t ranks[] = {host.open_with(a), host.open_with(b), host.open_with(c)};
    const ReduceResult result =
        host.reduce({{ranks[0], 0.5f, 0.5f}, {ranks[1], 0.25f, 0.25f}, {ranks[2], 0.25f, 0.25f}});
    CHECK(result.is_finite == std::vector<bool>{true, false, true});
    const std::uint64_t offset = section.offset + element * bytes_of(section.dtype);
    CHECK(result.first_nonfinite == "offset " + std::to_string(offset) + " of contribution 1 (element " +
                                        std::to_string(element) + " of section " + std::to_string(s) + ")");
    CHECK(host.memory->start_commit(99, false).code() == Code::state);

    const ReduceResult without = host.reduce({{ranks[0], 0.4f, 0.6f}, {ranks[2], 0.6f, 0.4f}});
    const Image expected = average(layout, {{&a, 0.4f, 0.6f}, {&c, 0.6f, 0.4f}});
    CHECK(host.pending_is(expected));
    CHECK(without.hash == hash_of(layout, expected));
    CHECK(without.first_nonfinite.empty());
  }
}

void check_outer_rounds(const OuterSettings& outer) {
  const std::uint64_t count = kChunkFloats + 77;
  // A buffer behind the parameters: the step must leave it alone.
  Layout layout = parameters_only(count);
  layout.sections.push_back({Rule::buffer, DType::f32, layout.bytes, 16, 0});
  layout.bytes += 64;
  Host host(layout, outer);
  const std::uint64_t ranks[] = {host.open(), host.open()};

  Image theta = filled(layout, 40);
  host.write(ranks[0], theta);
  const ReduceResult seed = host.reduce({{ranks[0], 1.0f, 1.0f}});
  CHECK(host.commit(true).hash == seed.hash);
  CHECK(host.committed_is(theta));
  std::vector<float> velocity(count, 0.0f);
  REQUIRE(host.memory->velocity().size() == count);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    const Image a = filled(layout, 40 + round), b = filled(layout, 50 + round);
    host.write(ranks[0], a);
    host.write(ranks[1], b);
    host.reduce({{ranks[0], 0.6f, 0.5f}, {ranks[1], 0.4f, 0.5f}});
    const int before = host.memory->committed();
    CHECK(host.committed_is(theta));
    Image next = average(layout, {{&a, 0.6f, 0.5f}, {&b, 0.4f, 0.5f}});
    const float share = round == 2 ? 0.3f : 1.0f;
    OuterSettings warmed = outer;
    warmed.momentum = outer.momentum * share;
    step(warmed, theta, next, velocity);
    const CommitResult result = host.commit(false, share);
    CHECK(host.memory->committed() == 1 - before);
    CHECK(host.is(before, theta));  // nothing wrote the old one, up to the end
    CHECK(host.committed_is(next));
    CHECK(result.hash == hash_of(layout, next));
    CHECK(std::memcmp(host.memory->velocity().data(), velocity.data(), count * 4) == 0);
    theta = next;
  }
}

TEST_CASE("three rounds with an outer step follow the formula bit for bit") {
  SUBCASE("nesterov") { check_outer_rounds({OuterRule::nesterov, 0.7f, 0.9f}); }
  SUBCASE("heavy ball") { check_outer_rounds({OuterRule::heavy_ball, 0.5f, 0.8f}); }
}

TEST_CASE("without an outer step the consensus is committed as it is") {
  const Layout layout = mixed();
  Host host(layout);
  CHECK(host.memory->velocity().empty());
  const Image a = filled(layout, 60), b = filled(layout, 61);
  const std::uint64_t ranks[] = {host.open_with(a), host.open_with(b)};
  const ReduceResult reduced = host.reduce({{ranks[0], 0.5f, 0.5f}, {ranks[1], 0.5f, 0.5f}});
  CHECK(host.memory->committed() == 0);
  CHECK(host.commit(false).hash == reduced.hash);
  CHECK(host.memory->committed() == 1);
  CHECK(host.committed_is(average(layout, {{&a, 0.5f, 0.5f}, {&b, 0.5f, 0.5f}})));
}

TEST_CASE("velocity follows the parameters of all dtypes in layout order") {
  Layout layout{.bytes = 192,
                .sections = {{Rule::parameter, DType::f32, 0, 3, 0},
                             {Rule::buffer, DType::f32, 64, 2, 0},
                             {Rule::parameter, DType::bf16, 128, 2, 0}}};
  Host host(layout, {OuterRule::heavy_ball, 1.0f, 0.5f}, 1);
  Image zero(layout.bytes);
  Image moved(layout.bytes);
  for (const Section& section : layout.sections) {
    for (std::uint64_t i = 0; i < section.count; ++i) store(moved.data() + section.offset, section.dtype, i, -1.0);
  }
  const std::uint64_t rank = host.open_with(moved);
  host.reduce({{rank, 1.0f, 1.0f}});
  host.commit(false);  // theta_prev is zero: g = 1 everywhere
  const std::span<const float> velocity = host.memory->velocity();
  CHECK(std::vector<float>(velocity.begin(), velocity.end()) == std::vector<float>(5, 1.0f));
  CHECK(host.committed_is(moved));
}

TEST_CASE("a velocity written back goes on as if it had never left") {
  const std::uint64_t count = kChunkFloats + 5;
  const Layout layout = parameters_only(count);
  const OuterSettings outer{OuterRule::nesterov, 0.7f, 0.9f};
  Host whole(layout, outer), first(layout, outer), second(layout, outer);
  const auto round = [&](Host& host, std::uint64_t seed, bool is_seed) {
    const std::uint64_t rank = host.open_with(filled(layout, seed));
    host.reduce({{rank, 1.0f, 1.0f}});
    host.commit(is_seed);
  };
  for (Host* host : {&whole, &first}) {
    round(*host, 90, true);
    round(*host, 91, false);
  }
  const std::byte* theta = first.memory->buffer(first.memory->committed());
  const std::uint64_t rank = second.open_with(Image(theta, theta + layout.bytes));
  second.reduce({{rank, 1.0f, 1.0f}});
  second.commit(true);
  REQUIRE(second.memory->write_velocity(first.memory->velocity()).is_ok());
  round(whole, 92, false);
  round(second, 92, false);
  const std::byte* expected = whole.memory->buffer(whole.memory->committed());
  CHECK(second.committed_is(Image(expected, expected + layout.bytes)));
  CHECK(std::memcmp(second.memory->velocity().data(), whole.memory->velocity().data(), count * 4) == 0);
  CHECK(second.memory->write_velocity(std::vector<float>(count + 1)).code() == Code::invalid_argument);
  CHECK(Host(layout).memory->write_velocity(std::vector<float>(count)).code() == Code::invalid_argument);
}

TEST_CASE("wrong calls are refused and change nothing") {
  const Layout layout = parameters_only(100);
  Host host(layout);
  HostMemory& memory = *host.memory;
  const std::uint64_t rank = host.open_with(filled(layout, 70));
  const std::uint64_t other = host.open();
  const auto refused = [&](const std::vector<Contribution>& contributions) {
    return memory.start_reduce(1, contributions).code() == Code::invalid_argument;
  };
  CHECK(refused({}));
  CHECK(refused(std::vector<Contribution>(kMaxInputs + 1, {rank, 0.1f, 0.1f})));
  CHECK(refused({{rank + 100, 1.0f, 1.0f}}));
  CHECK(refused({{rank, 0.5f, 0.5f}, {rank, 0.5f, 0.5f}}));
  CHECK(refused({{rank, std::nanf(""), 0.5f}, {other, 0.5f, 0.5f}}));
  CHECK(refused({{rank, 0.5f, 0.5f}, {other, 0.5f, -0.5f}}));
  CHECK(refused({{rank, 0.5f, 1.0f}}));
  CHECK(memory.reduce_result().status().code() == Code::state);
  CHECK(memory.commit_result().status().code() == Code::state);
  CHECK(memory.start_commit(1, true).code() == Code::state);
  CHECK(memory.close_rank(12345).code() == Code::invalid_argument);
  CHECK(memory.rank_descriptor(12345).status().code() == Code::invalid_argument);
  CHECK(memory.buffer_descriptor(2).status().code() == Code::invalid_argument);
  CHECK(memory.buffer(2) == nullptr);

  host.reduce({{rank, 1.0f, 1.0f}});
  host.commit(true);
  CHECK(memory.start_commit(1, true).code() == Code::state);  // nothing pending any more

  EventQueue queue;
  CHECK(HostMemory::create(layout, {}, 0, queue).status().code() == Code::invalid_argument);
  CHECK(HostMemory::create({.bytes = 63, .sections = {}}, {}, 1, queue).status().code() == Code::invalid_argument);
  CHECK(HostMemory::create(layout, {OuterRule::nesterov, std::nanf(""), 0.9f}, 1, queue).status().code() ==
        Code::invalid_argument);
}

// False where a task ended before it could be got in the way of.
bool refuses_a_second_task(const Image& a, const Image& b, const Layout& layout) {
  Host host(layout, {OuterRule::nesterov, 0.7f, 0.9f}, 1);
  const std::vector<Contribution> both = {{host.open_with(a), 0.5f, 0.5f}, {host.open_with(b), 0.5f, 0.5f}};
  REQUIRE(host.memory->start_reduce(1, both).is_ok());
  const Status close = host.memory->close_rank(both[1].memory);
  const Status reduce = host.memory->start_reduce(2, both);
  if (close.is_ok() || reduce.is_ok()) return false;
  CHECK(close.code() == Code::state);
  CHECK(reduce.code() == Code::state);
  wait_for(host.queue, 1);
  CHECK(host.memory->start_commit(3, false, 1.1f).code() == Code::invalid_argument);
  CHECK(host.memory->start_commit(3, false, std::nanf("")).code() == Code::invalid_argument);
  REQUIRE(host.memory->start_commit(3, false).is_ok());
  const Status beside_commit = host.memory->start_reduce(4, both);
  if (beside_commit.is_ok()) return false;
  CHECK(beside_commit.code() == Code::state);
  wait_for(host.queue, 3);
  CHECK(host.memory->close_rank(both[1].memory).is_ok());
  return true;
}

TEST_CASE("one task at a time, and what it reads stays open") {
  const Layout layout = parameters_only(kChunkFloats * 8);
  const Image a = filled(layout, 80), b = filled(layout, 81);
  bool was_seen = false;
  for (int attempt = 0; attempt < 50 && !was_seen; ++attempt) was_seen = refuses_a_second_task(a, b, layout);
  CHECK(was_seen);
}

TEST_CASE("a host memory that goes away first ends its task") {
  const Layout layout = parameters_only(kChunkFloats * 4);
  const Image a = filled(layout, 82);
  Host host(layout, {}, 3);
  const std::uint64_t rank = host.open_with(a);
  REQUIRE(host.memory->start_reduce(7, std::vector<Contribution>{{rank, 1.0f, 1.0f}}).is_ok());
  host.memory.reset();
  wait_for(host.queue, 7);
}

TEST_CASE("buffers are given away for reading only") {
  const Layout layout = parameters_only(2000);
  Host host(layout);
  const Image theta = filled(layout, 83);
  host.reduce({{host.open_with(theta), 1.0f, 1.0f}});
  host.commit(true);
  const int descriptor = host.memory->buffer_descriptor(host.memory->committed()).value();
  CHECK(::mmap(nullptr, layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) == MAP_FAILED);
  void* reading = ::mmap(nullptr, layout.bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  REQUIRE(reading != MAP_FAILED);
  CHECK(std::memcmp(reading, theta.data(), theta.size()) == 0);
  CHECK(::mprotect(reading, layout.bytes, PROT_READ | PROT_WRITE) != 0);
  CHECK(::pwrite(descriptor, "x", 1, 0) == -1);
  ::munmap(reading, layout.bytes);
  CHECK(SharedMemory::adopt(descriptor, Access::read_write).status().code() == Code::system);
}

TEST_CASE("the hash of a copy made by sections equals the commit's") {
  const Layout layout = mixed();
  Host host(layout);
  const Image a = filled(layout, 84);
  host.reduce({{host.open_with(a), 1.0f, 1.0f}});
  const CommitResult committed = host.commit(true);
  Image adopted(layout.bytes);
  const std::byte* theta = host.memory->buffer(host.memory->committed());
  CHECK(copy_sections(*kernels().value(), layout, adopted.data(), theta, true) == committed.hash);
  CHECK(adopted == a);
  put(adopted.data(), 5, 0.5f);
  CHECK(hash_of(layout, adopted) != committed.hash);
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("a round takes no memory of the model's size") {
#if defined(__has_feature)
  if (__has_feature(thread_sanitizer) || __has_feature(address_sanitizer)) return;
#endif
  const Layout layout = parameters_only(kChunkFloats * 48);
  Host host(layout, {OuterRule::nesterov, 0.7f, 0.9f});
  std::vector<Contribution> contributions;
  for (int k = 0; k < 3; ++k) contributions.push_back({host.open(), 0.25f, 0.25f});
  const std::size_t before = memory_kib("VmRSS:");
  REQUIRE(before > 0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the high-water mark starts anew
  REQUIRE(memory_kib("VmHWM:") < before + 1024);
  host.reduce(contributions);
  host.commit(false);
  CHECK(memory_kib("VmHWM:") < before + 8 * 1024);
}
#endif

}  // namespace
