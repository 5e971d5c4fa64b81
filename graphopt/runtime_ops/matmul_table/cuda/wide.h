// Many rows of the operand on sm_90a: 128 of them by 128 columns for a block of threads. Its operand stands in shared
// memory, a few blocks of K ahead; two groups of four warps decode the weights of a block of K into registers while the
// products of the block before are under way.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"
#include "matmul_table/cuda/wgmma.h"

namespace graphopt {

constexpr unsigned kWideStages = 3, kWideThreads = 256;
constexpr unsigned kWidePart = kWideRows * 128, kWideStage = 2 * kWidePart;  // 64 numbers of K, and a block
constexpr size_t kWideShared = 1024 + size_t{kWideStages} * kWideStage + 1024;

#if defined(__CUDACC__)
// Copies of the operand. A warp copies 32 words of every eighth row; words of 32 bytes change places as the decoders have
// the rows of a unit: 4 t and 4 t + 1, then 4 t + 2 and 4 t + 3, where the product counts 2 t and then 2 t + 8.
struct WideCopies {
  const uint8_t* from;  // the lane's word of the warp's first row
  size_t step;          // to its next row
  unsigned rows, at, to;

  GRAPHOPT_DEVICE WideCopies(const Product& p, unsigned first_row) {
    const unsigned word = static_cast<unsigned>(lane()), of_warp = static_cast<unsigned>(warp());
    const unsigned row = first_row + of_warp, in_eight = word % 8;
    from = p.x + size_t{row < p.rows ? row : 0} * p.x_pitch + word * 4;
    step = 8 * p.x_pitch;
    rows = row < p.rows ? (p.rows - row + 7) / 8 : 0;
    at = word * 4;
    const unsigned place = word / 8 * 32 + (in_eight / 2 + in_eight % 2 * 4) * 4;
    to = of_warp * 128 + ((place / 16 ^ of_warp) * 16 + place % 16);  // row % 8 is the warp
  }
  GRAPHOPT_DEVICE void start(const Product& p, char* stage, unsigned block) const {
    GRAPHOPT_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned before = block * kBytesOfBlock<Float16Kind> + half * 128;
      const unsigned there = at + before < p.x_bytes ? rows : 0;
      const uint8_t* next = there ? from + before : p.x;
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < kWideRows / 8; ++i) {
        copy_async4(stage + half * kWidePart + i * 1024 + to, next, i < there);
        if (i + 1 < there) next += step;
      }
    }
  }
};
#endif

