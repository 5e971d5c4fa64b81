// The kernel of halves.h.
#include "hadamard/cuda/halves.h"

#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"

namespace graphopt {
namespace {

template <typename T>
GRAPHOPT_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, Half>) multiply_f16(d, a, b);
  else multiply_bf16(d, a, b);
}
template <typename T>
GRAPHOPT_DEVICE uint32_t pair_from(float low, float high) {
  if constexpr (std::is_same_v<T, Half>) return half2_of(low, high);
  else return bfloat162_of(low, high);
}

GRAPHOPT_DEVICE uint32_t load4(const void* from) { return *static_cast<const uint32_t*>(from); }

GRAPHOPT_DEVICE void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// A lane's signs of 16 rows of Sylvester's matrix, packed as Core::pack does: an entry is negative where row and column
// have an odd number of ones in common.
GRAPHOPT_DEVICE uint32_t sylvester_signs(unsigned tile) {
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
  constexpr uint32_t kAll = 0x000f000f, kUpperRowAndColumn = 0x00080008, kOdd = 0x000f0000;
  uint32_t signs = kUpperRowAndColumn ^ (g & 1 ? kOdd : 0) ^ ((g / 2 & t) % 3 ? kAll : 0);
  signs |= (signs ^ (tile & 1 ? kAll : 0)) << 4;
  const uint32_t upper = tile & 2 ? 0x00ff00ff : 0;
  return signs | (signs ^ upper) << 8;
}

// The part of the call that a block does. In shared memory it has X, and later in its place the sums.
struct Block {
  unsigned first_run, runs;
  unsigned first_out, rows;  // of each run
};
GRAPHOPT_DEVICE Block block_of(const HadamardHalves& call) {
  const unsigned first_run = block_index().x * call.block_runs, first_out = block_index().y * call.split_rows;
  const unsigned runs = call.runs - first_run, rows = call.order - first_out;
  return {first_run, runs < call.block_runs ? runs : call.block_runs, first_out,
          rows < call.split_rows ? rows : call.split_rows};
}

// Sums are in banks in which neither the lanes that write pairs of them collide nor those that read 8 in a row.
GRAPHOPT_DEVICE unsigned bank_swap(unsigned column) { return column >> 3 & 4; }

// Butterflies over what are left of a row's bits, the upper Log and 1 and 2, for 8 neighbours each; to y.
template <typename T, int Log>
GRAPHOPT_DEVICE void finish(const HadamardHalves& call, const Block& block, const float* sums) {
  constexpr unsigned kParts = 1u << Log;
  const unsigned pitch = (1u << call.log_columns) + kHalvesPad;
  const int log_chunks = call.log_columns - 3 - Log;
  // Either all rows of some runs follow each other in y, or there is one run.
  T* const y = static_cast<T*>(call.y) +
               (static_cast<size_t>(block.first_run * call.order + block.first_out) << call.log_columns);
  for (unsigned item = thread_index().x; item < block.runs * block.rows << log_chunks; item += thread_count()) {
    const unsigned row = item >> log_chunks, column = (item - (row << log_chunks)) * 8;
    const float* const from = sums + row * pitch + column;
    float v[kParts][8];
    GRAPHOPT_UNROLL
    for (unsigned p = 0; p < kParts; ++p) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 8; i += 4) {
        const Word4 words = load16(from + (p << (call.log_columns - Log)) + (i ^ bank_swap(column)));
        GRAPHOPT_UNROLL
        for (unsigned j = 0; j < 4; ++j) v[p][i + j] = float_of_bits(words.words[j]);
      }
    }
    GRAPHOPT_UNROLL
    for (unsigned half = 1; half < kParts; half *= 2) {
      GRAPHOPT_UNROLL
      for (unsigned p = 0; p < kParts; ++p) {
        if (p & half) continue;
        GRAPHOPT_UNROLL
        for (unsigned i = 0; i < 8; ++i) add_and_subtract(v[p][i], v[p + half][i]);
      }
    }
    T* const to = y + (row << call.log_columns) + column;
    GRAPHOPT_UNROLL
    for (unsigned p = 0; p < kParts; ++p) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 8; ++i) {
        if (!(i & 2)) add_and_subtract(v[p][i], v[p][i + 2]);
      }
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        const float second = v[p][i + 4] * call.scale;
        v[p][i + 4] = multiply_add(v[p][i], call.scale, -second);
        v[p][i] = multiply_add(v[p][i], call.scale, second);
      }
      Word4 words;
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 8; i += 2) words.words[i / 2] = pair_from<T>(v[p][i], v[p][i + 1]);
      store16(to + (p << (call.log_columns - Log)), words);
    }
  }
}

