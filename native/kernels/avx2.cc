// The loops for x86-64 with AVX2; the build compiles this file, and only this file, for that.
#define FLODL_VARIANT avx2
#define FLODL_REGISTERS_AVX2
#include "kernels/loops.h"

namespace flodl {

const LoopTable avx2_loops = avx2::kLoops;

}  // namespace flodl
