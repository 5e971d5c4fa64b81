// Trellises: a value is the sum of two, looked up by the halves of a window that reaches into the codes of the columns
// to the right; see dequantize_trellis/spec/op.py. A tile is a circle of columns, and so is a line of codes.
#pragma once

#include "matmul_table/cpu/dispatch.h"

namespace graphopt {
namespace {

// The halves of the windows of a line of codes: `neighbour(std::integral_constant<int, n>)` are the codes n columns to
// the right.
template <int Bits, typename Neighbour>
GRAPHOPT_FORCE_INLINE void split_windows(const Bytes& codes, const Neighbour& neighbour, Bytes* upper, Bytes* lower) {
  constexpr int kField = trellis_field(Bits);
  const auto next = [&](auto count) __attribute__((always_inline)) { return neighbour(codes, count); };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  if constexpr (kField == Bits) {
    *upper = codes;
    *lower = next(One());
  } else if constexpr (kField == 2 * Bits) {
    *upper = either(shift_right<-Bits>(codes), next(One()));
    *lower = neighbour(*upper, Two());
  } else {
    const Bytes second = next(One()), third = next(Two());
    constexpr uint8_t kMask = (1 << kField) - 1;
    // shifts move bits from one byte into the next
    *upper = masked(either(shift_right<Bits - kField>(codes), shift_right<2 * Bits - kField>(second)), kMask);
    *lower = masked(either(shift_right<2 * Bits - 2 * kField>(second), shift_right<3 * Bits - 2 * kField>(third)), kMask);
  }
}

// Makes bytes of the codes of a unit: signed integers, or those more than 128 that products take.
template <int Bits>
class TrellisLines {
  static constexpr int kField = trellis_field(Bits);

 public:
  TrellisLines(const Table& table, bool is_signed)
      : head_(is_signed ? table.signed_head : table.head), tail_(table.tail), look_up_head_(head_, 0),
        look_up_tail_(tail_, 0) {}

  // Calls with_line(j, bytes) for each line.
  template <typename WithLine>
  GRAPHOPT_FORCE_INLINE void operator()(const uint8_t* unit, const WithLine& with_line) const {
    constexpr bool kExact = kField != Bits || LookUp<kField>::kExact;
    for_each_line([&](auto j) __attribute__((always_inline)) {
      Bytes upper, lower;
      split_windows<Bits>(codes_of_line<Bits, kExact, decltype(j)::value>(unit), [](const Bytes& line, auto count)
                          __attribute__((always_inline)) { return rotate_columns<decltype(count)::value>(line); },
                          &upper, &lower);
      const Bytes head = look_up_head_(upper), tail = look_up_tail_(lower);
      with_line(j, by_parts<Bytes>([&](size_t i) { return head.part[i] + tail.part[i]; }));
    });
  }

  // The same for a tile of fewer columns, whose circle is smaller; there is one such tile in a matrix.
  template <typename WithLine>
  void of_narrow(const uint8_t* unit, size_t columns, const WithLine& with_line) const {
    for_each_line([&](auto j) {
      uint8_t bytes[kLine] = {}, halves[2][kLine];
      Bytes upper, lower;
      split_windows<Bits>(codes_of_line<Bits, true, decltype(j)::value>(unit), [&](const Bytes& line, auto count) {
        uint8_t from[kLine], to[kLine] = {};
        store_line(from, line);
        for (size_t i = 0; i < 4 * columns; ++i) to[i] = from[(i + 4 * decltype(count)::value) % (4 * columns)];
        return load_line<Bytes>(to);
      }, &upper, &lower);
      store_line(halves[0], upper);
      store_line(halves[1], lower);
      for (size_t i = 0; i < 4 * columns; ++i) {
        bytes[i] = static_cast<uint8_t>(head_[halves[0][i]] + tail_[halves[1][i]]);
      }
      with_line(j, load_line<Bytes>(bytes));
    });
  }

 private:
  const uint8_t *head_, *tail_;
  LookUp<kField> look_up_head_, look_up_tail_;
};

// Whether bytes are multiplied as signed ones.
constexpr bool kSignedTrellis = kByteBias != 0 || TrellisProduct::kFromZero;

// The operand of a few rows; see byte_operand.h.
template <int Bits>
class AsTrellis {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1, kSums = 1;
  static constexpr bool kFromZero = TrellisProduct::kFromZero, kMultipliesUnits = true;

  explicit AsTrellis(const Table& table) : lines_(table, kSignedTrellis) {}

  template <size_t Width, size_t kCount>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][kCount], const uint8_t* unit,
                                           const uint32_t* word) const {
    lines_(unit, [&](auto j, const Bytes& bytes) __attribute__((always_inline)) {
      constexpr size_t J = decltype(j)::value;
#pragma GCC unroll 8
      for (size_t row = 0; row < Width; ++row) {
        Integers& sum = sums[0][row][J % kCount];
        sum = TrellisProduct::dot_line(sum, bytes, word[J * Width + row]);
        settle(sum);
      }
    });
  }

