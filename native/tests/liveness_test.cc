#include "transport/liveness.h"

#include "doctest/doctest.h"

namespace flodl {
namespace {

using std::chrono::milliseconds;
constexpr EndpointOptions kOptions{.heartbeat_s = 1.0, .silence_s = 5.0};
const Liveness::Time kStart{std::chrono::hours(1)};

}  // namespace

TEST_CASE("an idle link is due a heartbeat, a busy one is not") {
  Liveness liveness(kOptions);
  liveness.add(1, kStart);
  liveness.add(2, kStart);
  CHECK(liveness.next_deadline() == kStart + milliseconds(1000));
  liveness.sent(2, kStart + milliseconds(600));
  CHECK(liveness.due(kStart + milliseconds(999)).heartbeats.empty());
  CHECK(liveness.due(kStart + milliseconds(1000)).heartbeats == std::vector<std::uint64_t>{1});
  CHECK(liveness.due(kStart + milliseconds(1000)).heartbeats.empty());  // counted as sent
  CHECK(liveness.next_deadline() == kStart + milliseconds(1600));
  CHECK(liveness.due(kStart + milliseconds(2000)).heartbeats == std::vector<std::uint64_t>{1, 2});
}

TEST_CASE("a silence is reported once, and its end once") {
  Liveness liveness(kOptions);
  liveness.add(7, kStart);
  CHECK(liveness.due(kStart + milliseconds(4999)).silent.empty());
  const auto due = liveness.due(kStart + milliseconds(5500));
  REQUIRE(due.silent.size() == 1);
  CHECK(due.silent[0].first == 7);
  CHECK(due.silent[0].second == doctest::Approx(5.5));
  CHECK(liveness.due(kStart + milliseconds(9000)).silent.empty());
  const auto silent_for = liveness.heard(7, kStart + milliseconds(9500));
  REQUIRE(silent_for.has_value());
  CHECK(*silent_for == doctest::Approx(9.5));
  CHECK_FALSE(liveness.heard(7, kStart + milliseconds(9600)).has_value());
  CHECK(liveness.due(kStart + milliseconds(14'599)).silent.empty());
  CHECK(liveness.due(kStart + milliseconds(14'600)).silent.size() == 1);
}

TEST_CASE("without silence_s nothing is ever silent") {
  Liveness liveness({.heartbeat_s = 1.0, .silence_s = 0.0});
  liveness.add(1, kStart);
  CHECK(liveness.due(kStart + std::chrono::hours(24)).silent.empty());
}

TEST_CASE("a judge that overslept by more than a second starts all ages anew") {
  Liveness liveness(kOptions);
  liveness.add(1, kStart);
  const auto planned = kStart + milliseconds(1000);
  const auto woke = planned + milliseconds(60'000);
  liveness.woke(planned, woke);
  CHECK(liveness.due(woke).silent.empty());
  CHECK(liveness.due(woke + milliseconds(4999)).silent.empty());
  CHECK(liveness.due(woke + milliseconds(5000)).silent.size() == 1);
}

TEST_CASE("a child that stands stopped is told once per stop") {
  Liveness liveness(kOptions);
  CHECK_FALSE(liveness.looked(42, true, kStart).has_value());
  CHECK_FALSE(liveness.looked(42, true, kStart + milliseconds(4999)).has_value());
  const auto seconds = liveness.looked(42, true, kStart + milliseconds(5500));
  REQUIRE(seconds.has_value());
  CHECK(*seconds == doctest::Approx(5.5));
  CHECK_FALSE(liveness.looked(42, true, kStart + milliseconds(9000)).has_value());
  CHECK_FALSE(liveness.looked(42, false, kStart + milliseconds(9100)).has_value());
  CHECK_FALSE(liveness.looked(42, true, kStart + milliseconds(9200)).has_value());
  CHECK(liveness.looked(42, true, kStart + milliseconds(14'200)).has_value());
  // Its number may be another child's by then.
  liveness.forget(42);
  CHECK_FALSE(liveness.looked(42, true, kStart + milliseconds(15'000)).has_value());
}

TEST_CASE("the time that the judge overslept is no time that a child stood stopped") {
  Liveness liveness(kOptions);
  CHECK_FALSE(liveness.looked(42, true, kStart).has_value());
  const auto woke = kStart + milliseconds(61'000);
  liveness.woke(kStart + milliseconds(1000), woke);
  CHECK_FALSE(liveness.looked(42, true, woke).has_value());
  CHECK(liveness.looked(42, true, woke + milliseconds(5000)).has_value());
}

TEST_CASE("a judge that is a little late judges") {
  Liveness liveness(kOptions);
  liveness.add(1, kStart);
  const auto planned = kStart + milliseconds(5000);
  liveness.woke(planned, planned + milliseconds(1000));
  CHECK(liveness.due(planned + milliseconds(1000)).silent.size() == 1);
}

TEST_CASE("a link that is gone is nobody's concern") {
  Liveness liveness(kOptions);
  CHECK_FALSE(liveness.next_deadline().has_value());
  liveness.add(1, kStart);
  liveness.remove(1);
  CHECK_FALSE(liveness.next_deadline().has_value());
  CHECK_FALSE(liveness.heard(1, kStart).has_value());
  liveness.sent(1, kStart);
  const auto due = liveness.due(kStart + std::chrono::hours(1));
  CHECK(due.heartbeats.empty());
  CHECK(due.silent.empty());
}

TEST_CASE("an endless heartbeat is far away, not in the past") {
  Liveness liveness({.heartbeat_s = 1e300, .silence_s = 1e300});
  liveness.add(1, kStart);
  CHECK(*liveness.next_deadline() > kStart + std::chrono::hours(24 * 365));
}

}  // namespace flodl
