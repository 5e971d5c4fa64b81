// MatMulCodebook's kernel: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// A call; numbers are float32 and dense, in the order of the definition.
struct CodebookProduct {
  const float *x, *scales, *level_table, *books, *shifts;
  const uint8_t *codes, *levels;
  float* y;
  size_t batch, rows, columns;  // of x, and of the weight
  size_t size;                  // numbers of an entry
  size_t group, span;           // rows that share a level, and a scale
  unsigned index_bits, second_bits, sign_bits, shift_bits, level_bits;
  bool of_rows;  // an entry is numbers of one row

  unsigned bits() const { return index_bits + second_bits + sign_bits + shift_bits; }
  size_t blocks() const { return (rows + size - 1) / size; }
  size_t groups() const { return (rows + group - 1) / group; }
  size_t spans() const { return (rows + span - 1) / span; }
};

constexpr size_t kCodebookColumns = 16;

// Rows of a tile that are decoded at a time where x has several: 16 KB of floats stay in the first cache.
constexpr size_t kCodebookRows = 256;

struct CodebookKernels {
  // All rows of x times the columns of a tile.
  void (*run)(const CodebookProduct&, size_t tile, float* scratch);
};

extern const CodebookKernels kCodebookScalar, kCodebookAvx2, kCodebookAvx512, kCodebookNeon;

// Bytes of a task's scratch: decoded rows of a tile, and its sums.
inline size_t codebook_scratch(const CodebookProduct& call) {
  return (kCodebookRows + call.batch) * kCodebookColumns * sizeof(float);
}

}  // namespace graphopt
