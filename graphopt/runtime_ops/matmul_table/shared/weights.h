// Packed weights as a kernel sees them; how they are laid out is written down in matmul_table/op.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hadamard/cpu/kernels.h"

namespace graphopt {

enum class Activations { kFloat, kBfloat16, kInt8, kInt16, kUint4 };

// One byte of a table of integers: the value of a code is table[code] - offset, as far as this byte goes.
struct IntegerPlane {
  uint8_t table[256];  // repeated to 64 entries where it has fewer
  int offset = 0;
  uint8_t mask = 0;  // table[code] == code ^ mask, where by_xor says so
};

// What codes mean, in every form that a kernel reads.
struct Table {
  // Bytes of each value as a float and as a bfloat16, lowest byte first; repeated to 64 entries where there are fewer.
  uint8_t floats[4][256], bfloat16s[2][256];
  // value = step * integer, or the nearest such value; integer = low + 256 * high, where high exists only if `wide`.
  double step = 1;
  // `most`: the largest byte of low, where there is only low.
  bool wide = false, by_xor = false;
  int most = 255;
  // The largest byte of which two products with a signed one, none of them -128, fit 16 bits: 2 * 128 * 127.
  static constexpr int kMostOfPairs = 128;
  bool fits_pairs() const { return most <= kMostOfPairs; }
  // Whether the uppermost bit of a code is the sign of its integer, code 0 being 0; and that of its value.
  bool has_signs = false, floats_have_signs = false;
  int largest_integer = 0;  // by magnitude
  // The largest power of two that the upper half of the magnitudes are multiples of, where there are signs.
  int upper_factor = 1;
  // Whether all integers fit a signed byte, or an unsigned one, by a step that floats are safely multiplied by; whether
  // all values are bfloat16.
  bool holds_signed_bytes = false, holds_unsigned_bytes = false, holds_bfloat16s = false;
  IntegerPlane low, high;

  // entries: 1 to 256 finite values; bits: those of a code, 2^bits >= entries.
  void make(const float* values, size_t entries, int bits);
  int integer_of(size_t code) const;

  // A trellis has no values of codes, but of the two halves of a window; see dequantize_trellis/spec/op.py. Each sum of
  // two is step * integer, from -127 to 127, in the byte integer + low.offset: head holds the latter, signed_head
  // integers. Bytes start at 0 where they fit pairs. `most`: how far the largest sum is from the least.
  // Kernels put the bits of a half together in an order of their own, see half_of.
  bool is_trellis = false;
  uint8_t head[64], signed_head[64], tail[64];  // repeated where there are fewer

  // values: [2, entries], with as many entries as half a window has values. Returns whether they are such sums.
  bool make_trellis(const float* values, size_t entries, int bits);

 private:
  int factor_of_upper(size_t magnitudes) const;
};

// Bits of half a window of a trellis, whose codes have 2 to 6 bits.
constexpr int trellis_field(int bits) { return bits < 4 ? 4 : bits; }

// Numbers of 16 columns and some groups each, as integers of few bits under a float16 number for each run of groups of a
// column; see matmul_table/spec/levels.py. A tile's integers lie as the codes of a matrix with a row for each group do,
// its steps behind them.
struct Leveled {
  const uint8_t* bytes = nullptr;  // null: numbers are stored as they are
  size_t tile_bytes = 0, first_step = 0;  // bytes of a tile, and of it those before its steps
  int bits = 0;                           // 4, 6 or 8

  // The number in a group and column of a tile, for calls that read few; low: the integer of code 0.
  float number(size_t tile, size_t group, size_t lane, int span_bits, float low) const;
};

// Takes units of 256 codes apart that are digits of base 3, five in a byte, and packs them in 2 bits.
void unpack_digits(const uint8_t* digits, size_t units, uint8_t* codes);
// The code at a position of a unit of digits.
int digit(const uint8_t* unit, size_t position);

struct Weights {
  static constexpr size_t kDigitBytes = 52;  // of a unit of digits
  size_t rows = 0, columns = 0, group = 0;
  size_t experts = 0;  // matrices of these sizes that codes, scales, zero points and bias are stacked of; 0: one alone
  int bits = 0;
  bool digits = false;  // codes are digits of base 3, which products take apart before they multiply
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;       // of these two,
  const Half* half_scales = nullptr;   // one is there
  const float* zero_points = nullptr;  // neither of these two
  const Half* half_zero_points = nullptr;  // where all zero points are 0
  Leveled levels, zero_levels;             // in the place of scales and zero points
  int span_bits = 0;                       // 2^span_bits groups have one step
  float low = 0;                           // the integer of code 0
  bool minimums = false;                   // zero points are minimums: W = table[code] scale + minimum
  const float* bias = nullptr;             // null if absent
  Table table;

  size_t tiles() const { return (columns + 15) / 16; }
  size_t units() const { return (rows + 15) / 16; }
  bool has_zero_points() const { return zero_points || half_zero_points || zero_levels.bytes; }
  size_t groups() const { return (rows + group - 1) / group; }
  size_t unit_bytes() const { return digits ? kDigitBytes : 32 * static_cast<size_t>(bits); }
  size_t tile_bytes() const { return units() * unit_bytes(); }

  // A segment is what is summed up before it is scaled: a group, or a piece of one that is long.
  static constexpr size_t kSegment = 512;
  size_t segments_of_group() const { return (group + kSegment - 1) / kSegment; }
  size_t segments() const;

  // One of the experts by itself.
  Weights of_expert(size_t expert) const;
};

}  // namespace graphopt
