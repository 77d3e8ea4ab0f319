// The names that Python uses for dtypes, rules, outer rules and bare passes. An unknown one raises and lists what there
// is.
#pragma once

#include <string>

#include "flodl/kernels.h"
#include "flodl/layout.h"

namespace flodl::bindings {

DType dtype_named(const std::string& name);
Rule rule_named(const std::string& name);
OuterRule outer_rule_named(const std::string& name);
MoveKind move_kind_named(const std::string& name);

}  // namespace flodl::bindings
