// Many rows of the operand on sm_90a. Four warps copy the operand to shared memory, a few stages ahead; two groups of four
// warps multiply it by weights that they have in registers, and decode those that come next meanwhile. As many blocks of
// threads as processors go through all tiles of rows and columns.
//
// float16, here: a weight is scaled in float16 when it is decoded, so sums go on from group to group and no product is
// waited for. A warp has one or two tiles of columns. Bytes: gemm_sm90_bytes.h.
#pragma once

#include "matmul_table/cuda/multiply.h"
#include "matmul_table/cuda/shapes.h"
#include "cuda/wgmma.h"

namespace graphopt {

constexpr unsigned kGemm90Multipliers = 256, kGemm90Copiers = 128, kGemm90Threads = kGemm90Multipliers + kGemm90Copiers;
constexpr unsigned kGemm90Warps = kGemm90Multipliers / kWarp, kGemm90Sums = 64;
constexpr unsigned kGemm90Stage = kGemm90Rows * 128, kGemm90Scales = kGemm90Rows * sizeof(float);

// A stage has 128 bytes of each row, of K: half a block of float16, or one of bytes. Bytes have a scale for each row too.
template <typename Numbers, unsigned Tiles>
struct Gemm90Shape {
  using Kind = Numbers;
  static constexpr unsigned kTiles = Tiles, kStages = 6;
  static constexpr unsigned kStagesOfBlock = kBytesOfBlock<Kind> / 128, kTilesOfWarp = Tiles / kGemm90Warps;
  // A warp turns 64 rows of its columns of y at a time; 16 bytes more, so that 16 bytes of 8 rows are in all banks.
  static constexpr unsigned kTurnRows = 64, kTurnPitch = kTilesOfWarp * kTileColumns * 2 + 16;
  static constexpr unsigned kTurn = kTurnRows * kTurnPitch;
  static constexpr size_t kBehind = Kind::kBytes ? kStages * kGemm90Scales : kGemm90Warps * kTurn;
  // A table, barriers, stages at a multiple of 1024 bytes, and scales or what turns y.
  static constexpr size_t kShared = 1024 + 128 + 1024 + size_t{kStages} * kGemm90Stage + kBehind;
};
using Gemm90Wide = Gemm90Shape<Float16Kind, 2 * kGemm90Tiles>;
using Gemm90Narrow = Gemm90Shape<Float16Kind, kGemm90Tiles>;
using Gemm90ByteShape = Gemm90Shape<ByteKind, kGemm90Tiles>;

template <typename Shape>
struct Gemm90Memory {
  uint32_t* table;
  uint64_t *full, *empty;  // of each stage: its copies are there, its products are done
  char* stages;

  GRAPHOPT_DEVICE Gemm90Memory() {
    char* const memory = shared_memory();
    table = reinterpret_cast<uint32_t*>(memory);
    full = reinterpret_cast<uint64_t*>(memory + 1024);
    empty = full + Shape::kStages;
    stages = memory + 1024 + 128;
    stages += (1024 - address_in_shared(stages) % 1024) % 1024;
  }
  GRAPHOPT_DEVICE void make_barriers() const {
    if (thread_index().x >= Shape::kStages) return;
    make_barrier(full + thread_index().x, kWarp);
    make_barrier(empty + thread_index().x, kGemm90Warps);
  }
  GRAPHOPT_DEVICE char* stage(unsigned index) const { return stages + index * kGemm90Stage; }
  // The scales of a stage's rows, of bytes.
  GRAPHOPT_DEVICE char* scales(unsigned index) const { return stage(Shape::kStages) + index * kGemm90Scales; }
  // Where this warp turns its columns of y, of float16.
  GRAPHOPT_DEVICE char* turn() const { return stage(Shape::kStages) + static_cast<unsigned>(warp()) * Shape::kTurn; }
};

// The stages follow one another in a circle, with a parity for each turn.
template <typename Shape>
struct Gemm90Stage {
  unsigned index = 0, parity = 0;

