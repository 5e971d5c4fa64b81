// Many rows of the operand: 64 of them stand in shared memory, a few blocks of K ahead, and eight warps multiply them
// by 32 columns each, whose weights each warp reads and decodes itself.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"

namespace graphopt {

constexpr unsigned kStages = 3;

// A row of a block of the operand, and more so that what is loaded at a time is in banks of its own: 8 bytes each of 4
// rows, or 16 of 8.
template <typename Kind>
constexpr unsigned kPitch = kBytesOfBlock<Kind> + (Kind::kBytes ? 32 : 16);
template <typename Kind>
constexpr size_t kTileShared = 1024 + size_t{kStages} * kTileRows * kPitch<Kind>;

// Starts copies of a block of the operand's rows.
template <typename Kind>
GRAPHOPT_DEVICE void copy_stage(const Product& p, char* stage, unsigned first_row, unsigned block) {
  constexpr unsigned kChunks = kBytesOfBlock<Kind> / 16;
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < kTileRows * kChunks / (kTileWarps * kWarp); ++i) {
    const unsigned index = i * kTileWarps * kWarp + thread_index().x, row = index / kChunks, chunk = index % kChunks;
    const unsigned at = block * kBytesOfBlock<Kind> + 16 * chunk;
    const bool valid = first_row + row < p.rows && at < p.x_bytes;
    const uint8_t* const from = valid ? p.x + (first_row + row) * p.x_pitch + at : p.x;
    copy_async16(stage + row * kPitch<Kind> + 16 * chunk, from, valid);
  }
}

// Grid: [64 rows, 256 columns, splits of K]: blocks that follow one another read the same weights.
template <typename Kind, typename Decode>
GRAPHOPT_KERNEL(kTileWarps * kWarp, 1)
void multiply_gemm(Product p) {
  constexpr int kRowTiles = kTileRows / 8;
  uint32_t* const table = reinterpret_cast<uint32_t*>(shared_memory());
  char* const stages = shared_memory() + 1024;
  constexpr unsigned kStageBytes = kTileRows * kPitch<Kind>;
  if constexpr (Decode::kTable) load_table(p, table);
  Sums<Kind, Decode, kTilesOfWarp, kRowTiles, false> sums;
  sums.first_row = block_index().x * kTileRows;
  sums.first_tile = block_index().y * kTileWidth + warp() * kTilesOfWarp;
  const unsigned rows = p.rows - sums.first_row < kTileRows ? p.rows - sums.first_row : kTileRows;
  sums.row_tiles = static_cast<int>((rows + 7) / 8);
  const unsigned first = static_cast<unsigned>(uint64_t{block_index().z} * p.blocks / p.splits);
  const unsigned end = static_cast<unsigned>((uint64_t{block_index().z} + 1) * p.blocks / p.splits);
  const size_t of_block = block_bytes(static_cast<unsigned>(p.bits));
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;

  GRAPHOPT_UNROLL
  for (unsigned i = 0; i + 1 < kStages; ++i) {
    if (first + i < end) copy_stage<Kind>(p, stages + i * kStageBytes, sums.first_row, first + i);
    commit_copies();
  }
  const uint8_t* at = sums.block_at(p, first);
  const size_t of_tile = sums.bytes_of_tile(p);
  uint32_t words[kTilesOfWarp][4][Decode::kWords];
  GRAPHOPT_UNROLL
  for (unsigned n = 0; n < kTilesOfWarp; ++n) Decode::load_block(p, at + n * of_tile, words[n]);
  sums.begin(p, first * kBlockUnits);
  unsigned stage = 0;
  GRAPHOPT_NO_UNROLL
  for (unsigned block = first; block < end; ++block) {
    wait_copies<kStages - 2>();
    sync_block();
    // the stage that all warps have finished
    const unsigned ahead = block + kStages - 1;
    const unsigned to = stage ? stage - 1 : kStages - 1;
    if (ahead < end) copy_stage<Kind>(p, stages + to * kStageBytes, sums.first_row, ahead);
    commit_copies();
    const char* const of_lane = stages + stage * kStageBytes + lane_of_operand<Kind, 2>(kPitch<Kind>);
    const auto operand = [&](unsigned step, int m, uint32_t(&b)[2]) {
      const char* const from = of_lane + m * 8 * kPitch<Kind> + 32 * step;
      if constexpr (Kind::kBytes) {
        const Word2 word = load8(from);
        b[0] = word.words[0];
        b[1] = word.words[1];
      } else {
        load_matrices(b, from);
      }
    };
    const size_t step = block + 1 < end ? of_block : 0;
    sums.multiply_block(p, table, at, of_tile, step, words, block * kBlockUnits, operand);
    at += step;
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  sums.end_segment(p);
  GRAPHOPT_UNROLL
  for (unsigned n = 0; n < kTilesOfWarp; ++n) {
    GRAPHOPT_UNROLL
    for (int m = 0; m < kRowTiles; ++m) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned column = (sums.first_tile + n) * kTileColumns + column_of<Decode>(g, i / 2);
        const unsigned row = sums.first_row + 8 * m + 2 * t + i % 2;
        if (column >= p.columns || row >= p.rows) continue;
        if (!p.two) {
          put_sum(p, block_index().z, row, column, sums.totals[n][m][i]);
        } else if (i % 2 == 0) {
          put_sum(p, block_index().z, row / 2, column, sums.totals[n][m][i] + sums.totals[n][m][i + 1]);
        }
      }
    }
  }
}

}  // namespace graphopt
