// Up to 16 rows of the operand: every weight is read once, straight into registers, and the operand from the caches.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"

namespace graphopt {

constexpr unsigned kSmallMColumns = kSmallMTiles * kTileColumns, kSmallMPitch = kSmallMRows + 1;
constexpr size_t kSmallMShared = 1024 + sizeof(float) * kSmallMWarps * kSmallMColumns * kSmallMPitch;

// The sum over a block's warps, which had a part of K each, in their order.
GRAPHOPT_DEVICE float sum_of_warps(const float* parts, unsigned column, unsigned row) {
  float sum = 0;
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < kSmallMWarps; ++i) sum += parts[(i * kSmallMColumns + column) * kSmallMPitch + row];
  return sum;
}

GRAPHOPT_DEVICE void put_small_m(const Product& p, const float* parts, unsigned first_column, unsigned first_row) {
  for (unsigned i = thread_index().x; i < kSmallMColumns * kSmallMRows; i += thread_count()) {
    // neighbouring threads write neighbouring columns
    const unsigned column = i % kSmallMColumns, row = i / kSmallMColumns;
    if (first_column + column >= p.columns || first_row + row >= p.rows) continue;
    float sum = sum_of_warps(parts, column, row);
    if (!p.two) {
      put_sum(p, block_index().y, first_row + row, first_column + column, sum);
    } else if (row % 2 == 0) {
      sum += sum_of_warps(parts, column, row + 1);
      put_sum(p, block_index().y, (first_row + row) / 2, first_column + column, sum);
    }
  }
}

// Grid: [pairs of tiles, splits of K, 16 rows]. Two tiles of columns for a warp: an operand that is read serves both.
template <typename Kind, typename Decode, bool MaySum>
GRAPHOPT_KERNEL(kSmallMWarps * kWarp, Decode::kWide || Decode::kTrellis || MaySum ? 3 : 4)
void multiply_small_m(Product p) {
  constexpr int kRowTiles = kSmallMRows / 8;
  uint32_t* const table = reinterpret_cast<uint32_t*>(shared_memory());
  if constexpr (Decode::kTable) {
    load_table(p, table);
    sync_block();
  }
  Sums<Kind, Decode, kSmallMTiles, kRowTiles, MaySum> sums;
  sums.first_tile = block_index().x * kSmallMTiles;
  sums.first_row = block_index().z * kSmallMRows;
  sums.row_tiles = p.rows - sums.first_row > 8 ? 2 : 1;
  const uint64_t parts = uint64_t{p.splits} * kSmallMWarps, part = block_index().y * kSmallMWarps + warp();
  const unsigned first = static_cast<unsigned>(part * p.blocks / parts);
  const unsigned end = static_cast<unsigned>((part + 1) * p.blocks / parts);
  const size_t of_block = block_bytes(static_cast<unsigned>(p.bits));
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;

  // missing rows have no bytes
  const uint8_t* const x = p.x + (sums.first_row + g) * p.x_pitch;
  const size_t x_step = 8 * p.x_pitch;
  unsigned x_bytes[kRowTiles];
  GRAPHOPT_UNROLL
  for (int m = 0; m < kRowTiles; ++m) x_bytes[m] = sums.first_row + g + 8 * m < p.rows ? p.x_bytes : 0;

  sums.begin(p, first < end ? first * kBlockUnits : 0);
  if (first < end) {
    const uint8_t* at = sums.block_at(p, first);
    const size_t of_tile = sums.bytes_of_tile(p);
    uint32_t words[kSmallMTiles][4][Decode::kWords];
    GRAPHOPT_UNROLL
    for (unsigned n = 0; n < kSmallMTiles; ++n) Decode::load_block(p, at + n * of_tile, words[n]);
    GRAPHOPT_NO_UNROLL
    for (unsigned block = first; block < end; ++block) {
      // the last block is loaded twice, which saves a branch
      const size_t step = block + 1 < end ? of_block : 0;
      const unsigned in_row = block * kBytesOfBlock<Kind> + (Kind::kBytes ? 8 : 4) * t;
      const auto operand = [&](unsigned step, int m, uint32_t(&b)[2]) {
        const unsigned byte = in_row + 32 * step;
        const uint8_t* const from = x + m * x_step + byte;
        b[0] = b[1] = 0;
        if constexpr (Kind::kBytes) {
          if (byte >= x_bytes[m]) return;
          const Word2 word = load8(from);
          b[0] = word.words[0];
          b[1] = word.words[1];
        } else {
          if (byte < x_bytes[m]) b[0] = load_word(from);
          if (byte + 16 < x_bytes[m]) b[1] = load_word(from + 16);
        }
      };
      sums.multiply_block(p, table, at, of_tile, step, words, block * kBlockUnits, operand);
      at += step;
    }
    sums.end_segment(p);
  }
  float* const shared = reinterpret_cast<float*>(shared_memory() + 1024);
  GRAPHOPT_UNROLL
  for (unsigned n = 0; n < kSmallMTiles; ++n) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned column = n * kTileColumns + column_of<Decode>(g, i / 2), row = 8 * m + 2 * t + i % 2;
        shared[(warp() * kSmallMColumns + column) * kSmallMPitch + row] = sums.totals[n][m][i];
      }
    }
  }
  sync_block();
  put_small_m(p, shared, sums.first_tile * kTileColumns, sums.first_row);
}

}  // namespace graphopt
