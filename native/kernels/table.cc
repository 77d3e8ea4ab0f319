#include "kernels/table.h"

#include <bit>
#include <cassert>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/loop_table.h"
#include "kernels/math.h"

#if defined(_MSC_VER) && defined(_M_X64)
#include <intrin.h>
#endif

namespace flodl {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash reads little-endian words in place");

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// In this file, so that the loops cannot know it to be zeros and leave the update out.
alignas(64) const unsigned char kNothing[64] = {};

// The public functions around one instruction set's loops: spans become pointers here, outside the files that are
// compiled for more than every CPU has.
template <const LoopTable& kLoops>
struct Adapter {
  static SumArguments sum_arguments(const WeightedSum& given, WeightedSumStats& stats) {
    assert(!given.inputs.empty() && given.inputs.size() <= kMaxInputs && given.weights.size() == given.inputs.size());
    assert(is_float(given.dtype) && is_float(given.out_dtype));
    assert((given.dtype == DType::f64) == (given.out_dtype == DType::f64));
    return {reinterpret_cast<const void* const*>(given.inputs.data()),
            given.weights.data(),
            given.inputs.size(),
            given.out,
            given.count,
            given.chunk,
            given.streams,
            stats.is_finite.data(),
            stats.distance_sq.data()};
  }

  static void keep(const Digest& digest, WeightedSumStats& stats) {
    stats.norm_sq = digest.norm_sq;
    stats.hash = digest.hash;
  }

  static void weighted_sum(const WeightedSum& given, WeightedSumStats& stats) {
    keep(kLoops.weighted_sum(sum_arguments(given, stats), given.dtype, given.out_dtype), stats);
  }

  static void weighted_sum_pair(const std::array<WeightedSum, 2>& given, std::array<WeightedSumStats, 2>& stats) {
    assert(given[0].inputs.size() == given[1].inputs.size() && given[0].count == given[1].count);
    assert(given[0].dtype == given[1].dtype && given[0].out_dtype == given[1].out_dtype);
    const SumArguments two[2] = {sum_arguments(given[0], stats[0]), sum_arguments(given[1], stats[1])};
    Digest digests[2];
    kLoops.weighted_sum_pair(two, digests, given[0].dtype, given[0].out_dtype);
    for (std::size_t i = 0; i < 2; ++i) keep(digests[i], stats[i]);
  }

  static GatherStats gather(const Gather& given) {
    const std::size_t count = is_float(given.dtype) ? given.count : given.count * bytes_of(given.dtype);
    const Digest digest = kLoops.gather({given.src, given.dst, count, given.chunk, given.streams}, given.dtype);
    return {digest.norm_sq, digest.is_finite, digest.hash};
  }

  static std::uint64_t copy_hash(std::byte* dst, const std::byte* src, std::size_t bytes, std::uint64_t chunk,
                                 bool streams) {
    return kLoops.gather({src, dst, bytes, chunk, streams}, DType::u8).hash;
  }

  static std::uint64_t outer_step(const OuterStep& given) {
    assert(is_float(given.dtype));
    OuterFormula formula = OuterFormula::pass;
    if (given.rule == OuterRule::nesterov) formula = OuterFormula::nesterov;
    if (given.rule == OuterRule::heavy_ball) formula = OuterFormula::heavy_ball;
    const bool takes_consensus = given.lr == 1.0f && given.momentum == 0.0f;
    const OuterArguments arguments{formula,
                                   takes_consensus,
                                   given.lr,
                                   given.momentum,
                                   given.theta_prev,
                                   given.theta,
                                   given.velocity,
                                   reinterpret_cast<void* const*>(given.copies.data()),
                                   given.copies.size(),
                                   given.count,
                                   given.chunk,
                                   given.streams};
    return kLoops.outer_step(arguments, given.dtype);
  }

  static void blend_delta(std::byte* w, const std::byte* theta, const std::byte* snapshot, DType dtype,
                          std::size_t count) {
    assert(is_float(dtype));
    kLoops.blend_delta(w, theta, snapshot, dtype, count);
  }

