// How codes are laid out in GPU memory, so that a lane loads 16 bytes of its own at a time and they already are what
// a matrix product needs.
//
// A tile has 16 columns, a unit 16 rows of K, as in files (matmul_table/packing.py); a block is 8 units of a tile. A
// warp reads blocks [tile][block]; each is 256 bits bytes, 2 bits words of 32 bits for each lane: words 4 i to 4 i + 3
// are 16 bytes of their own, word 4 i + j of a lane at 512 i + 16 lane + 4 j, and of an odd number of bits the last two
// words are 8 bytes at 8 lane instead.
//
// Lane 4 g + t holds of each unit 8 codes, four rows (k = 0..3) of two columns. The rows are those that products of
// matrices ask of a lane, see row_position(). The columns, `half` 0 and 1, are g and g + 8, or of a trellis, whose
// weights read the columns to the right of theirs, 2 g and 2 g + 1. Which of its 8 slots a code has, and where the bits
// of a slot are, depends on the decoder; only bit_position() defines it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/platform.h"

namespace graphopt {

constexpr unsigned kTileColumns = 16, kUnitRows = 16, kBlockUnits = 8, kBlockRows = kUnitRows * kBlockUnits;
constexpr unsigned kBlockPairs = kBlockUnits / 2, kSlots = 8;

// What a product multiplies.
enum class Operands : int { kFloat32, kFloat16, kBFloat16, kInt8 };

// How a code becomes one of them.
enum class Decoder : int {
  kTable,   // any code, by a table in shared memory
  kWide,    // the same, to integers of 16 bits, as two of 8
  kTable4,  // 4 bits, by permuting the bytes of a table in registers
  kInt4,    // 4 bits, by arithmetic
  kInt8,    // 8 bits, likewise
  kE3M2,    // 6 bits, by moving them to their places in a float16
  kE2M3,
  kTrellis2,  // a trellis of 2 bits, by permuting the bytes of two tables in registers
  kTrellis3,
  kTrellis4,
};

// Whether a trellis is decoded.
constexpr bool is_trellis(Decoder decoder) {
  return decoder == Decoder::kTrellis2 || decoder == Decoder::kTrellis3 || decoder == Decoder::kTrellis4;
}

// Which slot holds row k of a half's column. Operands of 16 bits go into registers half + 2 (k / 2) in pairs,
// those of 8 bits into register `half` by four.
enum class Order : int {
  kHalves,        // a pair is slots i and i + 4, which a mask finds at the same place of both halves of a word
  kBytes,         // four are slots i, i + 2, i + 4, i + 6, which a mask finds at the same place of the bytes of a word
  kNeighbours16,  // a pair, or four, are slots that follow one another
  kNeighbours8,
  kTrellis,       // like kNeighbours8, of columns side by side
};

// Where a column of a tile is: `half` of the lanes 4 g + t.
struct ColumnPosition {
  unsigned g, half;
};
inline ColumnPosition column_position(Order order, unsigned column) {
  return order == Order::kTrellis ? ColumnPosition{column / 2, column % 2} : ColumnPosition{column % 8, column / 8};
}

// Where a row of a unit is: number k of lanes t. Products of 16-bit numbers take rows 2 t and 2 t + 1, then 2 t + 8 and
// 2 t + 9; those of bytes, and floats, rows 4 t to 4 t + 3.
struct RowPosition {
  unsigned t, k;
};
inline RowPosition row_position(Operands operands, unsigned row) {
  const bool pairs = operands == Operands::kFloat16 || operands == Operands::kBFloat16;
  return pairs ? RowPosition{row % 8 / 2, row / 8 * 2 + row % 2} : RowPosition{row / 4, row % 4};
}

GRAPHOPT_BOTH unsigned slot_of(Order order, unsigned half, unsigned k) {
  switch (order) {
    case Order::kHalves: return half + 2 * (k / 2) + 4 * (k % 2);
    case Order::kBytes: return half + 2 * k;
    case Order::kNeighbours16: return 2 * (half + 2 * (k / 2)) + k % 2;
    default: return 4 * half + k;
  }
}

// A bit among the words that a lane has of a block.
struct BitPosition {
  unsigned word, bit;
};

// Planes of 8, 4, 2 and 1 bits, as in files: a word has the 4 bits of a unit's slots, the 2 of two units', the 1 of
// four's.
inline BitPosition position_in_planes(unsigned bits, unsigned unit, unsigned slot, unsigned bit) {
  if (bits == 8) return {2 * unit + slot % 2, 8 * (slot / 2) + bit};
  const unsigned upper = 16 * (slot / 4), twos = bits & 4 ? 8 : 0, ones = twos + (bits & 2 ? 4 : 0);
  if (bit < (bits & 4)) return {unit, 4 * slot + bit};
  if (bit < (bits & 6)) return {twos + unit / 2, upper + 8 * (unit % 2) + 2 * (slot % 4) + bit - (bits & 4)};
  return {ones + unit / 4, upper + 4 * (unit % 4) + slot % 4};
}

// Two units share three words. Slots i and i + 4 of unit u are pair 4 (u % 2) + i, one in each half of a word.
//
// E3M2: a float16 has the sign at bit 15 and the rest at bits 12 to 8. Pairs 0, 2, 4 are there at once, pairs 1, 3, 5
// eight bits below; bits 14 and 13 of the three words are pair 6, bits 6 and 5 pair 7.
inline BitPosition position_in_e3m2(unsigned unit, unsigned slot, unsigned bit) {
  const unsigned pair = 4 * (unit % 2) + slot % 4, first = 3 * (unit / 2), upper = 16 * (slot / 4);
  if (pair < 6) return {first + pair / 2, upper + (bit == 5 ? 15 : 8 + bit) - 8 * (pair % 2)};
  constexpr unsigned kWord[] = {2, 1, 1, 0, 0, 2}, kBit[] = {13, 13, 14, 13, 14, 14};
  return {first + kWord[bit], upper + kBit[bit] - 8 * (pair % 2)};
}

// E2M3: the sign at bit 15 and the rest at bits 11 to 7. The rest of a pair is there at once, 5 bits below or 10 below,
// round the end of the word; signs are in the bits that this leaves.
inline BitPosition position_in_e2m3(unsigned unit, unsigned slot, unsigned bit) {
  const unsigned pair = 4 * (unit % 2) + slot % 4, first = 3 * (unit / 2), upper = 16 * (slot / 4);
  if (bit < 5) return {first + pair / 3, (upper + 7 + bit + 32 - 5 * (pair % 3)) % 32};
  constexpr unsigned kWord[] = {2, 2, 2, 2, 2, 2, 0, 1}, kBit[] = {15, 14, 13, 12, 1, 0, 12, 12};
  return {first + kWord[pair], upper + kBit[pair]};
}

// A trellis of 2 bits: a word for two units, whose slots take turns.
inline BitPosition position_in_trellis2(unsigned unit, unsigned slot, unsigned bit) {
  return {unit / 2, 4 * slot + 2 * (unit % 2) + bit};
}
// Of 3 bits: the lower two likewise, and the uppermost at every second bit, of two such words in turn.
inline BitPosition position_in_trellis3(unsigned unit, unsigned slot, unsigned bit) {
  if (bit < 2) return position_in_trellis2(unit, slot, bit);
  return {kBlockPairs + unit / 4, 4 * slot + 2 * (unit % 2) + unit / 2 % 2};
}

inline BitPosition bit_position(Decoder decoder, unsigned bits, unsigned unit, unsigned slot, unsigned bit) {
  if (decoder == Decoder::kTrellis2) return position_in_trellis2(unit, slot, bit);
  if (decoder == Decoder::kTrellis3) return position_in_trellis3(unit, slot, bit);
  if (decoder == Decoder::kE3M2) return position_in_e3m2(unit, slot, bit);
  if (decoder == Decoder::kE2M3) return position_in_e2m3(unit, slot, bit);
  return position_in_planes(bits, unit, slot, bit);
}

// The byte of a block where a word of a lane begins.
GRAPHOPT_BOTH unsigned byte_of_word(unsigned bits, unsigned lane, unsigned word) {
  const unsigned whole = 2 * bits / 4;
  return word / 4 < whole ? word / 4 * 512 + lane * 16 + word % 4 * 4 : whole * 512 + lane * 8 + word % 4 * 4;
}

GRAPHOPT_BOTH size_t block_bytes(unsigned bits) { return size_t{256} * bits; }
GRAPHOPT_BOTH size_t blocks_of(size_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

}  // namespace graphopt
