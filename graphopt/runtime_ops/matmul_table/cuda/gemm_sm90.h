// Many rows of the operand on sm_90a: 128 of them by 128 columns for a block of threads. Four warps copy the operand to
// shared memory, a few blocks of K ahead; two groups of four warps multiply it by weights that they have in registers,
// and decode those of the next block of K meanwhile.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"
#include "matmul_table/cuda/wgmma.h"

namespace graphopt {

constexpr unsigned kGemm90Stages = 4, kGemm90Threads = 384, kGemm90Multipliers = 256;
constexpr unsigned kGemm90Part = kGemm90Rows * 128, kGemm90Stage = 2 * kGemm90Part;  // 64 numbers of K, and a block
// A table, barriers, and stages at a multiple of 1024 bytes.
constexpr size_t kGemm90Shared = 2048 + 1024 + size_t{kGemm90Stages} * kGemm90Stage;

#if defined(__CUDACC__)
struct Gemm90Memory {
  uint32_t* table;
  uint64_t *full, *empty;  // of each stage: its copies are there, its products are done
  char* stages;

  GRAPHOPT_DEVICE Gemm90Memory() {
    char* const memory = shared_memory();
    table = reinterpret_cast<uint32_t*>(memory);
    full = reinterpret_cast<uint64_t*>(memory + 1024);
    empty = full + kGemm90Stages;
    const unsigned behind = static_cast<unsigned>(__cvta_generic_to_shared(memory)) + 1024 + 128;
    stages = memory + 1024 + 128 + (1024 - behind % 1024) % 1024;
  }
};

// What a block of threads computes: row tiles go through the columns in groups, so that a wave reads little.
struct Gemm90Place {
  unsigned first_row, first_tile, first, end;  // the latter two: blocks of K

  GRAPHOPT_DEVICE explicit Gemm90Place(const Product& p) {
    const unsigned row_tiles = (p.rows + kGemm90Rows - 1) / kGemm90Rows, column_tiles = (p.tiles + 7) / 8;
    const unsigned of_group = kGemm90Group * column_tiles, group = block_index().x / of_group;
    const unsigned left = row_tiles - group * kGemm90Group, together = left < kGemm90Group ? left : kGemm90Group;
    const unsigned in_group = block_index().x - group * of_group;
    first_row = (group * kGemm90Group + in_group % together) * kGemm90Rows;
    first_tile = in_group / together * 8;
    first = static_cast<unsigned>(uint64_t{block_index().y} * p.blocks / p.splits);
    end = static_cast<unsigned>((uint64_t{block_index().y} + 1) * p.blocks / p.splits);
  }
};

// Each of four warps fills a stage, 16 bytes of a lane at a time: rows have been ordered for it, see order_rows().
GRAPHOPT_DEVICE void copy_gemm_sm90(const Product& p, const Gemm90Place& place, const Gemm90Memory& memory) {
  constexpr unsigned kRowsAtOnce = 4;
  const unsigned stage = static_cast<unsigned>(warp()) - kGemm90Multipliers / kWarp;
  const unsigned of_row = static_cast<unsigned>(lane()) / 8, piece = static_cast<unsigned>(lane()) % 8;
  const unsigned rows = p.rows - place.first_row < kGemm90Rows ? p.rows - place.first_row : kGemm90Rows;
  const uint8_t* const from = p.x + size_t{place.first_row + (of_row < rows ? of_row : 0)} * p.x_pitch + piece * 16;
  const size_t step = kRowsAtOnce * p.x_pitch;
  unsigned parity = 1;
  GRAPHOPT_NO_UNROLL
  for (unsigned block = place.first + stage; block < place.end; block += kGemm90Stages, parity ^= 1) {
    wait_barrier(memory.empty + stage, parity);
    GRAPHOPT_NO_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      char* const part = memory.stages + stage * kGemm90Stage + half * kGemm90Part;
      const uint8_t* next = from + block * kBytesOfBlock<Float16Kind> + half * 128;
      // the registers of these warps are few
      GRAPHOPT_NO_UNROLL
      for (unsigned first = 0; first < kGemm90Rows; first += 4 * kRowsAtOnce) {
        GRAPHOPT_UNROLL
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned row = first + i * kRowsAtOnce + of_row;
          copy_async16(part + row * 128 + (piece ^ row % 8) * 16, next, row < rows);
          if (row + kRowsAtOnce < rows) next += step;
        }
      }
    }
    commit_copies();
    wait_copies<0>();
    show_shared_to_products();
    arrive(memory.full + stage);
  }
}

template <typename Decode>
struct Gemm90Warp {
  const Product& p;
  const Gemm90Place& place;
  const Gemm90Memory& memory;
  unsigned tile, read_tile;
  const uint8_t* codes;
  size_t of_block;
  uint32_t words[4][Decode::kWords];
  uint32_t even[kBlockUnits][4], odd[kBlockUnits][4];
  float totals[64], sums[64];
  uint32_t scales[2];  // as they were loaded