  GRAPHOPT_DEVICE void advance(unsigned count) {
    index += count;
    if (index >= Shape::kStages) index -= Shape::kStages, parity ^= 1;
  }
};

// What a block of threads computes at a time: row tiles go through the columns in groups, so that a wave reads little.
template <typename Shape>
struct Gemm90Work {
  unsigned first_row, first_tile, split, first, end;  // the latter two: blocks of K

  GRAPHOPT_BOTH static unsigned row_tiles(const Product& p) { return (p.rows + kGemm90Rows - 1) / kGemm90Rows; }
  GRAPHOPT_BOTH static unsigned column_tiles(const Product& p) { return (p.tiles + Shape::kTiles - 1) / Shape::kTiles; }
  GRAPHOPT_BOTH static unsigned count(const Product& p) { return row_tiles(p) * column_tiles(p) * p.splits; }

  GRAPHOPT_DEVICE Gemm90Work(const Product& p, unsigned index) {
    const unsigned tiles = row_tiles(p) * column_tiles(p), of_group = kGemm90Group * column_tiles(p);
    split = index / tiles;
    index -= split * tiles;
    const unsigned group = index / of_group, left = row_tiles(p) - group * kGemm90Group;
    const unsigned row_tiles_of_group = left < kGemm90Group ? left : kGemm90Group, in_group = index - group * of_group;
    first_row = (group * kGemm90Group + in_group % row_tiles_of_group) * kGemm90Rows;
    first_tile = in_group / row_tiles_of_group * Shape::kTiles;
    // at most 16 splits of 2^20 blocks
    first = split * p.blocks / p.splits;
    end = (split + 1) * p.blocks / p.splits;
  }
};

// Each of four warps fills every fourth stage, 16 bytes of a lane at a time; what is missing becomes 0.
template <typename Shape>
GRAPHOPT_DEVICE void copy_gemm_sm90(const Product& p, const Gemm90Memory<Shape>& memory) {
  constexpr unsigned kRowsAtOnce = 4, kWarps = kGemm90Copiers / kWarp;
  const unsigned of_row = static_cast<unsigned>(lane()) / 8, piece = static_cast<unsigned>(lane()) % 8;
  unsigned turn = static_cast<unsigned>(warp()) - kGemm90Warps;  // stages up to this warp's next one
  Gemm90Stage<Shape> stage;
  stage.advance(turn);
  const size_t step = kRowsAtOnce * p.x_pitch;
  const unsigned count = Gemm90Work<Shape>::count(p);
  for (unsigned index = block_index().x; index < count; index += block_count().x) {
    const Gemm90Work<Shape> work(p, index);
    const unsigned steps = Shape::kStagesOfBlock * (work.end - work.first);
    const unsigned rows = p.rows - work.first_row < kGemm90Rows ? p.rows - work.first_row : kGemm90Rows;
    const uint8_t* const from = p.x + size_t{work.first_row + (of_row < rows ? of_row : 0)} * p.x_pitch;
    GRAPHOPT_NO_UNROLL
    for (; turn < steps; turn += kWarps, stage.advance(kWarps)) {
      const unsigned at = (Shape::kStagesOfBlock * work.first + turn) * 128 + piece * 16;
      const bool in_row = at < p.x_bytes;
      const uint8_t* next = from + (in_row ? at : 0);
      wait_barrier(memory.empty + stage.index, stage.parity ^ 1);
      char* const part = memory.stage(stage.index) + of_row * 128;
      GRAPHOPT_NO_UNROLL
      for (unsigned first = 0; first < kGemm90Rows; first += 4 * kRowsAtOnce) {
        GRAPHOPT_UNROLL
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned row = first + i * kRowsAtOnce + of_row;
          copy_async16(part + (first + i * kRowsAtOnce) * 128 + (piece ^ row % 8) * 16, next, in_row && row < rows);
          if (row + kRowsAtOnce < rows) next += step;
        }
      }
      if constexpr (Shape::Kind::kBytes) {
        // four rows of a lane; there are numbers behind the last one
        const unsigned segment = segment_of(p, (work.first + turn) * kBlockUnits).index;
        const float* const scales = p.x_scales + size_t{segment} * p.x_scale_pitch + work.first_row;
        copy_async16(memory.scales(stage.index) + lane() * 16, scales + lane() * 4, true);
      }
      commit_copies();
      wait_copies<0>();
      show_shared_to_products();
      arrive(memory.full + stage.index);
    }
    turn -= steps;
  }
}

