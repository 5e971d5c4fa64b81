// The host's part of halves.h: which calls are such, and how runs are laid out on blocks and warps.
#include "hadamard/cuda/halves.h"

#include <algorithm>
#include <cmath>

#include "cuda/platform.h"

namespace graphopt {
namespace {

constexpr unsigned kFewBlocks = 160;  // so many are about one for each processor of a GPU
constexpr unsigned kManyWarps = 4;    // of a block, if runs are small
constexpr size_t kSharedLimit = 163 * 1024;

int log2_of(size_t power) {
  int log = 0;
  while (size_t{1} << log < power) ++log;
  return log;
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

unsigned up(unsigned number, unsigned divisor) { return (number + divisor - 1) / divisor; }

}  // namespace

size_t HadamardHalves::shared_bytes() const {
  const size_t pitch = (size_t{1} << log_columns) + kHalvesPad;
  const size_t input = 2 * block_runs * 16 * up(order, 16) * pitch;
  return std::max(input, 4 * block_runs * std::min(split_rows, order) * pitch);
}

// A warp has 64 sums in each lane where there are many runs, and half of them where there are few. A block's other
// warps have the rest of its columns, at most 8 times as many as one has.
void HadamardHalves::lay_out(bool may_split) {
  const unsigned tiles = up(order, 16), eights = 1u << (log_columns - 3);
  splits = block_runs = 1;
  split_rows = 16 * tiles;
  row_tiles = 1;
  column_tiles = 8;
  warps = 0;
  const unsigned rows = 16 * std::max(1u, kManyWarps * 8 / eights);
  // Where a block has 16 warps of many columns, two of half as many share a processor.
  if (may_split && (up(order, rows) * runs <= kFewBlocks || (eights > 64 && tiles > 1))) {
    splits = up(order, rows);
    split_rows = std::min(rows, 16 * tiles);
    if (eights > 64) column_tiles = 16;
    // Warps without tiles of their own help to load and to store.
    warps = std::max(8u, split_rows / 16 * eights / static_cast<unsigned>(column_tiles));
    return;
  }
  const unsigned pairs = up(tiles, 2) * eights / 8;
  if (pairs >= kManyWarps && pairs <= 20 && tiles >= 4 && eights <= 64) {
    row_tiles = 2;
    warps = pairs;
  } else if (eights <= 32 && tiles * eights <= 64) {
    warps = tiles * eights / 8;
    if (warps < kManyWarps) {
      block_runs = kManyWarps / warps;
      warps *= block_runs;
    }
  } else if (eights >= 16 && tiles * eights <= 256) {
    column_tiles = 16;
    warps = tiles * eights / 16;
  }
}

bool HadamardHalves::make(const GraphoptHadamard& call) {
  const GraphoptFactor &left = call.left, &right = call.right;
  const bool halves = call.type == GRAPHOPT_FLOAT16 || call.type == GRAPHOPT_BFLOAT16;
  if (!halves || !is_aligned(call.x) || !is_aligned(call.y)) return false;
  if (right.core > 1 || (left.core > 1 && left.outer > 1)) return false;
  for (int i = 1; i < GRAPHOPT_CORE_PARTS; ++i) {
    if (left.parts[i] > 1) return false;
  }
  const size_t columns = static_cast<size_t>(left.outer) * static_cast<size_t>(left.inner) *
                         static_cast<size_t>(right.outer) * static_cast<size_t>(right.inner);
  x = call.x;
  y = call.y;
  type = call.type;
  signs = nullptr;
  log_columns = log2_of(columns);
  if (left.core > 1) {
    order = static_cast<unsigned>(left.core);
    signs = static_cast<const uint8_t*>(left.signs);
  } else {
    const int log = std::min(6, log_columns - 6);
    if (log < 4) return false;
    order = 1u << log;
    log_columns -= log;
  }
  if (log_columns < 6 || log_columns > 10) return false;
  // The kernel counts rows of all runs in 32 bits.
  if (call.runs <= 0 || static_cast<size_t>(call.runs) * order > 0xffffffffu) return false;
  runs = static_cast<unsigned>(call.runs);
  const double width = static_cast<double>(order) * static_cast<double>(size_t{1} << log_columns);
  const int exponent = static_cast<int>(std::log2(width) / 2);
  const uint32_t power = static_cast<uint32_t>(type == GRAPHOPT_FLOAT16 ? (15 - exponent) << 10 : (127 - exponent) << 7);
  one = power << 16 | power;
  scale = static_cast<float>(left.sign * right.sign * std::ldexp(1 / std::sqrt(width), exponent));
  // Where y is x, a block must have read what it writes.
  const auto from = reinterpret_cast<uintptr_t>(x), to = reinterpret_cast<uintptr_t>(y);
  const size_t bytes = 2 * static_cast<size_t>(width) * runs;
  lay_out(from + bytes <= to || to + bytes <= from);
  const bool whole_rows = warps * kWarp * 8 % (1u << log_columns) == 0;
  return warps && whole_rows && shared_bytes() <= kSharedLimit;
}

}  // namespace graphopt