  GRAPHOPT_DEVICE Gemm90Warp(const Product& p, const Gemm90Place& place, const Gemm90Memory& memory)
      : p(p), place(place), memory(memory) {
    tile = place.first_tile + static_cast<unsigned>(warp());
    read_tile = tile < p.tiles ? tile : p.tiles - 1;
    of_block = block_bytes(static_cast<unsigned>(p.bits));
    codes = p.codes + (size_t{read_tile} * p.blocks + place.first) * of_block + lane() * 16;
    Decode::load_block(p, codes, words);
    load_scales(place.first);
    GRAPHOPT_UNROLL
    for (int i = 0; i < 64; ++i) totals[i] = sums[i] = 0;
  }
  GRAPHOPT_DEVICE void load_scales(unsigned block) {
    const unsigned group = group_of_block(p, block), g = static_cast<unsigned>(lane()) / 4;
    GRAPHOPT_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      scales[half] = load_scale(p, scale_at(p, read_tile, group, column_of<Decode>(g, half)));
    }
  }
  GRAPHOPT_DEVICE void decode(uint32_t (&to)[kBlockUnits][4]) {
    GRAPHOPT_UNROLL
    for (unsigned pair = 0; pair < kBlockPairs; ++pair) {
      uint32_t of_pair[Decode::kPairWords];
      Decode::prepare(pair, words[pair], of_pair);
      Decode::template decode<0>(p, memory.table, of_pair, to[2 * pair]);
      Decode::template decode<1>(p, memory.table, of_pair, to[2 * pair + 1]);
    }
  }
  GRAPHOPT_DEVICE void load(unsigned block) {
    codes += of_block;
    if (block < place.end) Decode::load_block(p, codes, words);
  }
  // Multiplies a block by what is decoded, and meanwhile decodes the next one.
  GRAPHOPT_DEVICE void step(unsigned block, unsigned stage, unsigned parity, uint32_t (&now)[kBlockUnits][4],
                            uint32_t (&next)[kBlockUnits][4]) {
    wait_barrier(memory.full + stage, parity);
    const uint64_t b = matrix_at(memory.stages + stage * kGemm90Stage);
    begin_products();
    GRAPHOPT_UNROLL
    for (unsigned unit = 0; unit < kBlockUnits; ++unit) {
      multiply_64x128(sums, now[unit], b + unit / 4 * (kGemm90Part >> 4) + unit % 4 * 2, unit > 0);
    }
    commit_products();
    decode(next);
    load(block + 2);
    const uint32_t loaded[2] = {scales[0], scales[1]};
    if (block + 1 < place.end) load_scales(block + 1);
    wait_products(sums);
    if (lane() == 0) arrive(memory.empty + stage);
    // the step of a table in float16 is a power of two: it changes no bit
    const float of_now[2] = {scale_of(p, loaded[0]) * p.step, scale_of(p, loaded[1]) * p.step};
    GRAPHOPT_UNROLL
    for (int i = 0; i < 64; ++i) totals[i] = multiply_add(sums[i], of_now[i / 2 % 2], totals[i]);
  }
  GRAPHOPT_DEVICE void run() {
    decode(even);
    load(place.first + 1);
    unsigned stage = 0, parity = 0;
    GRAPHOPT_NO_UNROLL
    for (unsigned block = place.first; block < place.end; block += 2) {
      step(block, stage, parity, even, odd);
      if (block + 1 < place.end) step(block + 1, stage + 1, parity, odd, even);
      stage += 2;
      if (stage == kGemm90Stages) stage = 0, parity ^= 1;
    }
  }
  GRAPHOPT_DEVICE void write() const {
    const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 64; ++i) {
      const unsigned column = tile * kTileColumns + column_of<Decode>(g, i / 2 % 2);
      const unsigned row = place.first_row + 8 * (i / 4) + 2 * t + i % 2;
      if (column < p.columns && row < p.rows) put_sum(p, block_index().y, row, column, totals[i]);
    }
  }
};
#endif

// Grid: [tiles, splits of K].
template <typename Decode>
GRAPHOPT_KERNEL(kGemm90Threads, 1)
void multiply_gemm_sm90(Product p) {
#if defined(__CUDACC__)
  static_assert(kGemm90Stages == (kGemm90Threads - kGemm90Multipliers) / kWarp, "a stage for a warp");
  static_assert(kGemm90Stages % 2 == 0, "pairs of stages");
  const Gemm90Place place(p);
  const Gemm90Memory memory;
  if (thread_index().x < kGemm90Stages) {
    make_barrier(memory.full + thread_index().x, kWarp);
    make_barrier(memory.empty + thread_index().x, kGemm90Multipliers / kWarp);
  }
  if constexpr (Decode::kTable) load_table(p, memory.table);
  sync_block();
  if (thread_index().x >= kGemm90Multipliers) {
    give_registers<40>();
    wait_for_previous();
    copy_gemm_sm90(p, place, memory);
  } else {
    take_registers<232>();
    Gemm90Warp<Decode> of_warp(p, place, memory);
    wait_for_previous();
    of_warp.run();
    of_warp.write();
  }
#else
  (void)p;
#endif
}

}  // namespace graphopt
