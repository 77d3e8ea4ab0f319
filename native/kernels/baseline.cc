// The loops for any CPU of the platform; on x86-64 that is SSE2.
#define FLODL_VARIANT baseline
#if defined(__SSE2__) || defined(_M_X64)
#define FLODL_REGISTERS_SSE2
#endif
#include "kernels/loops.h"

namespace flodl {

const LoopTable baseline_loops = baseline::kLoops;

}  // namespace flodl
