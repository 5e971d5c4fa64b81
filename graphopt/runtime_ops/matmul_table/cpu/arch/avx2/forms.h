// Which tables AVX2 multiplies in a way of its own; AVX-VNNI is given the same words of x.
#pragma once

#include "arch/line.h"
#include "matmul_table/cpu/kernels.h"

namespace graphopt {
namespace {

alignas(32) constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Ones that are read where they are used: in a register they would take that of a product through all lines.
GRAPHOPT_FORCE_INLINE const int16_t* ones_near() {
  const int16_t* ones = kOnes;
  asm volatile("" : "+r"(ones));
  return ones;
}

// Whether `AsMinifloats` multiplies the table: eight products of the lower half of its magnitudes fit 16 bits, and four
// of the upper one.
inline bool is_minifloat(const Table& table, int bits) {
  if (!table.has_signs || (bits != 5 && bits != 6)) return false;
  if (!table.wide) return table.largest_integer <= 64;
  const int half = 1 << (bits - 2);
  for (int code = 0; code < 2 * half; ++code) {
    const int most = code < half ? 32 : 64 * table.upper_factor;
    if (table.integer_of(static_cast<size_t>(code)) > most) return false;
  }
  return table.upper_factor <= 1 << 14;
}

// Whether the sums of a unit fit 16 bits, so that the registers hold those of a whole panel; see AsRuns. Formats of
// fewer bits are rare, and those of more have larger bytes. `AsMinifloats` has no sums for a whole panel.
template <int Bits>
constexpr bool kSumsRuns = Bits >= 3 && Bits <= 5;

inline bool sums_runs(const Weights& weights) {
  return weights.bits >= 3 && weights.bits <= 5 && !weights.table.is_trellis && !weights.table.wide &&
         weights.table.most <= 32 && !is_minifloat(weights.table, weights.bits);
}

// Rows that are summed up in 16 bits where bytes are 16 at most.
constexpr size_t kRowsOfRun = 32;

// Whether groups of codes of 4 bits are whole runs and have nothing but scales.
inline bool has_groups_of_runs(const Weights& weights) {
  return weights.bits == 4 && sums_runs(weights) && weights.table.most <= 16 && weights.group % kRowsOfRun == 0 &&
         weights.group <= Weights::kSegment && weights.rows % weights.group == 0 && !weights.levels.bytes &&
         !weights.has_zero_points();
}

// What words hold of integers: where `sums_bytes` is false, products of bytes are summed up only where two fit 16 bits.
inline Words form_of_integers(const Weights& weights, bool is_small_m, bool sums_bytes) {
  const Table& table = weights.table;
  if (table.is_trellis) return Words::kBytes;
  if (is_small_m && is_minifloat(table, weights.bits)) return Words::kBytes;
  if (is_small_m && table.wide && weights.bits >= 3 && weights.bits <= 5) return Words::kFours;
  return table.wide || (!sums_bytes && !table.fits_pairs()) ? Words::kPairs : Words::kBytes;
}

}  // namespace
}  // namespace graphopt
