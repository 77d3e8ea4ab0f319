// tests/vectors/kernels/*.txt, written by tools/make_kernel_vectors.py from numpy alone: every table must give its
// bits.
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "doctest/doctest.h"
#include "flodl/kernels.h"

using namespace flodl;

namespace {

using Bytes = std::vector<std::byte>;

Bytes unhex(const std::string& text) {
  Bytes bytes;
  if (text == "-") return bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// One line: a name and key=value fields.
class Case {
 public:
  explicit Case(const std::string& line) {
    std::istringstream stream(line);
    stream >> name_;
    for (std::string field; stream >> field;) {
      const std::size_t equals = field.find('=');
      fields_[field.substr(0, equals)] = field.substr(equals + 1);
    }
  }

  const std::string& name() const { return name_; }
  const std::string& text(const std::string& key) const { return fields_.at(key); }
  Bytes bytes(const std::string& key) const { return unhex(text(key)); }
  std::uint64_t chunk() const { return std::stoull(text("chunk")); }
  std::uint64_t word(const std::string& key) const { return std::stoull(text(key), nullptr, 16); }
  float single(const std::string& key) const { return floats(key).at(0); }

  std::vector<float> floats(const std::string& key) const {
    const Bytes held = bytes(key);
    std::vector<float> values(held.size() / sizeof(float));
    if (!held.empty()) std::memcpy(values.data(), held.data(), held.size());
    return values;
  }

  std::vector<std::uint64_t> words(const std::string& key) const {
    std::vector<std::uint64_t> values;
    if (text(key) == "-") return values;
    for (const std::string& part : split(text(key))) values.push_back(std::stoull(part, nullptr, 16));
    return values;
  }

  DType dtype(const std::string& key) const {
    static const std::map<std::string, DType> names{
        {"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}, {"f64", DType::f64}};
    return names.at(text(key));
  }

 private:
  std::string name_;
  std::map<std::string, std::string> fields_;
};

std::vector<Case> read_cases(const std::string& file) {
  std::ifstream stream(std::string(FLODL_VECTORS_DIR) + "/kernels/" + file);
  std::vector<Case> cases;
  for (std::string line; std::getline(stream, line);) cases.emplace_back(line);
  REQUIRE(!cases.empty());
  return cases;
}

std::uint64_t bits(double x) {
  std::uint64_t word;
  std::memcpy(&word, &x, sizeof word);
  return word;
}

void check_sum(const Kernels& table, const Case& given) {
  std::vector<Bytes> inputs;
  for (const std::string& part : split(given.text("inputs"))) inputs.push_back(unhex(part));
  std::vector<const std::byte*> at;
  for (const Bytes& input : inputs) at.push_back(input.data());
  const std::vector<float> weights = given.floats("weights");
  const Bytes expected = given.bytes("out");
  Bytes out(expected.size());
  const DType dtype = given.dtype("dtype");
  const std::size_t count = inputs[0].size() / bytes_of(dtype);
  WeightedSumStats stats;
  table.weighted_sum({at, weights, dtype, out.data(), given.dtype("out_dtype"), count, given.chunk(), false}, stats);
  CHECK(out == expected);
  CHECK(stats.hash == given.word("hash"));
  CHECK(bits(stats.norm_sq) == given.word("norm"));
  const std::vector<std::uint64_t> distances = given.words("distances");
  REQUIRE(distances.size() == inputs.size());
  for (std::size_t k = 0; k < distances.size(); ++k) CHECK(bits(stats.distance_sq[k]) == distances[k]);
}

void check_outer_step(const Kernels& table, const Case& given) {
  static const std::map<std::string, OuterRule> rules{
      {"none", OuterRule::none}, {"nesterov", OuterRule::nesterov}, {"heavy_ball", OuterRule::heavy_ball}};
  const DType dtype = given.dtype("dtype");
  const Bytes before = given.bytes("theta_prev");
  Bytes theta = given.bytes("consensus");
  std::vector<float> velocity = given.floats("velocity");
  const std::size_t count = theta.size() / bytes_of(dtype);
  const std::uint64_t hash = table.outer_step({rules.at(given.text("rule")),
                                               given.single("lr"),
                                               given.single("momentum"),
                                               dtype,
                                               before.data(),
                                               theta.data(),
                                               velocity.data(),
                                               {},
                                               count,
                                               given.chunk()});
  CHECK(theta == given.bytes("theta_out"));
  CHECK(velocity == given.floats("velocity_out"));
  CHECK(hash == given.word("hash"));
}

void check_blend(const Kernels& table, const Case& given) {
  const DType dtype = given.dtype("dtype");
  Bytes w = given.bytes("w");
  const Bytes theta = given.bytes("theta");
  const std::size_t count = w.size() / bytes_of(dtype);
  if (given.text("kind") == "delta") {
    table.blend_delta(w.data(), theta.data(), given.bytes("snapshot").data(), dtype, count);
  } else {
    table.blend_elastic(w.data(), theta.data(), given.single("alpha"), dtype, count);
  }
  CHECK(w == given.bytes("out"));
}

void check_gather(const Kernels& table, const Case& given) {
  const DType dtype = given.dtype("dtype");
  const Bytes src = given.bytes("src");
  Bytes dst(src.size());
  const GatherStats stats =
      table.gather({src.data(), dst.data(), dtype, src.size() / bytes_of(dtype), given.chunk(), false});
  CHECK(dst == src);
  CHECK(stats.hash == given.word("hash"));
  CHECK(bits(stats.norm_sq) == given.word("norm"));
}

void check_hash(const Kernels& table, const Case& given) {
  if (given.name() == "combine") {
    CHECK(combine_hashes(given.words("hashes")) == given.word("hash"));
    return;
  }
  const Bytes src = given.bytes("src");
  CHECK(table.copy_hash(nullptr, src.data(), src.size(), given.chunk(), false) == given.word("hash"));
}

void check_file(const std::string& file, void (*check)(const Kernels&, const Case&)) {
  const std::vector<Case> cases = read_cases(file);
  for (const Kernels* table : available_kernels()) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      CAPTURE(table->name);
      CAPTURE(i + 1);
      check(*table, cases[i]);
    }
  }
}

}  // namespace

TEST_CASE("weighted sums give the committed bits") { check_file("weighted_sum.txt", check_sum); }
TEST_CASE("outer steps give the committed bits") { check_file("outer_step.txt", check_outer_step); }
TEST_CASE("blends give the committed bits") { check_file("blend.txt", check_blend); }
TEST_CASE("gathers give the committed norm and hash") { check_file("gather.txt", check_gather); }
TEST_CASE("hashes are the committed ones") { check_file("hash.txt", check_hash); }
