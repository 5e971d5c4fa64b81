// Many rows of the operand in bytes on sm_90a: tiles of 128 rows and 128 columns. Sums are exact within a block of K and
// are scaled in float32 behind it, as on the CPU: one group of four warps scales while the other one multiplies.
#pragma once

#include "matmul_table/cuda/gemm_sm90.h"

namespace graphopt {

// Sums begin here: the bits of the float 1.5 2^23, behind which an integer of less than 2^22 is the float's last bits. A
// block's sum is at most 128 x 128 x 127, and the difference of both floats is the sum, without a conversion.
constexpr int32_t kGemm90FirstSum = 0x4b400000;

template <typename Decode>
struct Gemm90Bytes {
  using Shape = Gemm90ByteShape;
  using Work = Gemm90Work<Shape>;
  static constexpr bool kTable = Decode::kTable;

  const Product& p;
  const Gemm90Memory<Shape>& memory;
  int32_t sums[64];
  float totals[64];
  uint32_t words[4][Decode::kWords];
  uint32_t even[kBlockPairs][4], odd[kBlockPairs][4];  // weights of two blocks in turn, pair by pair of units
  uint32_t loaded[2];                                  // scales of the next block, as they lie in memory
  const uint8_t* codes;                                // the lane's, of the block whose words are loaded next

  GRAPHOPT_DEVICE Gemm90Bytes(const Product& p, const Gemm90Memory<Shape>& memory) : p(p), memory(memory) {}

  GRAPHOPT_DEVICE static unsigned tile_of(const Work& work) {
    return work.first_tile + static_cast<unsigned>(warp());
  }
  // A tile that is not there is the last one, whose sums are not used.
  GRAPHOPT_DEVICE unsigned read_tile(const Work& work) const {
    return tile_of(work) < p.tiles ? tile_of(work) : p.tiles - 1;
  }
  GRAPHOPT_DEVICE void load_scales(const Work& work, unsigned block) {
    const unsigned group = group_of_block(p, block), g = static_cast<unsigned>(lane()) / 4;
    GRAPHOPT_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      loaded[half] = load_scale(p, scale_at(p, read_tile(work), group, column_of<Decode>(g, half)));
    }
  }
  // Words and scales of the first block.
  GRAPHOPT_DEVICE void load(const Work& work) {
    const size_t block = size_t{read_tile(work)} * p.blocks + work.first;
    codes = p.codes + (block * (block_bytes(static_cast<unsigned>(p.bits)) / 16) + static_cast<unsigned>(lane())) * 16;
    Decode::load_block(p, codes, words);
    load_scales(work, work.first);
  }
  // Decodes a block, and loads the words of the next one, or again those of the last.
  GRAPHOPT_DEVICE void decode(const Work& work, unsigned block, uint32_t (&to)[kBlockPairs][4]) {
    codes += block + 1 < work.end ? block_bytes(static_cast<unsigned>(p.bits)) : 0;
    GRAPHOPT_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
      uint32_t of_pair[Decode::kPairWords], first[2], second[2];
      Decode::prepare(pair, words[pair], of_pair);
      Decode::template decode<0>(p, memory.table, of_pair, first);
      Decode::template decode<1>(p, memory.table, of_pair, second);
      GRAPHOPT_UNROLL
      for (unsigned half = 0; half < 2; ++half) to[pair][half] = first[half], to[pair][2 + half] = second[half];
      Decode::reload(p, codes, static_cast<int>(pair), words);
    }
  }
  GRAPHOPT_DEVICE void step(const Work& work, unsigned block, Gemm90Stage<Shape>& stage,
                            uint32_t (&now)[kBlockPairs][4], uint32_t (&next)[kBlockPairs][4]) {
    wait_barrier(memory.full + stage.index, stage.parity);
    const uint64_t b = matrix_at(memory.stage(stage.index));
    GRAPHOPT_UNROLL
    for (int i = 0; i < 64; ++i) sums[i] = kGemm90FirstSum;
    begin_products();
    GRAPHOPT_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) multiply_64x128(sums, now[pair], b + pair * 2);
    commit_products();
    const float of_columns[2] = {scale_of(p, loaded[0]), scale_of(p, loaded[1])};
    load_scales(work, block + 1 < work.end ? block + 1 : block);
    decode(work, block + 1, next);
    wait_products(sums);
    const char* const scales = memory.scales(stage.index) + static_cast<unsigned>(lane()) % 4 * 8;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 64; i += 4) {
      const Word2 of_rows = load8(scales + i * 8);
      GRAPHOPT_UNROLL
      for (unsigned j = 0; j < 4; ++j) {
        const float sum = float_of_bits(static_cast<uint32_t>(sums[i + j])) - float_of_bits(kGemm90FirstSum);
        totals[i + j] = multiply_add(sum * float_of_bits(of_rows.words[j % 2]), of_columns[j / 2], totals[i + j]);
      }
    }
    if (lane() == 0) arrive(memory.empty + stage.index);
    stage.advance(1);
  }
  GRAPHOPT_DEVICE void run(const Work& work, Gemm90Stage<Shape>& stage) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 64; ++i) totals[i] = 0;
    decode(work, work.first, even);
    GRAPHOPT_NO_UNROLL
    for (unsigned block = work.first; block < work.end; block += 2) {
      step(work, block, stage, even, odd);
      if (block + 1 < work.end) step(work, block + 1, stage, odd, even);
    }
  }
  GRAPHOPT_DEVICE void write(const Work& work) const {
    const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned column = tile_of(work) * kTileColumns + column_of<Decode>(g, i / 2 % 2);
      const unsigned row = work.first_row + 8 * (i / 4) + 2 * t + i % 2;
      if (column < p.columns && row < p.rows) put_sum(p, work.split, row, column, totals[i]);
    }
  }
};

}  // namespace graphopt
