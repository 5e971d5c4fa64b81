// Hadamard of float16 and bfloat16 runs of one core and powers of two: a product on tensor cores comes first.
//
// A run is a matrix X [order, columns], columns a power of two. Its numbers are operands of a matrix product as they
// are: each times +-2^-i is exact, and sums are floats. So C^T X, where C is the core, or Sylvester's matrix for the
// upper bits of a run that has none, costs one product of 16-bit numbers, where kernels.cu cuts floats into two. The
// rest are butterflies in registers, with one exchange through shared memory. The order of additions depends on the
// orders alone, not on how many runs there are.
#pragma once

#include "hadamard/cuda/kernels.h"

namespace graphopt {

struct HadamardHalves {
  const void* x;
  void* y;
  const uint8_t* signs;  // of C, packed; null: C is Sylvester's matrix, of an order of at most 64
  uint32_t one;          // a pair of 2^-i, which are C's entries but for their signs
  float scale;           // of what C with such entries gives
  int type;
  unsigned runs;
  unsigned order;        // of C
  int log_columns;
  unsigned block_runs;   // that a block transforms, where splits is 1
  unsigned splits;       // blocks of a run, each of which has some rows of C^T X
  unsigned split_rows;   // of each but perhaps the last
  int row_tiles, column_tiles;  // 16 rows and 8 columns each: of a warp
  unsigned warps;

  // Returns whether there is such a plan for a call that HadamardPlan has one for.
  bool make(const GraphoptHadamard& call);
  size_t shared_bytes() const;
  const char* start(void* stream) const;

 private:
  void lay_out(bool may_split);
};

// Of shared memory: rows of X and of sums begin so many numbers apart, which leaves lanes of a warp in different banks.
constexpr unsigned kHalvesPad = 8;

}  // namespace graphopt
