// The weighted sum with its statistics: one pass over memory, in blocks. Up to four inputs (the common case) go through
// registers together, so that each value is loaded once; more go in groups of four, then meet the finished block again
// while it is in the cache. Both ways give the same bits.
#pragma once

#include "kernels/blocks.h"
#include "kernels/loop_table.h"

namespace flodl::FLODL_VARIANT {
namespace {

// sum (+)= weights[0] inputs[0] + ... in that order; N inputs in one go, so that the sum stays in registers.
template <typename D, int N, bool kFirst>
void accumulate(const typename D::Storage* const* inputs, const float* weights, typename D::Wide* FLODL_RESTRICT sum,
                size_t count) {
  using Wide = typename D::Wide;
  using Storage = typename D::Storage;
  const Storage* FLODL_RESTRICT a = inputs[0];
  const Storage* FLODL_RESTRICT b = inputs[N > 1 ? 1 : 0];
  const Storage* FLODL_RESTRICT c = inputs[N > 2 ? 2 : 0];
  const Storage* FLODL_RESTRICT d = inputs[N > 3 ? 3 : 0];
  const Wide p = weights[0];
  const Wide q = weights[N > 1 ? 1 : 0];
  const Wide r = weights[N > 2 ? 2 : 0];
  const Wide s = weights[N > 3 ? 3 : 0];
  for (size_t i = 0; i < count; ++i) {
    Wide total = kFirst ? flodl_math::weighted_first<Wide>(p, D::widen(a[i]))
                        : flodl_math::weighted_next<Wide>(sum[i], p, D::widen(a[i]));
    if constexpr (N > 1) total = flodl_math::weighted_next<Wide>(total, q, D::widen(b[i]));
    if constexpr (N > 2) total = flodl_math::weighted_next<Wide>(total, r, D::widen(c[i]));
    if constexpr (N > 3) total = flodl_math::weighted_next<Wide>(total, s, D::widen(d[i]));
    sum[i] = total;
  }
}

template <typename D, bool kFirst>
void accumulate_up_to_four(const typename D::Storage* const* inputs, const float* weights, size_t width,
                           typename D::Wide* sum, size_t count) {
  switch (width) {
    case 1:
      return accumulate<D, 1, kFirst>(inputs, weights, sum, count);
    case 2:
      return accumulate<D, 2, kFirst>(inputs, weights, sum, count);
    case 3:
      return accumulate<D, 3, kFirst>(inputs, weights, sum, count);
    default:
      return accumulate<D, 4, kFirst>(inputs, weights, sum, count);
  }
}

// The sum of the block that starts at element `at`. One input is taken as it is.
template <typename D>
void sum_block(const SumArguments& given, size_t at, size_t count, typename D::Wide* FLODL_RESTRICT sum) {
  using Storage = typename D::Storage;
  const Storage* group[4];
  if (given.width == 1) {
    const Storage* FLODL_RESTRICT only = static_cast<const Storage*>(given.inputs[0]) + at;
    for (size_t i = 0; i < count; ++i) sum[i] = D::widen(only[i]);
    return;
  }
  for (size_t first = 0; first < given.width; first += 4) {
    const size_t width = smaller(4, given.width - first);
    for (size_t k = 0; k < width; ++k) group[k] = static_cast<const Storage*>(given.inputs[first + k]) + at;
    if (first == 0) {
      accumulate_up_to_four<D, true>(group, given.weights, width, sum, count);
    } else {
      accumulate_up_to_four<D, false>(group, given.weights + first, width, sum, count);
    }
  }
}

constexpr size_t kMostInputs = 256;  // kMaxInputs of flodl/kernels.h
constexpr size_t kFew = 4;

struct Statistics {
  Totals norm;
  alignas(64) Totals distances[kMostInputs];

