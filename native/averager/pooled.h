// The formula of pooled variances: functions from values to values, in the same subset and under the same rules as
// kernels/math.h. Real is float, or double for f64 buffers.
#pragma once

#include "kernels/math.h"

namespace flodl_math {

template <typename Real>
FLODL_FN Real second_moment(Real variance, Real mean) {
  const Real square = mean * mean;
  return variance + square;
}

// What the weighted second moment exceeds the weighted mean's square by; never below zero, and a NaN stays one.
template <typename Real>
FLODL_FN Real pooled_variance(Real moment, Real mean) {
  const Real square = mean * mean;
  const Real left = moment - square;
  return left < Real(0) ? Real(0) : left;
}

}  // namespace flodl_math
