// A warp's part of a product on tensor cores: some tiles of 16 columns, times some tiles of 8 rows of the operand, over
// a range of K. The weights are the left matrix, so that few rows of x waste little.
#pragma once

#include "cuda/matrix.h"
#include "matmul_table/cuda/decode.h"

namespace graphopt {

// Numbers that tensor cores multiply. A step is 32 bytes of a row of the operand, of which a lane has 8: the rows of K
// whose codes it has in one unit of 16-bit numbers, or in two of bytes. Of 16-bit numbers they are bytes 4 t and 16 + 4 t
// of the step and what follows; rows of bytes are rounded in such an order that they are bytes 8 t and on (round.h).
struct Float16Kind {
  using Sum = float;
  static constexpr bool kBytes = false;
  static constexpr uint32_t kOnes = 0x3c003c00u;
  GRAPHOPT_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_f16(d, a, b);
  }
};
struct BFloat16Kind {
  using Sum = float;
  static constexpr bool kBytes = false;
  static constexpr uint32_t kOnes = 0x3f803f80u;
  GRAPHOPT_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_bf16(d, a, b);
  }
};
struct ByteKind {
  using Sum = int32_t;
  static constexpr bool kBytes = true;
  static constexpr uint32_t kOnes = 0x01010101u;
  GRAPHOPT_DEVICE static void multiply(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_s8(d, a, b);
  }
};

// Of a row of the operand.
template <typename Kind>
constexpr unsigned kBytesOfBlock = kBlockRows * (Kind::kBytes ? 1 : 2);

// Where a lane begins to read 8 rows of the operand in shared memory, `pitch` bytes from one to the next: its 8 bytes of a
// step of bytes, or the row that load_matrices<Count>() asks for, `Count` times 16 bytes of 16-bit numbers.
template <typename Kind, int Count>
GRAPHOPT_DEVICE unsigned lane_of_operand(unsigned pitch) {
  const unsigned of_lane = static_cast<unsigned>(lane());
  return Kind::kBytes ? of_lane / 4 * pitch + of_lane % 4 * 8 : of_lane % 8 * pitch + of_lane / 8 % Count * 16;
}

// Sums of `Tiles` tiles of columns and `Rows` tiles of 8 rows. Lane 4 g + t has columns g and g + 8 of a tile and rows
// 2 t and 2 t + 1: number i is column g + 8 (i / 2) and row 2 t + i % 2.
template <typename Kind, typename Decode, int Tiles, int Rows, bool MaySum>
struct Sums {
  using Sum = typename Kind::Sum;
  static constexpr int kPlanes = Decode::kWide ? 2 : 1;

  float totals[Tiles][Rows][4];
  Sum sums[kPlanes][Tiles][Rows][4];
  Sum ones[MaySum ? Rows : 1][4];  // sums of the operand itself, the same for all columns
  float scales[Tiles][2], zero_points[MaySum ? Tiles : 1][2];
  Segment segment;
  unsigned first_tile, first_row;
  int row_tiles;  // that are there

  // Where the lane's codes of a block of the first tile are.
  GRAPHOPT_DEVICE const uint8_t* block_at(const Product& p, unsigned block) const {
    const unsigned tile = first_tile < p.tiles ? first_tile : p.tiles - 1;
    return p.codes + (size_t{tile} * p.blocks + block) * block_bytes(static_cast<unsigned>(p.bits)) + lane() * 16;
  }
  // From a tile to the next; 0 where there is none, whose sums are unused.
  GRAPHOPT_DEVICE size_t bytes_of_tile(const Product& p) const {
    return first_tile + 1 < p.tiles ? p.blocks * block_bytes(static_cast<unsigned>(p.bits)) : 0;
  }

