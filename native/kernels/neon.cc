// The loops for 64-bit ARM, whose NEON is always there.
#define FLODL_VARIANT neon
#define FLODL_REGISTERS_NEON
#include "kernels/loops.h"

namespace flodl {

const LoopTable neon_loops = neon::kLoops;

}  // namespace flodl