// Loads X of each run, and behind it rows of zeros that fill up the last product.
template <typename T>
GRAPHOPT_DEVICE void load(const HadamardHalves& call, const Block& block, unsigned padded_rows, T* input) {
  const unsigned numbers = call.order << call.log_columns, padded = padded_rows << call.log_columns;
  // A step of the block is whole rows: HadamardHalves has so many warps.
  const unsigned step = thread_count() * 8, first = thread_index().x * 8;
  const auto in_shared = [&](unsigned i) { return i + (i >> call.log_columns) * kHalvesPad; };
  const auto* from = static_cast<const T*>(call.x) + static_cast<size_t>(block.first_run) * numbers + first;
  T* to_run = input + in_shared(first);
  for (unsigned run = 0; run < block.runs; ++run) {
    const T* source = from;
    T* to = to_run;
    for (unsigned i = first; i < padded; i += step) {
      copy_async16(to, source, i < numbers);
      to += in_shared(step);
      source += step;
    }
    from += numbers;
    to_run += in_shared(padded);
  }
  commit_copies();
}

// Butterflies of a warp's sums: bit 0 of a column, and the bits from 3 on that tell its tiles apart.
template <int Columns>
GRAPHOPT_DEVICE void butterflies(float (&sum)[Columns][4]) {
  GRAPHOPT_UNROLL
  for (int j = 0; j < Columns; ++j) {
    add_and_subtract(sum[j][0], sum[j][1]);
    add_and_subtract(sum[j][2], sum[j][3]);
  }
  GRAPHOPT_UNROLL
  for (int half = 1; half < Columns; half *= 2) {
    GRAPHOPT_UNROLL
    for (int j = 0; j < Columns; ++j) {
      if (j & half) continue;
      GRAPHOPT_UNROLL
      for (int r = 0; r < 4; ++r) add_and_subtract(sum[j][r], sum[j + half][r]);
    }
  }
}

