// Shared by the CUDA kernels of the products: their arguments, and where the segments of K are.
#pragma once

#include "cuda/device.h"
#include "matmul_table/cuda/layout.h"

namespace graphopt {

// Rows of K that are summed up before they are scaled: a group, or a piece of one that is long, as in weights.h.
constexpr unsigned kSegmentUnits = 32;
constexpr unsigned kEndless = 0xffffffffu;

// y = x W. `rows` counts the operand's rows, two for each row of x where x is rounded to 16 bits.
struct Product {
  const uint8_t* codes;
  const uint32_t* table;      // 256 entries
  const void *scales, *zero_points;  // [tile][group][16]; the latter may be null
  const float* bias;          // may be null
  const uint8_t* x;           // operands [rows], x_pitch bytes from one to the next, of which x_bytes are there
  const float* x_scales;      // bytes only: [segment][x_scale_pitch], or of rows alone where x_scale_pitch is 0
  void* y;
  float* partials;            // [split][row of y][column]; null where there is one split
  size_t x_pitch;
  unsigned x_bytes, x_scale_pitch;
  unsigned rows, columns, tiles, blocks, units, group_units, segments_of_group, groups, splits;
  int y_type;                 // GraphoptType
  int bits, offset;
  uint32_t lookup[8];
  float step, inverse_step;   // value = step (decoded + offset)
  float gain;                 // of weights where they are scaled in float16
  bool half_scales, with_sums, two;  // two operand rows for each of y
  bool aligned;                      // rows of the operand are at multiples of 16 bytes
};

// A segment, seen from one of its units.
struct Segment {
  unsigned index, group;
  unsigned left;  // units up to its end; kEndless in the last one, as what is behind it is padding
};

GRAPHOPT_DEVICE Segment segment_of(const Product& p, unsigned unit) {
  const unsigned group = unit / p.group_units, in_group = unit - group * p.group_units;
  const unsigned piece = in_group / kSegmentUnits;
  unsigned end = (piece + 1) * kSegmentUnits;
  end = end < p.group_units ? end : p.group_units;
  const unsigned last = group * p.group_units + end;
  return {group * p.segments_of_group + piece, group, last < p.units ? last - unit : kEndless};
}

// A number of scales or of zero points: of column `column` of a tile.
GRAPHOPT_DEVICE float of_column(const Product& p, const void* numbers, unsigned tile, unsigned group, unsigned column) {
  const size_t at = (static_cast<size_t>(tile) * p.groups + group) * kTileColumns + column;
  return p.half_scales ? to_float(static_cast<const Half*>(numbers)[at]) : static_cast<const float*>(numbers)[at];
}

GRAPHOPT_DEVICE uint32_t load_word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

// A scale as it lies in memory: what is loaded is waited for where it is first computed with, so a kernel that loads
// ahead must not convert at once.
GRAPHOPT_DEVICE uint32_t load_scale(const Product& p, const uint8_t* from) {
  if (p.half_scales) return *reinterpret_cast<const uint16_t*>(from);
  return load_word(from);
}
GRAPHOPT_DEVICE float scale_of(const Product& p, uint32_t loaded) {
  return p.half_scales ? to_float(Half{static_cast<uint16_t>(loaded)}) : float_of_bits(loaded);
}
// Where the scale of a column of a tile is.
GRAPHOPT_DEVICE const uint8_t* scale_at(const Product& p, unsigned tile, unsigned group, unsigned column) {
  const size_t at = (size_t{tile} * p.groups + group) * kTileColumns + column;
  return static_cast<const uint8_t*>(p.scales) + at * (p.half_scales ? 2 : 4);
}
// The group of a block of K, where groups are of whole blocks or there is one.
GRAPHOPT_DEVICE unsigned group_of_block(const Product& p, unsigned block) {
  return p.group_units == kBlockUnits ? block : block / ((p.group_units + kBlockUnits - 1) / kBlockUnits);
}

// Stores a row's number: in y with the bias, or among the parts that another kernel sums up.
template <typename T>
GRAPHOPT_DEVICE void put(void* to, size_t at, float value) {
  static_cast<T*>(to)[at] = from_float<T>(value);
}
GRAPHOPT_DEVICE void put_y(void* y, int type, size_t at, float value) {
  if (type == 1) return put<float>(y, at, value);
  if (type == 10) return put<Half>(y, at, value);
  put<BFloat16>(y, at, value);
}
GRAPHOPT_DEVICE void put_sum(const Product& p, unsigned split, unsigned row, unsigned column, float value) {
  const size_t rows = p.two ? p.rows / 2 : p.rows;
  if (p.partials) {
    p.partials[(split * rows + row) * p.columns + column] = value;
  } else {
    put_y(p.y, p.y_type, static_cast<size_t>(row) * p.columns + column, p.bias ? value + p.bias[column] : value);
  }
}

// The 256 words of the table to shared memory, which holds nothing else at `to`.
GRAPHOPT_DEVICE void load_table(const Product& p, uint32_t* to) {
  for (unsigned i = thread_index().x; i < 256; i += thread_count()) to[i] = p.table[i];
}

}  // namespace graphopt