  explicit Statistics(size_t width) {
    norm.clear();
    for (size_t k = 0; k < width; ++k) distances[k].clear();
  }
};

// What one row of lanes adds to the statistics.
template <typename Wide>
struct Squares {
  Wide norm = 0;
  Wide a = 0;
  Wide b = 0;
  Wide c = 0;
  Wide d = 0;
};

// One lane of one row of a whole block: the sum, as Out holds it, and the squares.
template <typename Out, int N, typename Wide>
FLODL_FN Wide sum_lane(Squares<Wide>& squares, const Wide* weights, Wide a, Wide b, Wide c, Wide d) {
  Wide sum = N == 1 ? a : flodl_math::weighted_first<Wide>(weights[0], a);
  if constexpr (N > 1) sum = flodl_math::weighted_next<Wide>(sum, weights[1], b);
  if constexpr (N > 2) sum = flodl_math::weighted_next<Wide>(sum, weights[2], c);
  if constexpr (N > 3) sum = flodl_math::weighted_next<Wide>(sum, weights[3], d);
  sum = Out::widen(Out::narrow(sum));
  squares.norm += sum * sum;
  squares.a += flodl_math::squared_difference<Wide>(a, sum);
  if constexpr (N > 1) squares.b += flodl_math::squared_difference<Wide>(b, sum);
  if constexpr (N > 2) squares.c += flodl_math::squared_difference<Wide>(c, sum);
  if constexpr (N > 3) squares.d += flodl_math::squared_difference<Wide>(d, sum);
  return sum;
}

// Up to four inputs in one go: every value is loaded once. Same bits as sum_block and reduce_distance.
template <typename Out, int N, typename Wide>
void sum_and_reduce(const Wide* const* inputs, const float* given_weights, Wide* FLODL_RESTRICT sum,
                    Statistics& statistics) {
  const Wide* FLODL_RESTRICT a = inputs[0];
  const Wide* FLODL_RESTRICT b = inputs[N > 1 ? 1 : 0];
  const Wide* FLODL_RESTRICT c = inputs[N > 2 ? 2 : 0];
  const Wide* FLODL_RESTRICT d = inputs[N > 3 ? 3 : 0];
  const Wide weights[4] = {given_weights[0], given_weights[N > 1 ? 1 : 0], given_weights[N > 2 ? 2 : 0],
                           given_weights[N > 3 ? 3 : 0]};
  alignas(64) Wide lanes[5][kLanes];
  for (auto& row : lanes) {
    for (size_t l = 0; l < kLanes; ++l) row[l] = 0;
  }
  for (size_t first = 0; first < kBlock; first += kGroup) {
    for (size_t l = 0; l < kLanes; ++l) {
      Squares<Wide> squares;
      const size_t i = first + l;
#define FLODL_ROW(at) sum[at] = sum_lane<Out, N, Wide>(squares, weights, a[at], b[at], c[at], d[at])
      FLODL_ROW(i);
      FLODL_ROW(i + kLanes);
      FLODL_ROW(i + 2 * kLanes);
      FLODL_ROW(i + 3 * kLanes);
      FLODL_ROW(i + 4 * kLanes);
      FLODL_ROW(i + 5 * kLanes);
      FLODL_ROW(i + 6 * kLanes);
      FLODL_ROW(i + 7 * kLanes);
#undef FLODL_ROW
      lanes[0][l] += squares.norm;
      lanes[1][l] += squares.a;
      if constexpr (N > 1) lanes[2][l] += squares.b;
      if constexpr (N > 2) lanes[3][l] += squares.c;
      if constexpr (N > 3) lanes[4][l] += squares.d;
    }
  }
  statistics.norm.add(lanes[0]);
  for (int k = 0; k < N; ++k) statistics.distances[k].add(lanes[k + 1]);
}

#if defined(FLODL_HAS_FLOAT_ROWS)
// sum_and_reduce for fp32, row by row in registers, with hash and stores to `out` in between: bursts of stores as long
// as a block would fill the store queue and hold up the loads behind them (measured: a fifth of the bandwidth).
template <int N, bool kStreams>
void sum_rows(const float* const* inputs, const float* weights, float* out, Hash& hash, Statistics& statistics) {
  constexpr size_t kRow = kLanes / (sizeof(Floats) / sizeof(float));
  constexpr size_t kWidth = kLanes / kRow;
  // Where a row is as wide as a stripe of the hash it is hashed in registers; else there are too few of those.
  constexpr bool kHashesRows = kRow == 1;
  alignas(64) float lanes[N + 1][kLanes] = {};
  alignas(64) float sums[kGroup];
  Floats weight[N];
  const float* input[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    weight[k] = splat(weights[k]);
    input[k] = inputs[k];
  }
  Hash::Running running = hash.running(0);
  for (size_t first = 0; first < kBlock; first += kGroup) {
    Floats squares[N + 1][kRow] = {};
#pragma GCC unroll 1
    for (size_t at = 0; at < kGroup; at += kLanes) {
#pragma GCC unroll 4
      for (size_t r = 0; r < kRow; ++r) {
        const size_t i = first + at + r * kWidth;
        Floats x[N];
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) x[k] = load_floats(input[k] + i);
        Floats sum = x[0];
        if constexpr (N > 1) sum = flodl_math::weighted_first<Floats>(weight[0], sum);
#pragma GCC unroll 4
        for (int k = 1; k < N; ++k) sum = flodl_math::weighted_next<Floats>(sum, weight[k], x[k]);
        if constexpr (kHashesRows) {
          running.take(__builtin_bit_cast(Register, sum));
        } else {
          store_floats(sums + at + r * kWidth, sum);
        }
        if constexpr (kStreams) {
          stream_floats(out + i, sum);
        } else {
          store_floats(out + i, sum);
        }
        squares[0][r] = squares[0][r] + sum * sum;
#pragma GCC unroll 4
        for (int k = 0; k < N; ++k) {
          squares[k + 1][r] = squares[k + 1][r] + flodl_math::squared_difference<Floats>(x[k], sum);
        }
      }
    }
    if constexpr (kHashesRows) {
      hash.end_part(running);
    } else {
      hash.update_part(sums);
    }
    for (int k = 0; k <= N; ++k) {
#pragma GCC unroll 4
      for (size_t r = 0; r < kRow; ++r) {
        float* lane = lanes[k] + r * kWidth;
        store_floats(lane, load_floats(lane) + squares[k][r]);
      }
    }
  }
  statistics.norm.add(lanes[0]);
  for (int k = 0; k < N; ++k) statistics.distances[k].add(lanes[k + 1]);
}

using SumRows = void (*)(const float* const*, const float*, float*, Hash&, Statistics&);

template <bool kStreams>
SumRows sum_rows_of(size_t width) {
  constexpr SumRows kByWidth[] = {sum_rows<1, kStreams>, sum_rows<2, kStreams>, sum_rows<3, kStreams>,
                                  sum_rows<4, kStreams>};
  return kByWidth[width - 1];
}
#endif

template <typename Out, typename Wide>
void sum_and_reduce_of(size_t width, const Wide* const* inputs, const float* weights, Wide* sum,
                       Statistics& statistics) {
  switch (width) {
    case 1:
      return sum_and_reduce<Out, 1, Wide>(inputs, weights, sum, statistics);
    case 2:
      return sum_and_reduce<Out, 2, Wide>(inputs, weights, sum, statistics);
    case 3:
      return sum_and_reduce<Out, 3, Wide>(inputs, weights, sum, statistics);
    default:
      return sum_and_reduce<Out, 4, Wide>(inputs, weights, sum, statistics);
  }
}

// One block of the sum, and the statistics so far.
template <typename In, typename Out>
struct SumBlock {
  using Wide = typename In::Wide;
  using Storage = typename In::Storage;
  static constexpr bool kWidens = sizeof(Storage) != sizeof(Wide);

