// Trellises: a value is the sum of two, looked up by the halves of a window that reaches into the codes of the columns
// to the right; see dequantize_trellis/spec/op.py. A tile is a circle of columns, and so is a line of codes.
#pragma once

#include "matmul_table/cpu/dispatch.h"
#include "matmul_table/cpu/gemv.h"

namespace graphopt {
namespace {

// The places of the tables that the halves of windows of a line name. They are indices of Table::head and Table::tail;
// what is above them is 0 where LookUp wants it so.
template <int Bits>
class Halves {
  static constexpr int kField = trellis_field(Bits);
  static constexpr bool kExact = LookUp<kField>::kExact;

 public:
  // Calls with_halves(j, upper, lower) for each line of a unit. rotate(line, n, at): the bytes n columns to the right of
  // a line that may lie at `at`.
  template <typename Rotate, typename WithHalves>
  static GRAPHOPT_FORCE_INLINE void of_unit(const uint8_t* unit, const Rotate& rotate, const WithHalves& with_halves) {
    if constexpr (Bits == 2) {
      // two codes are half a window: a line and its neighbour make nibbles of two lines each, the next two another half
      const Bytes codes = load_line<Bytes>(unit), next = rotate(codes, Columns<1>(), unit);
      const Bytes even = select(shift_right<-2>(codes), next, 0xcc), odd = select(codes, shift_right<2>(next), 0xcc);
      with_nibbles<0, 2>(even, rotate(even, Columns<2>()), with_halves);
      with_nibbles<1, 3>(odd, rotate(odd, Columns<2>()), with_halves);
    } else if constexpr (Bits == 3) {
      // The upper half: the code, and the uppermost bit of the next one. The lower half: the others of that, and the two
      // uppermost of the code behind it; put together for the code to the left, and moved there.
      const Bytes low = load_line<Bytes>(unit), high = spread_single_bits(unit + kLine);
      const Bytes next_low = rotate(low, Columns<1>(), unit), next_high = rotate(high, Columns<1>());
      const Bytes of_upper = select(high, shift_right<-1>(next_high), 0x55), of_lower = select(next_high, next_low, 0x55);
      const Bytes right = shift_right<2>(low);
      with_nibbles<0, 2>(select(low, shift_right<-2>(of_upper), 0x33),
                         rotate(select(low, shift_right<-2>(of_lower), 0x33), Columns<1>()), with_halves);
      with_nibbles<1, 3>(select(right, of_upper, 0x33), rotate(select(right, of_lower, 0x33), Columns<1>()),
                         with_halves);
    } else if constexpr (Bits == 4) {
      const Bytes first = load_line<Bytes>(unit), second = load_line<Bytes>(unit + kLine);
      with_nibbles<0, 1>(first, rotate(first, Columns<1>(), unit), with_halves);
      with_nibbles<2, 3>(second, rotate(second, Columns<1>(), unit + kLine), with_halves);
    } else {
      for_each_line([&](auto j) __attribute__((always_inline)) {
        const Bytes codes = codes_of_line<Bits, kExact, decltype(j)::value>(unit);
        with_halves(j, codes, rotate(codes, Columns<1>()));
      });
    }
  }

 private:
  template <int Count>
  using Columns = std::integral_constant<int, Count>;

  // Halves of two lines, of `First` in the lower four bits.
  template <size_t First, size_t Second, typename WithHalves>
  static GRAPHOPT_FORCE_INLINE void with_nibbles(const Bytes& upper, const Bytes& lower, const WithHalves& with_halves) {
    with_halves(std::integral_constant<size_t, First>(), nibbles(upper), nibbles(lower));
    with_halves(std::integral_constant<size_t, Second>(), nibbles(shift_right<4>(upper)), nibbles(shift_right<4>(lower)));
  }

  static GRAPHOPT_FORCE_INLINE Bytes nibbles(const Bytes& bytes) { return kExact ? masked(bytes, 0x0f) : bytes; }
};

// Makes bytes of the codes of a unit: signed integers, or what products take, those more than the offset of the table.
template <int Bits>
class TrellisLines {
 public:
  TrellisLines(const Table& table, bool is_signed)
      : head_(is_signed ? table.signed_head : table.head, is_signed ? 0 : kByteBias), tail_(table.tail, 0) {}

  // Calls with_line(j, bytes) for each line, in any order.
  template <typename WithLine>
  GRAPHOPT_FORCE_INLINE void operator()(const uint8_t* unit, const WithLine& with_line) const {
    const auto rotate = [](const Bytes& line, auto count, const uint8_t* at = nullptr) __attribute__((always_inline)) {
      return rotate_columns<decltype(count)::value>(line, at);
    };
    look_up(unit, rotate, with_line);
  }