 private:
  TrellisLines<Bits> lines_;
};

// Calls with_line(bytes, index of the unit) for each line of a part of a block.
template <int Bits, typename WithLine>
void for_each_trellis_line(const Filling& filling, const Weights& weights, const Part& part, const WithLine& with_line) {
  constexpr size_t kUnitBytes = 32 * Bits;
  const TrellisLines<Bits> lines = *static_cast<const TrellisLines<Bits>*>(filling.decoder);
  const uint8_t* unit = weights.codes + part.tile * weights.tile_bytes() + part.first_unit * kUnitBytes;
  const size_t columns = columns_of(weights, part.tile);
  for (size_t i = 0; i < part.units; ++i, unit += kUnitBytes) {
    const auto with_bytes = [&](auto, const Bytes& bytes) __attribute__((always_inline)) {
      with_line(bytes, part.first_unit + i);
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
  uint8_t* to = part.to;
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t) {
    store_line(to, bytes);
    to += 2 * kLine;
  });
}

template <int Bits>
void fill_with_trellis_floats(const Filling& filling, const Weights& weights, const Part& part) {
  uint8_t* to = part.to;
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t unit) {
    Rows rows = rows_of_bytes<true>(bytes);
    if (filling.shifted) {
      const ColumnScales of = column_scales(weights, part.tile, unit * 16 / weights.group, 1);
      for (Floats& row : rows.row) row = shift_values(row, filling.unit, of);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i, to += 2 * kLine) store_line(to, rows.row[i]);
  });
}

// Integers of a byte are bfloat16 as they are: the upper halves of floats, two rows in a line.
template <int Bits>
void fill_with_trellis_bfloat16s(const Filling& filling, const Weights& weights, const Part& part) {
  typedef uint32_t Lanes __attribute__((vector_size(kVectorBytes)));
  uint8_t* to = part.to;
  for_each_trellis_line<Bits>(filling, weights, part, [&](const Bytes& bytes, size_t) {
    const Rows rows = rows_of_bytes<true>(bytes);
    for (size_t i = 0; i < 4; i += 2, to += 2 * kLine) {
      store_line(to, by_parts<Bytes>([&](size_t k) {
        const auto lanes = [&](size_t row) { return reinterpret_cast<Lanes>(rows.row[row].part[k]); };
        return reinterpret_cast<Bytes::Part>(lanes(i) >> 16 | (lanes(i + 1) & 0xffff0000u));
      }));
    }
  });
}

// Calls with_bits(bits), known to the compiler, for the bits that a trellis may have.
template <typename WithBits>
void choose_trellis_bits(int bits, const WithBits& with_bits) {
  choose_bits(bits, [&](auto known) {
    if constexpr (decltype(known)::value >= 2 && decltype(known)::value <= 6) with_bits(known);
  });
}

inline void gemm_of_trellis(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  const auto with_filling = gemm_with(weights, rounded, y, first, end);
  choose_trellis_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    const bool integers = rounded.form == Words::kBytes;
    const TrellisLines<kBits> lines(weights.table, !integers || kSignedTrellis);
    const float unit = integers ? 1 : static_cast<float>(weights.table.step);
    Filling filling = {fill_with_trellis<kBits>, &lines, shifts(weights, rounded), unit};
    if (rounded.form == Words::kFloats) filling.fill = fill_with_trellis_floats<kBits>;
    if (rounded.form == Words::kBfloat16s) filling.fill = fill_with_trellis_bfloat16s<kBits>;
    with_filling(filling);
  });
}

// A few rows of integers; of floats through a block, and so is a last tile of fewer columns.
inline void small_m_of_trellis(const Weights& weights, const Rounded& rounded, float* y, size_t first, size_t end) {
  if (rounded.form != Words::kBytes) return gemm_of_trellis(weights, rounded, y, first, end);
  const size_t whole = weights.columns / kColumns < end ? weights.columns / kColumns : end;
  choose_trellis_bits(weights.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    choose_width(rounded.width(0), [&](auto width) {
      constexpr size_t kWidth = decltype(width)::value;
      // rare formats take the compiler as long as others
      if constexpr (kWidth <= kSmallM && (kBits <= 4 || kWidth == 1)) {
        multiply_small_m<kBits, AsTrellis<kBits>, kWidth>(weights, rounded, y, first, whole);
      } else {
        gemm_of_trellis(weights, rounded, y, first, whole);
      }
    }, Widths());
  });
  if (whole < end) gemm_of_trellis(weights, rounded, y, whole, end);
}

}  // namespace
}  // namespace graphopt
