// What this machine's memory gives: a bare pass over an array, in the chunks and on the threads that a reduce would
// use.
#pragma once

#include <cstddef>

#include "flodl/kernels.h"
#include "flodl/status.h"

namespace flodl {

// Seconds of one pass on a pool of `threads` (1 to 256) that exists already. streams is 1 or 4, within each chunk.
// Code::invalid_argument names the argument that broke the contract; then nothing was written.
Result<double> stream_probe(const Move& job, std::size_t threads);

}  // namespace flodl