  // The same for a tile of fewer columns, whose circle is smaller; there is one such tile in a matrix.
  template <typename WithLine>
  void of_narrow(const uint8_t* unit, size_t columns, const WithLine& with_line) const {
    const auto rotate = [&](const Bytes& line, auto count, const uint8_t* = nullptr) {
      uint8_t from[kLine], to[kLine] = {};
      store_line(from, line);
      for (size_t i = 0; i < 4 * columns; ++i) to[i] = from[(i + 4 * decltype(count)::value) % (4 * columns)];
      return load_line<Bytes>(to);
    };
    look_up(unit, rotate, with_line);
  }

 private:
  template <typename Rotate, typename WithLine>
  GRAPHOPT_FORCE_INLINE void look_up(const uint8_t* unit, const Rotate& rotate, const WithLine& with_line) const {
    Halves<Bits>::of_unit(unit, rotate, [&](auto j, const Bytes& upper, const Bytes& lower)
                          __attribute__((always_inline)) {
      const Bytes head = head_(upper), tail = tail_(lower);
      with_line(j, by_parts<Bytes>([&](size_t i) { return head.part[i] + tail.part[i]; }));
    });
  }

  LookUp<trellis_field(Bits)> head_, tail_;
};

// Whether bytes are multiplied as signed integers: where two products of larger ones would not fit 16 bits.
inline bool multiplies_signed_bytes(const Table& table) { return TrellisProduct::kFromZero && !table.fits_pairs(); }

// The operand of a few rows; see byte_operand.h. Product: what multiplies its bytes.
template <int Bits, typename Product>
class AsTrellis {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1, kSums = 1;
  static constexpr bool kFromZero = Product::kFromZero, kMultipliesUnits = true;

  explicit AsTrellis(const Table& table) : lines_(table, Product::kFromZero) {}

  template <size_t Width, size_t kCount>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][kCount], const uint8_t* unit,
                                           const uint32_t* word) const {
    lines_(unit, [&](auto j, const Bytes& bytes) __attribute__((always_inline)) {
      constexpr size_t J = decltype(j)::value;
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        Integers& sum = sums[0][row][J % kCount];
        sum = Product::dot_line(sum, bytes, word[J * Width + row]);
        settle(sum);
      }
    });
  }

 private:
  TrellisLines<Bits> lines_;
};

// Calls with_line(bytes, line of the part, unit) for each line of a part of a block.
template <int Bits, typename WithLine>
void for_each_trellis_line(const Filling& filling, const Weights& weights, const Part& part, const WithLine& with_line) {
  constexpr size_t kUnitBytes = 32 * Bits;
  const TrellisLines<Bits> lines = *static_cast<const TrellisLines<Bits>*>(filling.decoder);
  const uint8_t* unit = weights.codes + part.tile * weights.tile_bytes() + part.first_unit * kUnitBytes;
  const size_t columns = columns_of(weights, part.tile);
  for (size_t i = 0; i < part.units; ++i, unit += kUnitBytes) {
    const auto with_bytes = [&](auto j, const Bytes& bytes) __attribute__((always_inline)) {
      with_line(bytes, i * kUnitLines + decltype(j)::value, part.first_unit + i);
    };
    if (columns < kColumns) {
      lines.of_narrow(unit, columns, with_bytes);
      continue;
    }
#pragma GCC unroll 4
    for (size_t at = 0; at < kUnitBytes; at += kLine) {
      __builtin_prefetch(unit + part.units * kUnitBytes + at, 0, 2);  // of the next block
    }
    lines(unit, with_bytes);
  }
}

template <int Bits>
void fill_with_trellis(const Filling& filling, const Weights& weights, const Part& part) {
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t line, size_t) {
    store_line(part.to + line * 2 * kLine, bytes);
  });
}

template <int Bits>
void fill_with_trellis_floats(const Filling& filling, const Weights& weights, const Part& part) {
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t line, size_t unit) {
    Rows rows = rows_of_bytes<true>(bytes);
    if (filling.shifted) {
      ColumnScales of;
      read_column_scales(weights, part.tile, unit * 16 / weights.group, &of);
      for (Floats& row : rows.row) row = shift_values(row, filling.unit, of);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) store_line(part.to + (4 * line + i) * 2 * kLine, rows.row[i]);
  });
}

// Integers of a byte are bfloat16 as they are: the upper halves of floats, two rows in a line.
template <int Bits>
void fill_with_trellis_bfloat16s(const Filling& filling, const Weights& weights, const Part& part) {
  typedef uint32_t Lanes __attribute__((vector_size(kVectorBytes)));
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t line, size_t) {
    const Rows rows = rows_of_bytes<true>(bytes);
    for (size_t i = 0; i < 4; i += 2) {
      store_line(part.to + (2 * line + i / 2) * 2 * kLine, by_parts<Bytes>([&](size_t k) {
        const auto lanes = [&](size_t row) { return reinterpret_cast<Lanes>(rows.row[row].part[k]); };
        return reinterpret_cast<Bytes::Part>(lanes(i) >> 16 | (lanes(i + 1) & 0xffff0000u));
      }));
    }
  });
}

