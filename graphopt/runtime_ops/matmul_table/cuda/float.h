// float32 times float32, without tensor cores: those would round the operand. Zero points are taken off each value, as
// a sum of floats would lose what is taken off afterwards.
#pragma once

#include "matmul_table/cuda/decode.h"
#include "matmul_table/cuda/shapes.h"

namespace graphopt {

constexpr unsigned kFloatPitch = kTileColumns + 1;
constexpr size_t kFloatShared = 1024 + sizeof(float) * kFloatWarps * kFloatRows * kFloatPitch;

// Rows 4 t + k of a unit of the operand that exist.
GRAPHOPT_DEVICE void load_four(const Product& p, unsigned row, unsigned at, float (&x)[4]) {
  const uint8_t* const from = p.x + row * p.x_pitch + at;
  if (at + 16 <= p.x_bytes && p.aligned) {
    const Word4 word = load16(from);
    GRAPHOPT_UNROLL
    for (int k = 0; k < 4; ++k) x[k] = float_of_bits(word.words[k]);
    return;
  }
  GRAPHOPT_UNROLL
  for (unsigned k = 0; k < 4; ++k) x[k] = at + 4 * k < p.x_bytes ? *reinterpret_cast<const float*>(from + 4 * k) : 0;
}

struct FloatSums {
  float totals[kFloatRows][2], sums[kFloatRows][2], scales[2], zero_points[2];
  Segment segment;
  unsigned tile, first_row, rows;

  GRAPHOPT_DEVICE void begin_segment(const Product& p, unsigned unit) {
    segment = segment_of(p, unit);
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const unsigned column = static_cast<unsigned>(lane()) / 4 + 8 * half;
      scales[half] = of_column(p, p.scales, tile, segment.group, column);
      zero_points[half] = p.zero_points ? of_column(p, p.zero_points, tile, segment.group, column) : 0;
      GRAPHOPT_UNROLL
      for (unsigned m = 0; m < kFloatRows; ++m) sums[m][half] = 0;
    }
  }

  GRAPHOPT_DEVICE void end_segment() {
    GRAPHOPT_UNROLL
    for (unsigned m = 0; m < kFloatRows; ++m) {
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) totals[m][half] = multiply_add(sums[m][half], scales[half], totals[m][half]);
    }
  }

  // `codes[i]`: of slots i and i + 4, in pairs.
  GRAPHOPT_DEVICE void multiply_unit(const Product& p, const float* table, const uint32_t (&codes)[4], unsigned unit) {
    float weights[2][4];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, k = 2 * (i / 2);
      weights[half][k] = table[codes[i] & 0xff] - zero_points[half];
      weights[half][k + 1] = table[codes[i] >> 16] - zero_points[half];
    }
    GRAPHOPT_UNROLL
    for (unsigned m = 0; m < kFloatRows; ++m) {
      if (m >= rows) continue;
      float x[4];
      load_four(p, first_row + m, 4 * (unit * kUnitRows + 4 * (static_cast<unsigned>(lane()) % 4)), x);
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 4; ++k) sums[m][half] = multiply_add(x[k], weights[half][k], sums[m][half]);
      }
    }
    if (segment.left == kEndless || --segment.left) return;
    end_segment();
    begin_segment(p, unit + 1);
  }
};

// Grid: [tiles, splits of K, 8 rows].
GRAPHOPT_KERNEL(kFloatWarps * kWarp, 2)
void multiply_floats(Product p) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_memory());
  float* const table = reinterpret_cast<float*>(shared_memory());
  load_table(p, words);
  sync_block();
  FloatSums sums;
  sums.tile = block_index().x;
  sums.first_row = block_index().z * kFloatRows;
  sums.rows = p.rows - sums.first_row < kFloatRows ? p.rows - sums.first_row : kFloatRows;
  GRAPHOPT_UNROLL
  for (unsigned m = 0; m < kFloatRows; ++m) sums.totals[m][0] = sums.totals[m][1] = 0;
  const uint64_t parts = uint64_t{p.splits} * kFloatWarps, part = block_index().y * kFloatWarps + warp();
  const unsigned first = static_cast<unsigned>(part * p.blocks / parts);
  const unsigned end = static_cast<unsigned>((part + 1) * p.blocks / parts);
  const size_t of_block = block_bytes(static_cast<unsigned>(p.bits));
  if (first < end) {
    sums.begin_segment(p, first * kBlockUnits);
    GRAPHOPT_NO_UNROLL
    for (unsigned pair = first * kBlockPairs; pair < end * kBlockPairs; ++pair) {
      const size_t index = size_t{sums.tile} * p.blocks + pair / kBlockPairs;
      const uint8_t* const block = p.codes + index * of_block + lane() * 16;
      uint32_t of_pair[4], first_codes[4], second_codes[4];
      AnyBits::load_pair(p, block, pair % kBlockPairs, of_pair);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        first_codes[i] = AnyBits::codes<0>(p, of_pair, i);
        second_codes[i] = AnyBits::codes<1>(p, of_pair, i);
      }
      sums.multiply_unit(p, table, first_codes, 2 * pair);
      sums.multiply_unit(p, table, second_codes, 2 * pair + 1);
    }
    sums.end_segment();
  }
  float* const shared = reinterpret_cast<float*>(shared_memory() + 1024);
  GRAPHOPT_UNROLL
  for (unsigned m = 0; m < kFloatRows; ++m) {
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      // the four lanes that share a column
      const float total = reduce_sum<4>(sums.totals[m][half]);
      if (lane() % 4 == 0) shared[(warp() * kFloatRows + m) * kFloatPitch + lane() / 4 + 8 * half] = total;
    }
  }
  sync_block();
  for (unsigned i = thread_index().x; i < kFloatRows * kTileColumns; i += thread_count()) {
    const unsigned row = i / kTileColumns, column = i % kTileColumns, in_matrix = sums.tile * kTileColumns + column;
    if (row >= sums.rows || in_matrix >= p.columns) continue;
    float sum = 0;
    GRAPHOPT_UNROLL
    for (unsigned of_warp = 0; of_warp < kFloatWarps; ++of_warp) {
      sum += shared[(of_warp * kFloatRows + row) * kFloatPitch + column];
    }
    put_sum(p, block_index().y, sums.first_row + row, in_matrix, sum);
  }
}

}  // namespace graphopt
