// One attempt to average: reads sealed memory, writes the pending buffer, keeps what each chunk taught.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "averager/chunks.h"
#include "flodl/host_memory.h"
#include "flodl/kernels.h"
#include "flodl/layout.h"

namespace flodl {

struct ReductionInput {
  const std::byte* data;  // an image of the layout
  float weight;
  float buffer_weight;
};

// All memory is taken by the constructor (chunks x inputs figures, never a model's worth): run() cannot throw.
// 1..kMaxInputs inputs. `layout`, `chunks` and all images must outlive the attempt.
class Reduction {
 public:
  Reduction(const Kernels& kernels, const Layout& layout, std::span<const Chunk> chunks,
            std::span<const ReductionInput> inputs, std::byte* out);

  // How many calls of run() there are to make: one for each chunk, or for two that go side by side.
  std::size_t pieces() const { return pieces_.size(); }
  // Any thread; each piece once. Writes the bytes of its chunks of `out` and nothing else there.
  void run(std::size_t piece) noexcept;
  // After the last piece. Combines in chunk order, so neither threads nor claimers show in the figures.
  ReduceResult finish() const;
  // Per chunk, of what was written.
  std::span<const std::uint64_t> hashes() const { return hashes_; }

 private:
  using Places = std::array<const std::byte*, kMaxInputs>;
  // The slice of one chunk in a table of chunks x inputs.
  std::size_t row(std::size_t chunk) const { return chunk * data_.size(); }
  struct Piece {
    std::size_t first;  // chunk
    bool is_pair;       // with the next one, of the same section and size
  };
  void run_mean(const Piece& piece, std::span<const float> weights);
  // The sum of one chunk; `storage` holds its inputs.
  WeightedSum mean_of(std::size_t index, std::span<const float> weights, Places& storage) const;
  void keep(std::size_t index, const WeightedSumStats& stats);
  void run_pooled(std::size_t index);
  void run_largest(std::size_t index);
  // The inputs from byte `offset` on; `storage` holds the pointers.
  std::span<const std::byte* const> at(std::uint64_t offset, Places& storage) const;
  std::string find_nonfinite(std::size_t input) const;

  const Kernels& kernels_;
  const Layout& layout_;
  std::span<const Chunk> chunks_;
  std::byte* const out_;
  const bool streams_;
  std::vector<Piece> pieces_;
  std::vector<const std::byte*> data_;
  std::vector<float> weights_;
  std::vector<float> buffer_weights_;

  std::vector<std::uint64_t> hashes_;     // per chunk
  std::vector<double> norm_sq_;           // per chunk
  std::vector<double> distance_sq_;       // chunks x inputs
  std::vector<unsigned char> is_finite_;  // chunks x inputs; bytes, so that threads share no word
};

}  // namespace flodl