  GRAPHOPT_DEVICE void begin(const Product& p, unsigned unit) {
    static_assert(Tiles <= 2, "a tile that is not there is the one before");
    GRAPHOPT_UNROLL
    for (int n = 0; n < Tiles; ++n) {
      GRAPHOPT_UNROLL
      for (int m = 0; m < Rows; ++m) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) totals[n][m][i] = 0;
      }
    }
    begin_segment(p, unit);
  }

  // Its scales are loaded here, long before they are used.
  GRAPHOPT_DEVICE void begin_segment(const Product& p, unsigned unit) {
    segment = segment_of(p, unit);
    GRAPHOPT_UNROLL
    for (int n = 0; n < Tiles; ++n) {
      const unsigned tile = first_tile + n < p.tiles ? first_tile + n : p.tiles - 1;
      GRAPHOPT_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        const unsigned column = column_of<Decode>(static_cast<unsigned>(lane()) / 4, half);
        scales[n][half] = of_column(p, p.scales, tile, segment.group, column);
        if constexpr (MaySum) {
          const bool has_zero_points = p.zero_points;
          zero_points[n][half] =
              has_zero_points ? of_column(p, p.zero_points, tile, segment.group, column) * p.inverse_step : 0;
        }
      }
      GRAPHOPT_UNROLL
      for (int m = 0; m < Rows; ++m) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          GRAPHOPT_UNROLL
          for (int plane = 0; plane < kPlanes; ++plane) sums[plane][n][m][i] = 0;
        }
      }
    }
    if constexpr (MaySum) {
      GRAPHOPT_UNROLL
      for (int m = 0; m < Rows; ++m) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) ones[m][i] = 0;
      }
    }
  }

  // What the segment gives so far, to the totals.
  GRAPHOPT_DEVICE void end_segment(const Product& p) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < Rows; ++m) {
      if (m >= row_tiles) continue;
      GRAPHOPT_UNROLL
      for (int of_row = 0; of_row < 2; ++of_row) {
        float scale = p.step;
        if constexpr (Kind::kBytes) {
          const size_t row = first_row + 8 * m + 2 * (static_cast<unsigned>(lane()) % 4) + of_row;
          scale = p.x_scales[segment.index * size_t{p.x_scale_pitch} + row];
        }
        GRAPHOPT_UNROLL
        for (int n = 0; n < Tiles; ++n) {
          GRAPHOPT_UNROLL
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * half + of_row;
            float value = sum_of(p, n, m, i);
            if constexpr (MaySum) {
              if (p.zero_points) value = value - zero_points[n][half] * static_cast<float>(ones[m][i]);
            }
            totals[n][m][i] = multiply_add(value * scale, scales[n][half], totals[n][m][i]);
          }
        }
      }
    }
  }

  // Of decoded + offset.
  GRAPHOPT_DEVICE float sum_of(const Product& p, int n, int m, int i) const {
    if constexpr (!Kind::kBytes || !MaySum) {
      return static_cast<float>(sums[0][n][m][i]);
    } else {
      const float low = static_cast<float>(sums[0][n][m][i] + p.offset * ones[m][i]);
      if constexpr (Decode::kWide) return static_cast<float>(sums[1][n][m][i]) * 256.0f + low;
      return low;
    }
  }

  // Multiplies a block of each tile, `of_tile` bytes apart, and begins to load those `step` bytes behind.
  // `operand(step, m, b)` fills in what a lane has of a step of a tile of rows.
  template <typename Operand>
  GRAPHOPT_DEVICE void multiply_block(const Product& p, const uint32_t* table, const uint8_t* block, size_t of_tile,
                                      size_t step, uint32_t (&words)[Tiles][4][Decode::kWords], unsigned unit,
                                      const Operand& operand) {
    if (segment.left >= kBlockUnits) {
      GRAPHOPT_UNROLL
      for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
        // Few rows come from global memory: this keeps the compiler from loading the whole block's at once, for which
        // it has no registers.
        if (Rows <= 2 && pair) sync_warp();
        uint32_t of_pair[Tiles][Decode::kPairWords];
        GRAPHOPT_UNROLL
        for (int n = 0; n < Tiles; ++n) Decode::prepare(pair, words[n][pair], of_pair[n]);
        multiply_pair<false>(p, table, of_pair, 0, pair, operand);
        GRAPHOPT_UNROLL
        for (int n = 0; n < Tiles; ++n) {
          Decode::reload(p, block + n * of_tile + step, static_cast<int>(pair), words[n]);
        }
      }
      return advance(p, kBlockUnits, unit + kBlockUnits);
    }
    // A segment ends within the block: pair by pair, read once more, in a loop that is not unrolled.
    GRAPHOPT_NO_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
      uint32_t of_pair[Tiles][Decode::kPairWords];
      GRAPHOPT_UNROLL
      for (int n = 0; n < Tiles; ++n) {
        uint32_t loaded[Decode::kWords];
        Decode::load_pair(p, block + n * of_tile, pair, loaded);
        Decode::prepare(pair, loaded, of_pair[n]);
      }
      multiply_pair<true>(p, table, of_pair, unit + 2 * pair, pair, operand);
    }
    GRAPHOPT_UNROLL
    for (int n = 0; n < Tiles; ++n) Decode::load_block(p, block + n * of_tile + step, words[n]);
  }

  GRAPHOPT_DEVICE void advance(const Product& p, unsigned units, unsigned next) {
    if (segment.left == kEndless) return;
    segment.left -= units;
    if (segment.left) return;
    end_segment(p);
    begin_segment(p, next);
  }

  template <bool Ragged, typename Operand>
  GRAPHOPT_DEVICE void multiply_pair(const Product& p, const uint32_t* table,
                                     const uint32_t (&words)[Tiles][Decode::kPairWords], unsigned unit, unsigned pair,
                                     const Operand& operand) {
    if constexpr (Kind::kBytes) {
      uint32_t b[Rows][2];
      load_operand(operand, pair, b);
      uint32_t a[kPlanes][Tiles][4];
      GRAPHOPT_UNROLL
      for (int n = 0; n < Tiles; ++n) decode_bytes(p, table, words, n, a);
      if (!Ragged || segment.left != 1) {
        multiply_step(p, a, b, 3);
        if constexpr (Ragged) advance(p, 2, unit + 2);
        return;
      }
      multiply_step(p, a, b, 1);
      advance(p, 1, unit + 1);
      multiply_step(p, a, b, 2);
      advance(p, 1, unit + 2);
    } else {
      multiply_unit<0>(p, table, words, 2 * pair, operand);
      if constexpr (Ragged) advance(p, 1, unit + 1);
      multiply_unit<1>(p, table, words, 2 * pair + 1, operand);
      if constexpr (Ragged) advance(p, 1, unit + 2);
    }
  }

  template <typename Operand>
  GRAPHOPT_DEVICE void load_operand(const Operand& operand, unsigned step, uint32_t (&b)[Rows][2]) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < Rows; ++m) {
      if (m < row_tiles) operand(step, m, b[m]);
    }
  }

  GRAPHOPT_DEVICE void decode_bytes(const Product& p, const uint32_t* table,
                                    const uint32_t (&words)[Tiles][Decode::kPairWords], int n,
                                    uint32_t (&a)[kPlanes][Tiles][4]) {
    uint32_t first[2], second[2];
    if constexpr (Decode::kWide) {
      uint32_t high[2];
      Decode::template decode<0>(p, table, words[n], first, high);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) a[kPlanes - 1][n][i] = high[i];
      Decode::template decode<1>(p, table, words[n], second, high);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) a[kPlanes - 1][n][2 + i] = high[i];
    } else {
      Decode::template decode<0>(p, table, words[n], first);
      Decode::template decode<1>(p, table, words[n], second);
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      a[0][n][i] = first[i];
      a[0][n][2 + i] = second[i];
    }
  }

  // `units`: which of the two units count, by bits.
  GRAPHOPT_DEVICE void multiply_step(const Product& p, const uint32_t (&a)[kPlanes][Tiles][4],
                                     const uint32_t (&b)[Rows][2], int units) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < Rows; ++m) {
      if (m >= row_tiles) continue;
      const uint32_t of_units[2] = {units & 1 ? b[m][0] : 0, units & 2 ? b[m][1] : 0};
      GRAPHOPT_UNROLL
      for (int n = 0; n < Tiles; ++n) {
        GRAPHOPT_UNROLL
        for (int plane = 0; plane < kPlanes; ++plane) Kind::multiply(sums[plane][n][m], a[plane][n], of_units);
      }
      add_ones(p, m, of_units);
    }
  }

  template <int H, typename Operand>
  GRAPHOPT_DEVICE void multiply_unit(const Product& p, const uint32_t* table,
                                     const uint32_t (&words)[Tiles][Decode::kPairWords], unsigned step,
                                     const Operand& operand) {
    uint32_t b[Rows][2];
    load_operand(operand, step, b);
    uint32_t a[Tiles][4];
    GRAPHOPT_UNROLL
    for (int n = 0; n < Tiles; ++n) Decode::template decode<H>(p, table, words[n], a[n]);
    GRAPHOPT_UNROLL
    for (int m = 0; m < Rows; ++m) {
      if (m >= row_tiles) continue;
      GRAPHOPT_UNROLL
      for (int n = 0; n < Tiles; ++n) Kind::multiply(sums[0][n][m], a[n], b[m]);
      add_ones(p, m, b[m]);
    }
  }

  // A matrix of ones gives the sums of the operand, in the lanes that use them.
  GRAPHOPT_DEVICE void add_ones(const Product& p, int m, const uint32_t (&b)[2]) {
    if constexpr (MaySum) {
      constexpr uint32_t kAll[4] = {Kind::kOnes, Kind::kOnes, Kind::kOnes, Kind::kOnes};
      if (p.with_sums) Kind::multiply(ones[m], kAll, b);
    }
  }
};

}  // namespace graphopt
