// The loops for x86-64 with AVX-512 F, BW, DQ and VL; the build compiles this file, and only this file, for that.
#define FLODL_VARIANT avx512
#define FLODL_REGISTERS_AVX512
#include "kernels/loops.h"

namespace flodl {

const LoopTable avx512_loops = avx512::kLoops;

}  // namespace flodl
