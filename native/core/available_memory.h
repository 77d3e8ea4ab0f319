// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <optional>

namespace flodl {

// Bytes that can be reserved now without the kernel killing somebody: free and reclaimable memory plus free swap,
// and no more than the control groups (v1 or v2) of this process leave. Empty where the system does not say (not
// Linux).
std::optional<std::uint64_t> available_memory();

}  // namespace flodl