// Rows and Columns: tiles of a warp. Two tiles of rows share what they load of X, which saves trips to shared memory
// where C is large; 640 threads of 96 registers are all that a processor has.
template <typename T, int Rows, int Columns>
GRAPHOPT_KERNEL((Rows > 1 ? 640 : Columns > 8 ? 512 : 256), (Rows > 1 || Columns > 8 ? 1 : 2))
void hadamard_halves(HadamardHalves call) {
  auto* const input = reinterpret_cast<T*>(shared_memory());
  auto* const sums = reinterpret_cast<float*>(shared_memory());
  const unsigned pitch = (1u << call.log_columns) + kHalvesPad, row_tiles = (call.order + 15) / 16;
  const Block block = block_of(call);
  load(call, block, 16 * row_tiles, input);

  // The warp's tiles: their run, if the block has it, rows of C^T X and columns.
  const int log_parts = call.log_columns - (Columns > 8 ? 7 : 6);
  const unsigned first_column = static_cast<unsigned>(warp()) % (1u << log_parts) * (8 * Columns);
  const unsigned groups = (call.split_rows + 16 * Rows - 1) / (16 * Rows);
  unsigned group = static_cast<unsigned>(warp()) >> log_parts, run = 0;
  if constexpr (Rows == 1) {
    for (; group >= groups; group -= groups) ++run;
  }
  const unsigned first_tile = block.first_out / 16 + group * Rows;
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
  // Each word has the signs of 64 inputs. Tiles behind the last of C have some signs; their sums are left.
  const auto tile_at = [&](unsigned i) { return first_tile + i < row_tiles ? first_tile + i : row_tiles - 1; };
  const auto signs_at = [&](unsigned i, unsigned first) {
    return load4(call.signs + (tile_at(i) * kWarp + static_cast<unsigned>(lane())) * 16 + first);
  };
  uint32_t word[Rows];
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < Rows; ++i) word[i] = call.signs ? signs_at(i, 0) : sylvester_signs(tile_at(i));
  wait_copies<0>();
  sync_block();

  float sum[Rows][Columns][4];
  if (run < block.runs) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < Rows * Columns * 4; ++i) sum[i / (4 * Columns)][i / 4 % Columns][i % 4] = 0;
    const unsigned lane_row = static_cast<unsigned>(lane()) % 16, lane_column = static_cast<unsigned>(lane()) / 16 * 8;
    const T* row = input + (run * 16 * row_tiles + lane_row) * pitch + first_column + lane_column;
    // X is loaded some products ahead, as it takes time to arrive.
    constexpr int kAhead = Rows > 1 ? 2 : 4;
    uint32_t b[kAhead][4];
    GRAPHOPT_UNROLL
    for (int j = 0; j < kAhead - 1; ++j) load_matrices_transposed(b[j], row + 16 * j);
    GRAPHOPT_NO_UNROLL
    for (unsigned k = 0; k < row_tiles; ++k) {
      uint32_t a[Rows][4];
      GRAPHOPT_UNROLL
      for (int i = 0; i < Rows; ++i) {
        GRAPHOPT_UNROLL
        for (int r = 0; r < 4; ++r) a[i][r] = lop3<0xf8>(call.one, word[i] << (15 - r), 0x80008000u);
        word[i] >>= 4;
      }
      const T* const next_row = k + 1 < row_tiles ? row + 16 * pitch : row;
      GRAPHOPT_UNROLL
      for (int j = 0; j < Columns / 2; ++j) {
        const int ahead = j + kAhead - 1;
        load_matrices_transposed(b[ahead % kAhead],
                                 (ahead < Columns / 2 ? row : next_row) + 16 * (ahead % (Columns / 2)));
        const uint32_t (&pair)[4] = b[j % kAhead];
        const uint32_t left[2] = {pair[0], pair[1]}, right[2] = {pair[2], pair[3]};
        GRAPHOPT_UNROLL
        for (int i = 0; i < Rows; ++i) {
          multiply<T>(sum[i][2 * j], a[i], left);
          multiply<T>(sum[i][2 * j + 1], a[i], right);
        }
      }
      row = next_row;
      if (k % 4 == 3 && k + 1 < row_tiles) {
        GRAPHOPT_UNROLL
        for (unsigned i = 0; i < Rows; ++i) word[i] = signs_at(i, k + 1);
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < Rows; ++i) butterflies(sum[i]);
  }
  sync_block();
  if (run < block.runs) {
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 2 * Rows; ++i) {
      const unsigned row = 16 * first_tile + 8 * i + g - block.first_out;
      if (row >= block.rows) continue;
      float* const to = sums + (run * block.rows + row) * pitch + first_column;
      GRAPHOPT_UNROLL
      for (unsigned j = 0; j < Columns; ++j) {
        const float (&pair)[4] = sum[i / 2][j];
        store8(to + 8 * j + (2 * t ^ bank_swap(8 * j)),
               Word2{{bits_of_float(pair[i % 2 * 2]), bits_of_float(pair[i % 2 * 2 + 1])}});
      }
    }
  }
  sync_block();
  if (log_parts == 0) finish<T, 0>(call, block, sums);
  else if (log_parts == 1) finish<T, 1>(call, block, sums);
  else if (log_parts == 2) finish<T, 2>(call, block, sums);
  else finish<T, 3>(call, block, sums);
}

template <typename T>
auto kernel_of(const HadamardHalves& call) {
  if (call.row_tiles == 2) return hadamard_halves<T, 2, 8>;
  return call.column_tiles == 16 ? hadamard_halves<T, 1, 16> : hadamard_halves<T, 1, 8>;
}

}  // namespace

const char* HadamardHalves::start(void* stream) const {
  const Index3 grid{(runs + block_runs - 1) / block_runs, splits, 1};
  const auto kernel = type == GRAPHOPT_FLOAT16 ? kernel_of<Half>(*this) : kernel_of<BFloat16>(*this);
  return launch(kernel, grid, warps * kWarp, shared_bytes(), stream, *this);
}

}  // namespace graphopt