template <typename OfTiles, typename Decode>
struct Gemm90Warp {
  using Shape = OfTiles;
  using Work = Gemm90Work<Shape>;
  static constexpr bool kTable = Decode::kTable;
  static constexpr unsigned kSubtiles = Shape::kTilesOfWarp;  // of columns

  const Product& p;
  const Gemm90Memory<Shape>& memory;
  float sums[kSubtiles][kGemm90Sums];
  uint32_t words[kSubtiles][4][Decode::kWords];
  uint32_t weights[2][kSubtiles][2][4];  // of two pairs of units in turn, unit by unit
  uint32_t scales[kSubtiles][2];         // of the block that is decoded, twice in float16
  uint32_t loaded[kSubtiles][2];         // of the next one, as they lie in memory
  const uint8_t* codes;                        // the lane's, of the block whose words are loaded next
  unsigned of_tile;                            // bytes from them to those of the second tile

  GRAPHOPT_DEVICE Gemm90Warp(const Product& p, const Gemm90Memory<Shape>& memory) : p(p), memory(memory) {}

  GRAPHOPT_DEVICE static unsigned first_tile(const Work& work) {
    return work.first_tile + static_cast<unsigned>(warp()) * kSubtiles;
  }
  // A tile that is not there is the last one, whose sums are not used.
  GRAPHOPT_DEVICE unsigned read_tile(const Work& work, unsigned subtile) const {
    const unsigned tile = first_tile(work) + subtile;
    return tile < p.tiles ? tile : p.tiles - 1;
  }
  GRAPHOPT_DEVICE void load_scales(const Work& work, unsigned block) {
    const unsigned group = group_of_block(p, block), g = static_cast<unsigned>(lane()) / 4;
    GRAPHOPT_UNROLL
    for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
      GRAPHOPT_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        loaded[subtile][half] =
            load_scale(p, scale_at(p, read_tile(work, subtile), group, column_of<Decode>(g, half)));
      }
    }
  }
  GRAPHOPT_DEVICE void convert_scales() {
    GRAPHOPT_UNROLL
    for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
      GRAPHOPT_UNROLL
      for (unsigned half = 0; half < 2; ++half) {
        const Half scale = half_of(scale_of(p, loaded[subtile][half]) * (p.step * p.gain));
        scales[subtile][half] = half2_of(scale, scale);
      }
    }
  }
  // Words and scales of the first block.
  GRAPHOPT_DEVICE void load(const Work& work) {
    static_assert(kSubtiles <= 2, "a second tile behind the first");
    const size_t of_block = block_bytes(static_cast<unsigned>(p.bits));
    const size_t block = size_t{read_tile(work, 0)} * p.blocks + work.first;
    codes = p.codes + (block * (of_block / 16) + static_cast<unsigned>(lane())) * 16;
    of_tile = read_tile(work, kSubtiles - 1) > read_tile(work, 0) ? static_cast<unsigned>(p.blocks * of_block) : 0;
    GRAPHOPT_UNROLL
    for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
      Decode::load_block(p, codes + subtile * of_tile, words[subtile]);
    }
    load_scales(work, work.first);
  }
  // Decodes and scales a pair of units, and loads what takes the place of its words, from `codes`.
  template <unsigned Pair>
  GRAPHOPT_DEVICE void decode() {
    GRAPHOPT_UNROLL
    for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
      uint32_t of_pair[Decode::kPairWords];
      uint32_t(&to)[2][4] = weights[Pair % 2][subtile];
      Decode::prepare(Pair, words[subtile][Pair], of_pair);
      Decode::template decode<0>(p, memory.table, of_pair, to[0]);
      Decode::template decode<1>(p, memory.table, of_pair, to[1]);
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 8; ++i) to[i / 4][i % 4] = half2_multiply(to[i / 4][i % 4], scales[subtile][i % 2]);
      Decode::reload(p, codes + subtile * of_tile, Pair, words[subtile]);
    }
  }
  // Goes on to the block behind, or reads the last one again, which saves a branch.
  GRAPHOPT_DEVICE void advance(const Work& work, unsigned block) {
    codes += block + 1 < work.end ? block_bytes(static_cast<unsigned>(p.bits)) : 0;
  }
  template <unsigned Pair>
  GRAPHOPT_DEVICE void multiply(unsigned stage) {
    const uint64_t b = matrix_at(memory.stage(stage));
    begin_products();
    GRAPHOPT_UNROLL
    for (unsigned unit = 0; unit < 2; ++unit) {
      GRAPHOPT_UNROLL
      for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
        multiply_64x128(sums[subtile], weights[Pair % 2][subtile][unit], b + (Pair % 2 * 2 + unit) * 2);
      }
    }
    commit_products();
  }
  GRAPHOPT_DEVICE void release(unsigned stage) {
    if (lane() == 0) arrive(memory.empty + stage);
  }
  // Products of pairs of units follow one another without a gap: while those of one run, the next one is decoded.
  GRAPHOPT_DEVICE void run(const Work& work, Gemm90Stage<Shape>& stage) {
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < kSubtiles * kGemm90Sums; ++i) sums[i / kGemm90Sums][i % kGemm90Sums] = 0;
    convert_scales();
    advance(work, work.first);
    decode<0>();
    load_scales(work, work.first + 1 < work.end ? work.first + 1 : work.first);
    unsigned before = stage.index;
    GRAPHOPT_NO_UNROLL
    for (unsigned block = work.first; block < work.end; ++block) {
      wait_barrier(memory.full + stage.index, stage.parity);
      multiply<0>(stage.index);
      wait_products<1>();  // of the pair before, whose registers are free then
      if (block > work.first) release(before);
      decode<1>();
      multiply<1>(stage.index);
      wait_products<1>();
      decode<2>();
      before = stage.index;
      stage.advance(1);
      wait_barrier(memory.full + stage.index, stage.parity);
      multiply<2>(stage.index);
      wait_products<1>();
      release(before);
      decode<3>();
      multiply<3>(stage.index);
      wait_products<1>();
      // the next block's, or what is not used
      convert_scales();
      load_scales(work, block + 2 < work.end ? block + 2 : work.end - 1);
      advance(work, block + 1);
      decode<0>();
      before = stage.index;
      stage.advance(1);
    }
    wait_products(sums);
    release(before);
  }
  // Sums to parts for another kernel, or through shared memory to rows of y.
  GRAPHOPT_DEVICE void write(const Work& work) {
    const float inverse = 1.0f / p.gain;
    if (p.partials) return write_partials(work, inverse);
    float bias[kSubtiles][2];
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 2 * kSubtiles; ++i) {
      const unsigned g = static_cast<unsigned>(lane()) / 4;
      const unsigned column = (first_tile(work) + i / 2) * kTileColumns + column_of<Decode>(g, i % 2);
      bias[i / 2][i % 2] = p.bias && column < p.columns ? p.bias[column] : 0;
    }
    GRAPHOPT_UNROLL
    for (unsigned first = 0; first < kGemm90Rows; first += Shape::kTurnRows) {
      if (work.first_row + first >= p.rows) return;
      sync_warp();
      GRAPHOPT_UNROLL
      for (unsigned eights = 0; eights < Shape::kTurnRows / 8; eights += 2) {
        GRAPHOPT_UNROLL
        for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
          uint32_t pairs[4];  // rows 2 t and 2 t + 1, of two columns, and of eight rows and the next eight
          GRAPHOPT_UNROLL
          for (unsigned i = 0; i < 4; ++i) {
            const float* const of_pair = sums[subtile] + 4 * (first / 8 + eights + i / 2) + 2 * (i % 2);
            pairs[i] = half2_of(half_of(multiply_add(of_pair[0], inverse, bias[subtile][i % 2])),
                                half_of(multiply_add(of_pair[1], inverse, bias[subtile][i % 2])));
          }
          const unsigned matrix = static_cast<unsigned>(lane()) / 8, row = static_cast<unsigned>(lane()) % 8;
          store_matrices_transposed(memory.turn() + (8 * (eights + matrix / 2) + row) * Shape::kTurnPitch +
                                        (subtile * 2 + matrix % 2) * 16, pairs);
        }
      }
      sync_warp();
      write_rows(work, first);
    }
  }
  // A lane has 8 columns of a row at a time.
  GRAPHOPT_DEVICE void write_rows(const Work& work, unsigned first) const {
    constexpr unsigned kPieces = 2 * kSubtiles, kRowsAtOnce = kWarp / kPieces;
    const unsigned piece = static_cast<unsigned>(lane()) % kPieces, of_lane = static_cast<unsigned>(lane()) / kPieces;
    const unsigned column = first_tile(work) * kTileColumns + piece * 8;
    const bool whole = column + 8 <= p.columns && p.columns % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < Shape::kTurnRows; i += kRowsAtOnce) {
      const unsigned row = work.first_row + first + i + of_lane;
      if (row >= p.rows) continue;
      const char* const from = memory.turn() + (i + of_lane) * Shape::kTurnPitch;
      Word4 word;
      if constexpr (Decode::kTrellis) {
        // columns 2 g are in the first 16 bytes of a tile, columns 2 g + 1 in the others
        const char* const of_tile = from + piece / 2 * 32 + piece % 2 * 8;
        const Word2 even = load8(of_tile), odd = load8(of_tile + 16);
        GRAPHOPT_UNROLL
        for (unsigned j = 0; j < 4; ++j) {
          word.words[j] = byte_permute(even.words[j / 2], odd.words[j / 2], j % 2 ? 0x7632 : 0x5410);
        }
      } else {
        word = load16(from + piece * 16);
      }
      Half* const to = static_cast<Half*>(p.y) + size_t{row} * p.columns + column;
      if (whole) {
        store16(to, word);
        continue;
      }
      GRAPHOPT_UNROLL
      for (unsigned j = 0; j < 8; ++j) {
        if (column + j < p.columns) to[j] = Half{static_cast<uint16_t>(word.words[j / 2] >> 16 * (j % 2))};
      }
    }
  }
  GRAPHOPT_DEVICE void write_partials(const Work& work, float inverse) const {
    const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
    GRAPHOPT_UNROLL
    for (unsigned subtile = 0; subtile < kSubtiles; ++subtile) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < kGemm90Sums; ++i) {
        const unsigned column = (first_tile(work) + subtile) * kTileColumns + column_of<Decode>(g, i / 2 % 2);
        const unsigned row = work.first_row + 8 * (i / 4) + 2 * t + i % 2;
        if (column < p.columns && row < p.rows) put_sum(p, work.split, row, column, sums[subtile][i] * inverse);
      }
    }
  }
};