// Grid: [tiles, splits of K]; blocks that follow one another share rows of the operand and weights, see wide_place().
template <typename Decode>
GRAPHOPT_KERNEL(kWideThreads, 1)
void multiply_wide(Product p) {
#if defined(__CUDACC__)
  using Sum = Sums<Float16Kind, Decode, 1, 1, false>;
  const unsigned row_tiles = (p.rows + kWideRows - 1) / kWideRows, column_tiles = (p.tiles + 7) / 8;
  const unsigned of_group = kWideGroup * column_tiles, group = block_index().x / of_group;
  const unsigned rows_left = row_tiles - group * kWideGroup, together = rows_left < kWideGroup ? rows_left : kWideGroup;
  const unsigned in_group = block_index().x - group * of_group;
  const unsigned first_row = (group * kWideGroup + in_group % together) * kWideRows;
  const unsigned tile = in_group / together * 8 + static_cast<unsigned>(warp());
  const unsigned read_tile = tile < p.tiles ? tile : p.tiles - 1;
  const unsigned first = static_cast<unsigned>(uint64_t{block_index().y} * p.blocks / p.splits);
  const unsigned end = static_cast<unsigned>((uint64_t{block_index().y} + 1) * p.blocks / p.splits);
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
  uint32_t* const table = reinterpret_cast<uint32_t*>(shared_memory());
  char* const stages = shared_memory() + 1024 + (1024 - (__cvta_generic_to_shared(shared_memory()) & 1023)) % 1024;

  if constexpr (Decode::kTable) {
    load_table(p, table);
    sync_block();
  }
  const size_t of_block = block_bytes(static_cast<unsigned>(p.bits));
  const uint8_t* codes = p.codes + (size_t{read_tile} * p.blocks + first) * of_block + lane() * 16;
  const unsigned group_blocks = (p.group_units + 7) / kBlockUnits;
  const auto scale_of = [&](unsigned block, unsigned half) {
    const unsigned of = p.group_units == kBlockUnits ? block : block / group_blocks;
    return of_column(p, p.scales, read_tile, of, g + 8 * half) * p.step;
  };
  uint32_t words[4][Decode::kWords];
  const auto decode = [&](uint32_t (&to)[kBlockUnits][4]) {
    GRAPHOPT_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
      Decode::template decode<0>(p, table, words[pair], to[2 * pair]);
      Decode::template decode<1>(p, table, words[pair], to[2 * pair + 1]);
    }
  };
  const auto load_next = [&](unsigned block) {
    codes += of_block;
    if (block < end) Decode::load_block(p, codes, words);
  };
  Decode::load_block(p, codes, words);
  float scales[2] = {scale_of(first, 0), scale_of(first, 1)};
  const WideCopies copies(p, first_row);
  wait_for_previous();
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i + 1 < kWideStages; ++i) {
    if (first + i < end) copies.start(p, stages + i * kWideStage, first + i);
    commit_copies();
  }
  float totals[64], sums[64];
  GRAPHOPT_UNROLL
  for (int i = 0; i < 64; ++i) totals[i] = sums[i] = 0;
  uint32_t even[kBlockUnits][4], odd[kBlockUnits][4];
  decode(even);
  load_next(first + 1);
  unsigned stage = 0;
  // Multiplies a block by what is decoded, and meanwhile decodes the next one.
  const auto step = [&](unsigned block, uint32_t (&now)[kBlockUnits][4], uint32_t (&next)[kBlockUnits][4]) {
    wait_copies<kWideStages - 2>();
    show_shared_to_products();
    sync_block();
    const uint64_t b = matrix_at(stages + stage * kWideStage);
    begin_products();
    GRAPHOPT_UNROLL
    for (unsigned unit = 0; unit < kBlockUnits; ++unit) {
      multiply_64x128(sums, now[unit], b + unit / 4 * (kWidePart >> 4) + unit % 4 * 2, unit > 0);
    }
    commit_products();
    // the stage whose products are done
    const unsigned to = stage ? stage - 1 : kWideStages - 1, ahead = block + kWideStages - 1;
    if (ahead < end) copies.start(p, stages + to * kWideStage, ahead);
    commit_copies();
    stage = stage + 1 < kWideStages ? stage + 1 : 0;
    decode(next);
    load_next(block + 2);
    const float of_block_now[2] = {scales[0], scales[1]};
    if (block + 1 < end) scales[0] = scale_of(block + 1, 0), scales[1] = scale_of(block + 1, 1);
    wait_products(sums);
    GRAPHOPT_UNROLL
    for (int i = 0; i < 64; ++i) totals[i] = multiply_add(sums[i], of_block_now[i / 2 % 2], totals[i]);
  };
  GRAPHOPT_NO_UNROLL
  for (unsigned block = first; block < end; block += 2) {
    step(block, even, odd);
    if (block + 1 < end) step(block + 1, odd, even);
  }
  let_next_begin();
  GRAPHOPT_UNROLL
  for (int i = 0; i < 64; ++i) {
    const unsigned column = tile * kTileColumns + g + 8 * (i / 2 % 2), row = first_row + 8 * (i / 4) + 2 * t + i % 2;
    if (column < p.columns && row < p.rows) put_sum(p, block_index().y, row, column, totals[i]);
  }
#else
  (void)p;
#endif
}

}  // namespace graphopt