  static void blend_elastic(std::byte* w, const std::byte* theta, float alpha, DType dtype, std::size_t count) {
    assert(is_float(dtype));
    kLoops.blend_elastic(w, theta, alpha, dtype, count);
  }

  static double distance_sq(const std::byte* a, const std::byte* b, DType dtype, std::size_t count) {
    assert(is_float(dtype));
    return kLoops.distance_sq(a, b, dtype, count);
  }

  static std::uint64_t move(const Move& given) {
    assert(given.streams == 1 || given.streams == 4);
    MovePass pass = MovePass::copy;
    if (given.kind == MoveKind::update) pass = MovePass::update;
    if (given.kind == MoveKind::read) pass = MovePass::read;
    return kLoops.move({pass, given.dst, given.src, given.bytes, given.streams, kNothing});
  }
};

template <const LoopTable& kLoops>
constexpr Kernels kernels_of(std::string_view name) {
  using Functions = Adapter<kLoops>;
  return {name,
          Functions::weighted_sum,
          Functions::weighted_sum_pair,
          Functions::gather,
          Functions::copy_hash,
          Functions::outer_step,
          Functions::blend_delta,
          Functions::blend_elastic,
          Functions::distance_sq,
          Functions::move};
}

// The operating system's part counts too: registers that it does not save are registers we do not have.
#if defined(FLODL_HAS_AVX2) && defined(_MSC_VER)
bool has_extended_state(unsigned long long mask) {
  int leaf[4];
  __cpuid(leaf, 1);
  const bool has_xgetbv = (leaf[2] & (1 << 27)) != 0;
  return has_xgetbv && (_xgetbv(0) & mask) == mask;
}
int features_of_leaf_7() {
  int leaf[4];
  __cpuid(leaf, 0);
  if (leaf[0] < 7) return 0;
  __cpuidex(leaf, 7, 0);
  return leaf[1];
}
bool has_avx2() { return has_extended_state(0x6) && (features_of_leaf_7() & (1 << 5)) != 0; }
bool has_avx512() {
  const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  return has_extended_state(0xe6) && (static_cast<unsigned>(features_of_leaf_7()) & wanted) == wanted;
}
#elif defined(FLODL_HAS_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

std::vector<const Kernels*> find_available() {
  static constexpr Kernels kBaseline = kernels_of<baseline_loops>("baseline");
  std::vector<const Kernels*> found;
  found.push_back(&kBaseline);
#if defined(FLODL_HAS_AVX2)
  static constexpr Kernels kAvx2 = kernels_of<avx2_loops>("avx2");
  if (has_avx2()) found.push_back(&kAvx2);
#endif
#if defined(FLODL_HAS_AVX512)
  static constexpr Kernels kAvx512 = kernels_of<avx512_loops>("avx512");
  if (has_avx512()) found.push_back(&kAvx512);
#endif
#if defined(FLODL_HAS_NEON)
  static constexpr Kernels kNeon = kernels_of<neon_loops>("neon");
  found.push_back(&kNeon);
#endif
  return found;
}

}  // namespace

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> found = find_available();
  return found;
}

Result<const Kernels*> choose_kernels(std::string_view name) {
  const std::span<const Kernels* const> available = available_kernels();
  if (name.empty()) return available.back();
  std::string names;
  for (const Kernels* table : available) {
    if (table->name == name) return table;
    if (!names.empty()) names += ", ";
    names += table->name;
  }
  return Status(Code::invalid_argument, "FLODL_ISA names kernels \"" + std::string(name) +
                                            "\", which this build or CPU lacks\nhere are: " + names +
                                            " (unset FLODL_ISA to take the last one)");
}

Result<const Kernels*> kernels() {
  static const Result<const Kernels*> chosen = [] {
    const char* name = std::getenv("FLODL_ISA");
    return choose_kernels(name == nullptr ? std::string_view{} : std::string_view{name});
  }();
  return chosen;
}

std::uint64_t combine_hashes(std::span<const std::uint64_t> hashes) {
  std::uint64_t combined = flodl_math::hash_seed(hashes.size(), 0);
  for (const std::uint64_t hash : hashes) combined = flodl_math::hash_fold(combined, hash);
  return combined;
}

}  // namespace flodl