// Grid: blocks of threads, at most one for each tile of rows and columns and split of K. `Warp` is Gemm90Warp or Gemm90Bytes.
template <typename Warp>
GRAPHOPT_KERNEL(kGemm90Threads, 1)
void multiply_gemm_sm90(Product p) {
  using Work = Gemm90Work<typename Warp::Shape>;
  const Gemm90Memory<typename Warp::Shape> memory;
  memory.make_barriers();
  if constexpr (Warp::kTable) load_table(p, memory.table);
  sync_block();
  if (thread_index().x >= kGemm90Multipliers) {
    give_registers<40>();
    wait_for_previous();
    copy_gemm_sm90(p, memory);
  } else {
    take_registers<232>();
    Warp of_warp(p, memory);
    Gemm90Stage<typename Warp::Shape> stage;
    unsigned index = block_index().x;
    const unsigned count = Work::count(p);
    of_warp.load(Work(p, index));
    wait_for_previous();
    GRAPHOPT_NO_UNROLL
    while (index < count) {
      const Work work(p, index);
      of_warp.run(work, stage);
      index += block_count().x;
      // while y is written, the first weights of the next tile come
      if (index < count) of_warp.load(Work(p, index));
      of_warp.write(work);
    }
  }
}

}  // namespace graphopt