// Calls with_product(kind): a pointer to what multiplies the bytes of this trellis.
template <typename WithProduct>
void choose_trellis_product(const Table& table, const WithProduct& with_product) {
  if constexpr (TrellisProduct::kFromZero) {
    if (!multiplies_signed_bytes(table)) return with_product(static_cast<Int8<true>*>(nullptr));
  }
  with_product(static_cast<TrellisProduct*>(nullptr));
}

// Calls with_bits(bits), known to the compiler, for the bits that a trellis may have.
template <typename WithBits>
void choose_trellis_bits(int bits, const WithBits& with_bits) {
  choose_bits(bits, [&](auto bit_count) {
    if constexpr (decltype(bit_count)::value >= 2 && decltype(bit_count)::value <= 6) with_bits(bit_count);
  });
}

inline void gemm_of_trellis(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  const auto with_filling = gemm_with(weights, rounded, y, first, end);
  choose_trellis_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    const bool integers = rounded.form == Words::kBytes;
    const TrellisLines<kBits> lines(weights.table, !integers || multiplies_signed_bytes(weights.table));
    const float unit = integers ? 1 : static_cast<float>(weights.table.step);
    Filling filling = {fill_with_trellis<kBits>, &lines, shifts(weights, rounded), unit};
    if (rounded.form == Words::kFloats) filling.fill = fill_with_trellis_floats<kBits>;
    if (rounded.form == Words::kBfloat16s) filling.fill = fill_with_trellis_bfloat16s<kBits>;
    with_filling(filling);
  });
}

// The end of tiles that have all columns; what comes behind goes through a block.
inline size_t end_of_whole(const Weights& weights, size_t end) {
  const size_t whole = weights.columns / kColumns;
  return whole < end ? whole : end;
}

// A few rows of integers.
inline void small_m_of_trellis(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (rounded.form != Words::kBytes) return gemm_of_trellis(weights, rounded, y, first, end);
  const size_t whole = end_of_whole(weights, end);
  choose_trellis_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    using OneRow = TrellisOfOneRow<kBits>;
    if constexpr (!std::is_void_v<OneRow>) {
      if (rounded.rows() == 1 && OneRow::fits(weights.table)) {
        return multiply_small_m<kBits, OneRow, 1>(weights, rounded, y, first, whole);
      }
    }
    choose_trellis_product(weights.table, [&](auto* null) {
      using Operand = AsTrellis<kBits, std::remove_pointer_t<decltype(null)>>;
      choose_width(rounded.width(0), [&](auto width) {
        constexpr size_t kWidth = decltype(width)::value;
        // rare formats take the compiler as long as others
        if constexpr (kWidth <= kSmallM && (kBits <= 4 || kWidth == 1)) {
          multiply_small_m<kBits, Operand, kWidth>(weights, rounded, y, first, whole);
        } else {
          gemm_of_trellis(weights, rounded, y, first, whole);
        }
      }, Widths());
    });
  });
  if (whole < end) gemm_of_trellis(weights, rounded, y, whole, end);
}

// The lines of a unit, whose bytes become floats; see CodeSource.
template <int Bits>
struct TrellisSource {
  struct Unit {
    Bytes lines[kUnitLines];
  };
  const TrellisLines<Bits>& lines;
  float step;

  float unit() const { return step; }
  GRAPHOPT_FORCE_INLINE Unit read(const uint8_t* unit) const {
    Unit bytes;
    lines(unit, [&](auto j, const Bytes& line) __attribute__((always_inline)) { bytes.lines[decltype(j)::value] = line; });
    return bytes;
  }
  template <size_t J>
  GRAPHOPT_FORCE_INLINE Rows rows(const Unit& unit) const {
    return rows_of_bytes<true>(unit.lines[J]);
  }
};

// One row of floats; zero points beside a trellis are rare, and go through a block.
inline void gemv_of_trellis(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (shifts(weights, rounded)) return gemm_of_trellis(weights, rounded, y, first, end);
  const size_t whole = end_of_whole(weights, end);
  choose_trellis_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    const TrellisLines<kBits> lines(weights.table, true);
    const TrellisSource<kBits> source{lines, static_cast<float>(weights.table.step)};
    multiply_gemv<kBits, false>(weights, rounded, source, y, first, whole);
  });
  if (whole < end) gemm_of_trellis(weights, rounded, y, whole, end);
}

}  // namespace
}  // namespace graphopt
