// Up to 16 rows of the operand, and codes that arithmetic decodes: every weight is read once, straight into registers.
// A block of threads has 128 columns: its rows of the operand stand in shared memory, a chunk of K ahead, so that they
// are read from the caches once for 128 columns and no load of them is waited for.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"

namespace graphopt {

// Blocks of K whose operand is copied at a time; a warp has every second one, and as many are loaded ahead.
constexpr unsigned kChunkBlocks = 8;
constexpr unsigned kStreamedColumns = kStreamedTiles * kTileColumns;

template <typename Kind>
constexpr unsigned kStreamedPitch = kChunkBlocks * kBytesOfBlock<Kind> + (Kind::kBytes ? 32 : 16);  // as of kPitch
template <typename Kind, int RowTiles>
constexpr unsigned kStreamedStage = 8 * RowTiles * kStreamedPitch<Kind>;
template <typename Kind, typename Decode, int RowTiles>
constexpr size_t kStreamedShared = Decode::kTableBytes + 2 * kStreamedStage<Kind, RowTiles>;  // the table comes first

// What a warp has of two tiles of columns.
template <typename Kind, typename Decode, int RowTiles>
struct StreamedTiles {
  static constexpr unsigned kDepth = Decode::kBits > 6 ? 1 : Decode::kBits > 2 ? 2 : 4;  // blocks ahead, as registers allow

  static constexpr int kStepsLoaded = RowTiles == 1 ? 2 : 1;  // at a time, as registers allow
  float totals[2][RowTiles][4] = {};
  uint32_t words[kDepth][2][4][Decode::kWords];
  uint32_t scales[kDepth][2][2];  // as they were loaded
  const uint8_t* codes[2];        // the lane's, of the block that is loaded next
  const uint8_t* of_scales[2];    // the lane's columns, of the first group

  GRAPHOPT_DEVICE StreamedTiles(const Product& p, unsigned first_tile, unsigned block) {
    GRAPHOPT_UNROLL
    for (int n = 0; n < 2; ++n) {
      // a tile that is not there is the last one, whose sums are not used
      const unsigned tile = first_tile + n < p.tiles ? first_tile + n : p.tiles - 1, g = lane() / 4;
      codes[n] = p.codes + (size_t{tile} * p.blocks + block) * block_bytes(Decode::kBits) + lane() * 16;
      of_scales[n] = scale_at(p, tile, 0, column_of<Decode>(g, 0));
    }
  }

  GRAPHOPT_DEVICE void load(const Product& p, unsigned slot, unsigned block) {
    const unsigned bytes = p.half_scales ? 2 : 4;
    const size_t at = size_t{group_of_block(p, block)} * kTileColumns * bytes;
    GRAPHOPT_UNROLL
    for (int n = 0; n < 2; ++n) {
      Decode::load_block(p, codes[n], words[slot][n]);
      codes[n] += kStreamedParts * block_bytes(Decode::kBits);
      GRAPHOPT_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        scales[slot][n][half] = load_scale(p, of_scales[n] + at + column_of<Decode>(0, half) * bytes);
      }
    }
  }

