// A tile of 16 columns; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
//
// An entry is one vector register, or a part of one: it is read from its book, gets its signs and its shift, and is
// multiplied. One row of x takes entries as they are. Several take a panel of decoded rows.
#include "matmul_codebook/cpu/kernels.h"

#include "abi/instructions.h"
#include "arch/line.h"

// Vectors wider than a register are no part of any interface here: all that takes or returns one is put in line.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace graphopt {
namespace {

constexpr size_t kLanes = kCodebookColumns;

template <size_t Size>
struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * Size)));
  typedef uint32_t Bits __attribute__((vector_size(4 * Size)));
};
typedef uint32_t Half __attribute__((vector_size(32)));  // eight codes

template <typename Vector>
GRAPHOPT_FORCE_INLINE Vector load(const void* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}
template <typename Vector>
GRAPHOPT_FORCE_INLINE void store(void* to, const Vector& vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

// Puts the bits of 16 numbers together, which lie in words of 16 bits.
inline void join_bits(const uint8_t* words, unsigned bits, uint32_t* numbers) {
  constexpr Half kOrder = {0, 1, 2, 3, 4, 5, 6, 7};
  Half low = {}, high = {};
  for (unsigned bit = 0; bit < bits; ++bit) {
    const uint32_t first = words[2 * bit], second = words[2 * bit + 1];
    low |= (((Half{} + first) >> kOrder) & 1u) << bit;
    high |= (((Half{} + second) >> kOrder) & 1u) << bit;
  }
  store(numbers, low);
  store(numbers + 8, high);
}

// What turns codes into entries, for a call.
template <size_t Size>
struct Entries {
  using Numbers = typename Vectors<Size>::Floats;
  using Bits = typename Vectors<Size>::Bits;

  const float *first, *second, *shifts;
  uint32_t first_mask, second_mask, sign_mask;
  unsigned second_at, signs_at, shift_at, bits;
  bool by_parity;
  Bits order;

  explicit Entries(const CodebookProduct& call)
      : first(call.books),
        second(call.second_bits ? call.books + (size_t{1} << call.index_bits) * Size : nullptr),
        shifts(call.shifts),
        first_mask((1u << call.index_bits) - 1),
        second_mask((1u << call.second_bits) - 1),
        sign_mask((1u << call.sign_bits) - 1),
        second_at(call.index_bits),
        signs_at(call.index_bits + call.second_bits),
        shift_at(call.index_bits + call.second_bits + call.sign_bits),
        bits(call.bits()),
        by_parity(call.sign_bits && call.sign_bits < Size) {
    for (size_t lane = 0; lane < Size; ++lane) order[lane] = static_cast<uint32_t>(lane);
  }

  GRAPHOPT_FORCE_INLINE Numbers operator()(uint32_t code) const {
    Numbers values = load<Numbers>(first + (code & first_mask) * Size);
    if (second) values += load<Numbers>(second + (code >> second_at & second_mask) * Size);
    if (sign_mask) {
      uint32_t signs = code >> signs_at & sign_mask;
      if (by_parity) signs |= static_cast<uint32_t>(__builtin_parity(signs)) << (Size - 1);
      values = reinterpret_cast<Numbers>(reinterpret_cast<Bits>(values) ^ ((Bits{} + signs) >> order) << 31);
    }
    // with one shift no bit of a code is left, and a code of 32 bits cannot be moved by as many
    return values + (shift_at < bits ? shifts[code >> shift_at & 1] : shifts[0]);
  }
};

// Factors and offsets of the 16 columns of a tile, for the rows of a group and a span.
struct Scales {
  float factors[kLanes], offsets[kLanes];

  void read(const CodebookProduct& call, size_t tile, size_t group, size_t span) {
    const float* const steps = call.scales + (tile * call.spans() + span) * kLanes;
    uint32_t levels[kLanes] = {};
    if (call.level_bits) {
      join_bits(call.levels + (tile * call.groups() + group) * 2 * call.level_bits, call.level_bits, levels);
    }
    const size_t count = size_t{1} << call.level_bits;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      factors[lane] = call.level_table[levels[lane]] * steps[lane];
      offsets[lane] = call.level_table[count + levels[lane]];
    }
  }
};

template <size_t Size>
struct Tile {
  using Numbers = typename Vectors<Size>::Floats;
  static constexpr size_t kWide = kLanes / Size;  // entries of a row

  const CodebookProduct& call;
  const Entries<Size> entries;
  const size_t tile;

  Tile(const CodebookProduct& product, size_t index) : call(product), entries(product), tile(index) {}

  void read_codes(size_t block, uint32_t* codes) const {
    const unsigned bits = entries.bits;
    join_bits(call.codes + (tile * call.blocks() + block) * 2 * bits, bits, codes);
  }

  // Rows from a block on that have the factors of its first row.
  size_t end_of_run(size_t row) const {
    const size_t of_group = (row / call.group + 1) * call.group, of_span = (row / call.span + 1) * call.span;
    const size_t end = of_group < of_span ? of_group : of_span;
    return end < call.rows ? end : call.rows;
  }

