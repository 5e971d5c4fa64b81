// The plan of a transform on a GPU: a block transforms one tile in shared memory, stage after stage.
//
// The factors of a Kronecker product commute, so stages are in any order. A tile is a matrix [rows, width] of numbers:
// whole runs of x side by side in one row, or, where a run is larger than shared memory, some columns of what is left
// of a run behind a pass over the right factor. A stage works along the stride that its factor has in the tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/c_interface.h"

namespace graphopt {

constexpr int kHadamardThreads = 256;
constexpr int kMaxStages = 24;
constexpr int kMaxCore = 256;  // of a part of one
constexpr int kMaxLog = 5;  // butterflies of up to 2^5 numbers, in registers

// One word in 33 is empty, so that lanes that read along a stride of a power of two do not conflict in a bank.
constexpr size_t padded_index(size_t index) { return index + index / 32; }
// The largest tile of floats for which shared memory suffices on every GPU from sm_80 on.
constexpr size_t kMaxTile = 40448;

struct HadamardStage {
  const uint8_t* signs;  // of a part of a core, packed; null for butterflies
  int order;             // of that part, or 2 to 2^kMaxLog
  unsigned stride;
};

struct HadamardPass {
  const void* x;
  void* y;
  int type_x, type_y;
  float scale;
  size_t numbers;        // of x
  unsigned rows, width;  // of a tile, whose numbers fit an unsigned; in one row, the last tile may have fewer runs
  size_t pitch;          // from row to row; 0 where there is one
  unsigned tiles_of_run; // where there is more than one row
  bool aligned;          // rows are at multiples of 16 bytes, in x
  int load_log;          // butterflies of 2^load_log neighbours are done on the way in, and those of the last
  HadamardStage last;    // stage on the way out: order 1 where there are none
  int stages;
  HadamardStage stage[kMaxStages];

  size_t tile() const { return size_t{rows} * width; }
  size_t tiles() const { return (numbers + tile() - 1) / tile(); }
};

// Passes over memory: one, or two with floats between them.
struct HadamardPlan {
  int passes = 0;
  int largest_part = 0;  // of a core; 0: there is none
  size_t scratch = 0;    // bytes
  HadamardPass pass[2];

  // Returns null, or why there is no plan.
  const char* make(const GraphoptHadamard& call);
};

// Bytes of a packed part of a core, which are what its products read: for 16 outputs, each lane's signs of all inputs.
constexpr size_t hadamard_signs(int part) { return part > 1 ? (part + 15) / 16 * size_t{512} : 0; }

}  // namespace graphopt
