// tests/vectors/wire/frames.txt, parsed.
#pragma once

#include <cstddef>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace flodl::testing {

struct FrameVector {
  std::string name;
  std::vector<std::byte> bytes;
  std::vector<std::string> frames;  // "kind generation descriptors payload"
  std::string end;                  // "whole", "incomplete N" or "error: part of the message"
};

inline std::vector<std::byte> bytes_of_hex(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

inline std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(' ');
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(trimmed(part));
  return parts;
}

inline std::vector<FrameVector> read_frame_vectors(const std::string& path) {
  std::ifstream file(path);
  std::vector<FrameVector> vectors;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.starts_with('#')) continue;
    const std::vector<std::string> fields = split(line, '|');
    if (fields.size() != 4) throw std::runtime_error("not four fields: " + line);
    vectors.push_back({fields[0], bytes_of_hex(fields[1]), split(fields[2], ';'), fields[3]});
  }
  return vectors;
}

}  // namespace flodl::testing