  const SumArguments& given;
  alignas(64) Wide sum[kBlock];
  Statistics statistics;
  alignas(64) Storage rooms[kWidens ? 1 : kFew][kBlock];
  alignas(64) Wide wide[kWidens ? kFew : 1][kBlock];

  explicit SumBlock(const SumArguments& arguments) : given(arguments), statistics(arguments.width) {}

  const Storage* input(size_t k, size_t at) const { return static_cast<const Storage*>(given.inputs[k]) + at; }

  void few(size_t at, size_t count) {
    const Wide* inputs[kFew];
    for (size_t k = 0; k < given.width; ++k) {
      if constexpr (kWidens) {
        const Storage* FLODL_RESTRICT block = whole_block(input(k, at), count, rooms[0]);
        for (size_t i = 0; i < kBlock; ++i) wide[k][i] = In::widen(block[i]);
        inputs[k] = wide[k];
      } else {
        inputs[k] = whole_block(input(k, at), count, rooms[k]);
      }
    }
    sum_and_reduce_of<Out, Wide>(given.width, inputs, given.weights, sum, statistics);
  }

  // Whether whole blocks go row by row through registers.
  bool has_rows() const {
#if defined(FLODL_HAS_FLOAT_ROWS)
    return sizeof(Storage) == sizeof(float) && sizeof(typename Out::Storage) == sizeof(float) && given.width <= kFew;
#else
    return false;
#endif
  }

