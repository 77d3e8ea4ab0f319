#include "core/available_memory.h"

#if defined(__linux__)
#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>
#endif

namespace flodl {

#if defined(__linux__)

namespace {

// The number after `key` in a file of "key number" lines, whatever stands between them.
std::optional<std::uint64_t> number_after(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    std::uint64_t number = 0;
    if (word == key && file >> number) return number;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // absent, or "max"
}

struct GroupFiles {
  const char* root;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // page cache that goes before anything is refused
};
constexpr GroupFiles kVersion1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                               "total_inactive_file"};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file"};

std::optional<std::uint64_t> left_in(const std::string& group, const GroupFiles& files) {
  const auto limit = number_in(group + files.limit);
  const auto usage = number_in(group + files.usage);
  if (!limit || !usage) return std::nullopt;
  const std::uint64_t cache = number_after(group + "/memory.stat", files.reclaimable).value_or(0);
  const std::uint64_t held = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, held);
}

// The least that a group of this process, or one above it, leaves. In a container the path may name groups outside of
// what is mounted; the mounted root is then the container's own group.
std::uint64_t least_left(std::string path, const GroupFiles& files) {
  std::uint64_t least = UINT64_MAX;
  while (true) {
    if (const auto left = left_in(files.root + path, files)) least = std::min(least, *left);
    if (path.empty()) return least;
    path.erase(path.rfind('/'));
  }
}

std::uint64_t left_in_groups() {
  std::uint64_t least = UINT64_MAX;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "number:controllers:/path"
    const auto path_at = line.find(":/");
    if (path_at == std::string::npos) continue;
    std::string path = line.substr(path_at + 1);
    if (path == "/") path.clear();
    const std::string_view controllers = std::string_view(line).substr(0, path_at);
    if (line.starts_with("0::")) least = std::min(least, least_left(path, kVersion2));
    if (controllers.ends_with(":memory")) least = std::min(least, least_left(path, kVersion1));
  }
  return least;
}

}  // namespace

std::optional<std::uint64_t> available_memory() {
  constexpr std::uint64_t kKiB = 1024;
  const auto free_kib = number_after("/proc/meminfo", "MemAvailable:");
  if (!free_kib) return std::nullopt;
  const std::uint64_t swap_kib = number_after("/proc/meminfo", "SwapFree:").value_or(0);
  return std::min((*free_kib + swap_kib) * kKiB, left_in_groups());
}

#else

std::optional<std::uint64_t> available_memory() { return std::nullopt; }

#endif

}  // namespace flodl
