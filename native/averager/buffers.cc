#include "averager/buffers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "averager/pooled.h"
#include "kernels/math.h"

namespace flodl {
namespace {

// How one dtype is read, summed and written. Stored is what memory holds, Value what arithmetic uses.
struct F32 {
  using Stored = float;
  using Value = float;
  static float widen(float x) { return x; }
  static float narrow(float x) { return x; }
};
struct Bf16 {
  using Stored = std::uint16_t;
  using Value = float;
  static float widen(std::uint16_t x) { return flodl_math::float_of_bf16(x); }
  static std::uint16_t narrow(float x) { return flodl_math::bf16_of_float(x); }
};
struct F16 {
  using Stored = std::uint16_t;
  using Value = float;
  static float widen(std::uint16_t x) { return flodl_math::float_of_f16(x); }
  static std::uint16_t narrow(float x) { return flodl_math::f16_of_float(x); }
};
struct F64 {
  using Stored = double;
  using Value = double;
  static double widen(double x) { return x; }
  static double narrow(double x) { return x; }
};

template <typename Stored>
Stored load(const std::byte* from, std::size_t index) {
  Stored value;
  std::memcpy(&value, from + index * sizeof(Stored), sizeof(Stored));
  return value;
}

template <typename Type>
void pool(const PooledVariance& job) {
  using Stored = typename Type::Stored;
  using Value = typename Type::Value;
  for (std::size_t i = 0; i < job.count; ++i) {
    Value moment{};
    Value mean{};
    for (std::size_t k = 0; k < job.variances.size(); ++k) {
      const Value weight{job.weights[k]};
      const Value own_mean = Type::widen(load<Stored>(job.means[k], i));
      const Value own = flodl_math::second_moment(Type::widen(load<Stored>(job.variances[k], i)), own_mean);
      moment = k == 0 ? flodl_math::weighted_first(weight, own) : flodl_math::weighted_next(moment, weight, own);
      mean = k == 0 ? flodl_math::weighted_first(weight, own_mean) : flodl_math::weighted_next(mean, weight, own_mean);
    }
    const Stored pooled = Type::narrow(flodl_math::pooled_variance(moment, mean));
    std::memcpy(job.out + i * sizeof(Stored), &pooled, sizeof(Stored));
  }
}

template <typename Type>
std::size_t find_nonfinite(const std::byte* data, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(Type::widen(load<typename Type::Stored>(data, i)))) return i;
  }
  return count;
}

template <typename Integer>
void largest(std::span<const std::byte* const> inputs, std::byte* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Integer most = load<Integer>(inputs[0], i);
    for (const std::byte* input : inputs.subspan(1)) most = std::max(most, load<Integer>(input, i));
    std::memcpy(out + i * sizeof(Integer), &most, sizeof(Integer));
  }
}

}  // namespace

std::size_t first_nonfinite(const std::byte* data, DType dtype, std::size_t count) {
  switch (dtype) {
    case DType::f32:
      return find_nonfinite<F32>(data, count);
    case DType::bf16:
      return find_nonfinite<Bf16>(data, count);
    case DType::f16:
      return find_nonfinite<F16>(data, count);
    case DType::f64:
      return find_nonfinite<F64>(data, count);
    default:
      return count;
  }
}

void pool_variance(const PooledVariance& job, std::span<unsigned char> is_finite) {
  for (std::size_t k = 0; k < job.variances.size(); ++k) {
    is_finite[k] = first_nonfinite(job.variances[k], job.dtype, job.count) == job.count;
  }
  if (job.variances.size() == 1) {
    std::memcpy(job.out, job.variances[0], job.count * bytes_of(job.dtype));
    return;
  }
  switch (job.dtype) {
    case DType::f32:
      return pool<F32>(job);
    case DType::bf16:
      return pool<Bf16>(job);
    case DType::f16:
      return pool<F16>(job);
    case DType::f64:
      return pool<F64>(job);
    default:
      return;  // Layout::check() lets no other dtype through
  }
}

void take_largest(std::span<const std::byte* const> inputs, DType dtype, std::byte* out, std::size_t count) {
  switch (dtype) {
    case DType::i64:
      return largest<std::int64_t>(inputs, out, count);
    case DType::i32:
      return largest<std::int32_t>(inputs, out, count);
    case DType::i16:
      return largest<std::int16_t>(inputs, out, count);
    case DType::i8:
      return largest<std::int8_t>(inputs, out, count);
    case DType::u8:
    case DType::boolean:
      return largest<std::uint8_t>(inputs, out, count);
    default:
      return;  // Layout::check() lets no other dtype through
  }
}

}  // namespace flodl