  // The whole block that starts at element `at`. Only where has_rows().
  void rows(size_t at, Hash& hash) {
#if defined(FLODL_HAS_FLOAT_ROWS)
    if constexpr (sizeof(Storage) == sizeof(float) && sizeof(typename Out::Storage) == sizeof(float)) {
      const float* inputs[kFew];
      for (size_t k = 0; k < given.width; ++k) inputs[k] = input(k, at);
      auto* out = static_cast<float*>(given.out) + at;
      const bool streams = given.streams && reinterpret_cast<uintptr_t>(out) % sizeof(Floats) == 0;
      const SumRows sum_block_rows = streams ? sum_rows_of<true>(given.width) : sum_rows_of<false>(given.width);
      sum_block_rows(inputs, given.weights, out, hash, statistics);
    }
#endif
    static_cast<void>(at);
    static_cast<void>(hash);
  }

  void many(size_t at, size_t count) {
    sum_block<In>(given, at, count, sum);
    for (size_t i = 0; i < count; ++i) sum[i] = Out::widen(Out::narrow(sum[i]));
    for (size_t i = count; i < kBlock; ++i) sum[i] = 0;
    reduce_norm<Wide>(statistics.norm, sum);
    for (size_t k = 0; k < given.width; ++k) {
      reduce_distance<In>(statistics.distances[k], whole_block(input(k, at), count, rooms[0]), sum);
    }
  }
};

// A sum under way.
template <typename In, typename Out>
struct Sum {
  using OutStorage = typename Out::Storage;
  static constexpr bool kNarrows = sizeof(OutStorage) != sizeof(typename In::Wide);

  SumBlock<In, Out> block;
  Hash hash;
  size_t at = 0;
  alignas(64) OutStorage narrowed[kNarrows ? kBlock : 1];

  explicit Sum(const SumArguments& given) : block(given), hash(given.chunk, given.count * sizeof(OutStorage)) {}

  size_t count() const { return block.given.count; }

  void next_block() {
    const size_t size = smaller(kBlock, count() - at);
    if (size == kBlock && block.has_rows()) {
      block.rows(at, hash);
    } else {
      next_plain(size);
    }
    at += size;
  }

  void next_plain(size_t size) {
    const SumArguments& given = block.given;
    if (given.width <= kFew) {
      block.few(at, size);
    } else {
      block.many(at, size);
    }
    const void* finished = block.sum;
    if constexpr (kNarrows) {
      for (size_t i = 0; i < size; ++i) narrowed[i] = Out::narrow(block.sum[i]);
      finished = narrowed;
    }
    hash_and_copy(hash, static_cast<OutStorage*>(given.out) + at, finished, size * sizeof(OutStorage), given.streams);
  }

  Digest finish() {
    const SumArguments& given = block.given;
    if (given.streams) fence_streams();
    for (size_t k = 0; k < given.width; ++k) {
      given.distance_sq[k] = block.statistics.distances[k].sum();
      given.is_finite[k] = is_all_finite<In>(given.distance_sq[k], block.input(k, 0), given.count);
    }
    return {block.statistics.norm.sum(), hash.finish(), true};
  }
};

template <typename In, typename Out>
Digest weighted_sum(const SumArguments& given) {
  Sum<In, Out> sum(given);
  while (sum.at < sum.count()) sum.next_block();
  return sum.finish();
}

// In turn, so that the pages of one are on their way while the other is summed: a single chunk leaves the reader
// waiting at each of its page ends (measured: a fifth of the bandwidth).
template <typename In, typename Out>
void weighted_sum_pair(const SumArguments* two, Digest* digests) {
  Sum<In, Out> first(two[0]);
  Sum<In, Out> second(two[1]);
  while (first.at < first.count()) {
    first.next_block();
    second.next_block();
  }
  digests[0] = first.finish();
  digests[1] = second.finish();
}

}  // namespace
}  // namespace flodl::FLODL_VARIANT