  void multiply_one(float* sums) const {
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] = 0;
    for (size_t row = 0; row < call.rows;) {
      const size_t end = end_of_run(row);
      Scales scales{};
      scales.read(call, tile, row / call.group, row / call.span);
      if (call.of_rows) {
        multiply_rows(row, end, scales, sums);
      } else {
        multiply_columns(row, end, scales, sums);
      }
      row = end;
    }
  }

  // Entries of a column: each is multiplied by as many numbers of x.
  void multiply_columns(size_t row, size_t end, const Scales& scales, float* sums) const {
    Numbers parts[kLanes] = {};
    for (; row < end; row += Size) {
      uint32_t codes[kLanes];
      read_codes(row / Size, codes);
      float values[Size] = {};
      const float* x = call.x + row;
      if (row + Size > call.rows) {
        for (size_t i = 0; row + i < call.rows; ++i) values[i] = x[i];
        x = values;
      }
      const Numbers numbers = load<Numbers>(x);
      for (size_t lane = 0; lane < kLanes; ++lane) {
        parts[lane] += (entries(codes[lane]) + scales.offsets[lane]) * numbers;
      }
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
      float sum = 0;
      for (size_t i = 0; i < Size; ++i) sum += parts[lane][i];
      sums[lane] += sum * scales.factors[lane];
    }
  }

  // Entries of a row: all of them are multiplied by its number of x.
  void multiply_rows(size_t row, size_t end, const Scales& scales, float* sums) const {
    Numbers parts[kWide] = {}, offsets[kWide];
    for (size_t i = 0; i < kWide; ++i) offsets[i] = load<Numbers>(scales.offsets + i * Size);
    for (; row < end; row += Size) {
      uint32_t codes[kLanes];
      read_codes(row / Size, codes);
      for (size_t j = 0; j < Size && row + j < end; ++j) {
        const float number = call.x[row + j];
        for (size_t i = 0; i < kWide; ++i) parts[i] += (entries(codes[j * kWide + i]) + offsets[i]) * number;
      }
    }
    for (size_t i = 0; i < kWide; ++i) {
      for (size_t lane = 0; lane < Size; ++lane) sums[i * Size + lane] += parts[i][lane] * scales.factors[i * Size + lane];
    }
  }

  // Rows `row` to `end` as floats, [rows][16]; `row` is the first of a block.
  void decode(size_t row, size_t end, float* panel) const {
    Scales scales{};
    size_t run_end = row;
    for (size_t begin = row; row < end; row += Size) {
      if (row >= run_end) {
        run_end = end_of_run(row);
        scales.read(call, tile, row / call.group, row / call.span);
      }
      uint32_t codes[kLanes];
      read_codes(row / Size, codes);
      float block[kLanes * Size];
      for (size_t i = 0; i < kLanes; ++i) store(block + i * Size, entries(codes[i]));
      for (size_t j = 0; j < Size && row + j < end; ++j) {
        float* const line = panel + (row + j - begin) * kLanes;
        for (size_t lane = 0; lane < kLanes; ++lane) {
          const float value = call.of_rows ? block[j * kLanes + lane] : block[lane * Size + j];
          line[lane] = (value + scales.offsets[lane]) * scales.factors[lane];
        }
      }
    }
  }

  void multiply_many(float* panel, float* sums) const {
    for (size_t i = 0; i < call.batch * kLanes; ++i) sums[i] = 0;
    for (size_t row = 0; row < call.rows; row += kCodebookRows) {
      const size_t remaining_rows = call.rows - row;
      const size_t count = remaining_rows < kCodebookRows ? remaining_rows : kCodebookRows;
      decode(row, row + count, panel);
      size_t m = 0;
      for (; m + 4 <= call.batch; m += 4) {
        const float* x[4];
        Floats lines[4];
        for (size_t i = 0; i < 4; ++i) {
          x[i] = call.x + (m + i) * call.rows + row;
          lines[i] = load_line<Floats>(sums + (m + i) * kLanes);
        }
        for (size_t k = 0; k < count; ++k) {
          const auto weights = load_line<Floats>(panel + k * kLanes);
#pragma GCC unroll 4
          for (size_t i = 0; i < 4; ++i) lines[i] = lines[i] + weights * x[i][k];
        }
        for (size_t i = 0; i < 4; ++i) store_line(sums + (m + i) * kLanes, lines[i]);
      }
      for (; m < call.batch; ++m) {
        const float* const x = call.x + m * call.rows + row;
        auto line = load_line<Floats>(sums + m * kLanes);
        for (size_t k = 0; k < count; ++k) line = line + load_line<Floats>(panel + k * kLanes) * x[k];
        store_line(sums + m * kLanes, line);
      }
    }
  }
};

template <size_t Size>
void run_size(const CodebookProduct& call, size_t tile, float* scratch) {
  float *const panel = scratch, *const sums = scratch + kCodebookRows * kLanes;
  const Tile<Size> columns(call, tile);
  if (call.batch == 1) {
    columns.multiply_one(sums);
  } else {
    columns.multiply_many(panel, sums);
  }
  const size_t first = tile * kLanes, left = call.columns - first, width = left < kLanes ? left : kLanes;
  for (size_t m = 0; m < call.batch; ++m) {
    for (size_t lane = 0; lane < width; ++lane) call.y[m * call.columns + first + lane] = sums[m * kLanes + lane];
  }
}

void run(const CodebookProduct& call, size_t tile, float* scratch) {
  switch (call.size) {
    case 1:
      return run_size<1>(call, tile, scratch);
    case 2:
      return run_size<2>(call, tile, scratch);
    case 4:
      return run_size<4>(call, tile, scratch);
    case 8:
      return run_size<8>(call, tile, scratch);
    default:
      return run_size<16>(call, tile, scratch);
  }
}

}  // namespace

const CodebookKernels GRAPHOPT_NAME(kCodebook) = {run};

}  // namespace graphopt