  // Adds the products of a block with the operand: `x` is where the lane's bytes begin. `table` is the decoder's.
  GRAPHOPT_DEVICE void multiply(const Product& p, unsigned slot, unsigned block, const char* table, const char* x) {
    typename Kind::Sum sums[2][RowTiles][4] = {};
    float of_x[RowTiles][2];
    if constexpr (Kind::kBytes) {
      GRAPHOPT_UNROLL
      for (int m = 0; m < RowTiles; ++m) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 2; ++i) of_x[m][i] = x_scale(p, block, 8 * m + 2 * (static_cast<unsigned>(lane()) % 4) + i);
      }
    }
    GRAPHOPT_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
      uint32_t of_pair[2][Decode::kPairWords];
      GRAPHOPT_UNROLL
      for (int n = 0; n < 2; ++n) Decode::prepare(pair, words[slot][n][pair], of_pair[n]);
      if constexpr (Kind::kBytes) {
        uint32_t a[2][4];
        GRAPHOPT_UNROLL
        for (int n = 0; n < 2; ++n) {
          uint32_t of_unit[2][2];
          Decode::template decode<0>(p, nullptr, of_pair[n], of_unit[0]);
          Decode::template decode<1>(p, nullptr, of_pair[n], of_unit[1]);
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) a[n][i] = of_unit[i / 2][i % 2];
        }
        GRAPHOPT_UNROLL
        for (int m = 0; m < RowTiles; ++m) {
          const Word2 word = load8(x + m * 8 * kStreamedPitch<Kind> + 32 * pair);
          multiply_step(sums, a, m, word.words[0], word.words[1]);
        }
      } else {
        uint32_t a[2][4], b[kStepsLoaded][RowTiles][2];
        load_steps(x + 64 * pair, b);
        GRAPHOPT_UNROLL
        for (int n = 0; n < 2; ++n) decode<0>(p, table, of_pair[n], a[n]);
        GRAPHOPT_UNROLL
        for (int m = 0; m < RowTiles; ++m) multiply_step(sums, a, m, b[0][m][0], b[0][m][1]);
        if (kStepsLoaded == 1) load_steps(x + 64 * pair + 32, b);
        GRAPHOPT_UNROLL
        for (int n = 0; n < 2; ++n) decode<1>(p, table, of_pair[n], a[n]);
        GRAPHOPT_UNROLL
        for (int m = 0; m < RowTiles; ++m) {
          multiply_step(sums, a, m, b[kStepsLoaded - 1][m][0], b[kStepsLoaded - 1][m][1]);
        }
      }
    }
    float of_columns[2][2];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      // the step of a table in float16 is a power of two: it changes no bit
      of_columns[i / 2][i % 2] = scale_of(p, scales[slot][i / 2][i % 2]) * (Kind::kBytes ? 1.0f : p.step);
    }
    GRAPHOPT_UNROLL
    for (int m = 0; m < RowTiles; ++m) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        GRAPHOPT_UNROLL
        for (int n = 0; n < 2; ++n) {
          const float value = Kind::kBytes ? static_cast<float>(sums[n][m][i]) * of_x[m][i % 2] : sums[n][m][i];
          totals[n][m][i] = multiply_add(value, of_columns[n][i / 2], totals[n][m][i]);
        }
      }
    }
  }

  // The operand of 16-bit numbers of a step, or of two.
  GRAPHOPT_DEVICE static void load_steps(const char* x, uint32_t (&b)[kStepsLoaded][RowTiles][2]) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < RowTiles; ++m) {
      uint32_t words[2 * kStepsLoaded];
      load_matrices(words, x + m * 8 * kStreamedPitch<Kind>);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2 * kStepsLoaded; ++i) b[i / 2][m][i % 2] = words[i];
    }
  }
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const char* table,
                                     const uint32_t (&words)[Decode::kPairWords], uint32_t (&a)[4]) {
    if constexpr (Decode::kTableBytes > 0) {
      Decode::template decode<H>(p, table, words, a);
    } else {
      Decode::template decode<H>(p, nullptr, words, a);
    }
  }

  GRAPHOPT_DEVICE static void multiply_step(typename Kind::Sum (&sums)[2][RowTiles][4], const uint32_t (&a)[2][4], int m,
                                            uint32_t first, uint32_t second) {
    const uint32_t b[2] = {first, second};
    GRAPHOPT_UNROLL
    for (int n = 0; n < 2; ++n) Kind::multiply(sums[n][m], a[n], b);
  }

  GRAPHOPT_DEVICE static float x_scale(const Product& p, unsigned block, unsigned row) {
    return p.x_scales[segment_of(p, block * kBlockUnits).index * size_t{p.x_scale_pitch} + row];
  }
};

// Starts copies of the operand's rows of the blocks from `first` on; what is missing becomes 0.
template <typename Kind, int RowTiles>
GRAPHOPT_DEVICE void copy_chunk(const Product& p, char* stage, unsigned first, unsigned end) {
  constexpr unsigned kPieces = kChunkBlocks * kBytesOfBlock<Kind> / 16;
  const unsigned last = end * kBytesOfBlock<Kind> < p.x_bytes ? end * kBytesOfBlock<Kind> : p.x_bytes;
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < 8 * RowTiles * kPieces / kStreamedThreads; ++i) {
    const unsigned index = i * kStreamedThreads + thread_index().x, row = index / kPieces, piece = index % kPieces;
    const unsigned at = first * kBytesOfBlock<Kind> + 16 * piece;
    const bool valid = row < p.rows && at < last;
    copy_async16(stage + row * kStreamedPitch<Kind> + 16 * piece, valid ? p.x + row * p.x_pitch + at : p.x, valid);
  }
}

