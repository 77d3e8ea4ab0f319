// Which table serves this process.
#pragma once

#include <string_view>

#include "flodl/kernels.h"

namespace flodl {

// The table of that name; the best one if `name` is empty. Code::invalid_argument names what this CPU and build have.
Result<const Kernels*> choose_kernels(std::string_view name);

}  // namespace flodl