// The sum over the block's warps, which had a part of K each, in their order.
template <int RowTiles>
GRAPHOPT_DEVICE float sum_of_parts(const float* parts, unsigned column, unsigned row) {
  float sum = 0;
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < kStreamedParts; ++i) {
    sum += parts[(i * kStreamedColumns + column) * (8 * RowTiles + 1) + row];
  }
  return sum;
}

// Grid: [128 columns, splits of K].
template <typename Kind, typename Decode, int RowTiles>
GRAPHOPT_KERNEL(kStreamedThreads, 2)
void multiply_streamed(Product p) {
  constexpr unsigned kStage = kStreamedStage<Kind, RowTiles>;
  const unsigned of_columns = static_cast<unsigned>(warp()) / kStreamedParts;
  const unsigned part = static_cast<unsigned>(warp()) % kStreamedParts;
  const unsigned first = static_cast<unsigned>(uint64_t{block_index().y} * p.blocks / p.splits);
  const unsigned end = static_cast<unsigned>((uint64_t{block_index().y} + 1) * p.blocks / p.splits);
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
  using Warp = StreamedTiles<Kind, Decode, RowTiles>;
  Warp of_warp(p, block_index().x * kStreamedTiles + 2 * of_columns, first + part);
  GRAPHOPT_UNROLL
  for (unsigned slot = 0; slot < Warp::kDepth; ++slot) {
    const unsigned block = first + part + slot * kStreamedParts;
    if (block < end) of_warp.load(p, slot, block);
  }
  char* const table = shared_memory();
  if constexpr (Decode::kTableBytes > 0) Decode::fill(p, table);  // the first chunk's barrier is this one's too
  // Weights do not change; all else may be what the kernel before writes or reads.
  wait_for_previous();
  char* const stages = table + Decode::kTableBytes;
  copy_chunk<Kind, RowTiles>(p, stages, first, end);
  commit_copies();
  unsigned block = first + part;
  GRAPHOPT_NO_UNROLL
  for (unsigned begin = first, stage = 0; begin < end; begin += kChunkBlocks, stage ^= 1) {
    const unsigned next = begin + kChunkBlocks;
    if (next < end) copy_chunk<Kind, RowTiles>(p, stages + (stage ^ 1) * kStage, next, end);
    commit_copies();
    wait_copies<1>();
    sync_block();
    const unsigned last = next < end ? next : end;
    const char* const x = stages + stage * kStage + lane_of_operand<Kind, 2 * Warp::kStepsLoaded>(kStreamedPitch<Kind>);
    GRAPHOPT_NO_UNROLL
    while (block < last) {
      GRAPHOPT_UNROLL
      for (unsigned slot = 0; slot < Warp::kDepth; ++slot) {
        if (block >= last) continue;
        of_warp.multiply(p, slot, block, table, x + (block - begin) * kBytesOfBlock<Kind>);
        const unsigned ahead = block + Warp::kDepth * kStreamedParts;
        if (ahead < end) of_warp.load(p, slot, ahead);
        block += kStreamedParts;
      }
    }
    sync_block();  // the next copies overwrite this stage
  }
  let_next_begin();
  float* const parts = reinterpret_cast<float*>(shared_memory());
  GRAPHOPT_UNROLL
  for (int n = 0; n < 2; ++n) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < RowTiles; ++m) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned column = (2 * of_columns + n) * kTileColumns + column_of<Decode>(g, i / 2);
        const unsigned row = 8 * m + 2 * t + i % 2;
        parts[(part * kStreamedColumns + column) * (8 * RowTiles + 1) + row] = of_warp.totals[n][m][i];
      }
    }
  }
  sync_block();
  const unsigned first_column = block_index().x * kStreamedColumns;
  for (unsigned i = thread_index().x; i < kStreamedColumns * 8 * RowTiles; i += kStreamedThreads) {
    const unsigned column = i % kStreamedColumns, row = i / kStreamedColumns;
    if (first_column + column >= p.columns || row >= p.rows) continue;
    float sum = sum_of_parts<RowTiles>(parts, column, row);
    if (!p.two) {
      put_sum(p, block_index().y, row, first_column + column, sum);
    } else if (row % 2 == 0) {
      sum += sum_of_parts<RowTiles>(parts, column, row + 1);
      put_sum(p, block_index().y, row / 2, first_column + column, sum);
    }
  }
}

}  // namespace graphopt
