// Codes of a trellis of 2, 3 or 4 bits to operands: a weight is head[upper half of its window] + tail[lower half], see
// dequantize_trellis/spec/op.py. A half has 4 bits here, and its table is 16 bytes in 4 registers.
//
// Lane 4 g + t has columns 2 g and 2 g + 1 of a tile in the lower and the upper halves of its words. The lanes 4 further,
// circular as the tile is, have the columns that follow, so one shuffle of a word is what windows need of their
// neighbours.
//
// prepare() makes four words of a pair of units: the upper halves of the windows of each, a digit of 4 bits for each of
// 8 slots, and the lower halves. The bits of a digit are in the order of half_of() in weights.cc.
//
// Bytes of the sums are 128 more than their integers, and those of the tail are below 128 (pack.cc sees to both). So
// sums of bytes carry nothing to the byte above, and a digit of 8 or more asks byte_permute for eight copies of a sign
// that is 0: of the two halves of the tail one gives the number and the other one nothing, without a choice.
#pragma once

#include "matmul_table/cuda/decode.h"

namespace graphopt {

// The words of the columns one further and two further to the right.
struct RightWords {
  uint32_t by_one, by_two;

  GRAPHOPT_DEVICE explicit RightWords(uint32_t word) {
    by_two = shuffle(word, lane() + 4);
    by_one = funnel_right(word, by_two, 16);
  }
};

// The digits of two units from fields of 2 bits, of which one unit has the even and the other the odd ones: the lower
// two bits of a digit from `low`, the others from `high`.
struct Digits {
  uint32_t even, odd;

  GRAPHOPT_DEVICE Digits(uint32_t low, uint32_t high) {
    even = select_bits(low, high << 2);
    odd = select_bits(low >> 2, high);
  }
  GRAPHOPT_DEVICE static uint32_t select_bits(uint32_t low, uint32_t high) {
    return lop3<0xca>(0x33333333u, low, high);
  }
};

// Loads and windows.
template <int Bits>
struct TrellisWords;

template <>
struct TrellisWords<2> : Arithmetic<1> {
  GRAPHOPT_DEVICE static void prepare(unsigned, const uint32_t (&words)[1], uint32_t (&pair_words)[4]) {
    const Digits upper(RightWords(words[0]).by_one, words[0]);
    pair_words[0] = upper.even;
    pair_words[1] = upper.odd;
    // the lower half of a window is the upper half of the one two columns further
    pair_words[2] = shuffle(upper.even, lane() + 4);
    pair_words[3] = shuffle(upper.odd, lane() + 4);
  }
};

template <>
struct TrellisWords<3> {
  static constexpr int kWords = 2, kBits = 3;
  static constexpr bool kTable = false, kWide = false;

  GRAPHOPT_DEVICE static void load_block(const Product&, const uint8_t* block, uint32_t (&words)[4][2]) {
    const Word4 low = load16_once(block);
    const Word2 high = load8(block - lane() * 16 + 512 + lane() * 8);
    GRAPHOPT_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      words[pair][0] = low.words[pair];
      words[pair][1] = high.words[pair / 2];
    }
  }
  GRAPHOPT_DEVICE static void reload(const Product& p, const uint8_t* block, int pair, uint32_t (&words)[4][2]) {
    if (pair == 3) load_block(p, block, words);
  }
  GRAPHOPT_DEVICE static void load_pair(const Product&, const uint8_t* block, unsigned pair, uint32_t (&words)[2]) {
    words[0] = load_word(block + byte_of_word(kBits, 0, pair));
    words[1] = load_word(block - lane() * 8 + byte_of_word(kBits, 0, kBlockPairs + pair / 2));
  }

  // Of codes a, b and c of columns side by side, the upper half is all of a and the uppermost bit of b, and the lower
  // half the other two of b and the two uppermost of c.
  GRAPHOPT_DEVICE static void prepare(unsigned pair, const uint32_t (&words)[2], uint32_t (&pair_words)[4]) {
    const uint32_t high = words[1] >> pair % 2;  // at even bits; the others are not used
    const RightWords low_of(words[0]), high_of(high);
    const Digits upper(words[0], lop3<0xca>(0x55555555u, high, high_of.by_one << 1));
    const Digits lower(low_of.by_one, lop3<0xca>(0x55555555u, high_of.by_two, low_of.by_two));
    pair_words[0] = upper.even;
    pair_words[1] = upper.odd;
    pair_words[2] = lower.even;
    pair_words[3] = lower.odd;
  }
};

template <>
struct TrellisWords<4> : Arithmetic<2> {
  GRAPHOPT_DEVICE static void prepare(unsigned, const uint32_t (&words)[2], uint32_t (&pair_words)[4]) {
    GRAPHOPT_UNROLL
    for (int unit = 0; unit < 2; ++unit) {
      pair_words[unit] = words[unit];
      pair_words[2 + unit] = RightWords(words[unit]).by_one;
    }
  }
};

template <int Bits>
struct Trellis : TrellisWords<Bits> {
  static constexpr int kPairWords = 4;
  static constexpr bool kTrellis = true;
  static constexpr size_t kTableBytes = 0;

  // The bytes of rows 4 t to 4 t + 3 of both columns.
  template <int H>
  GRAPHOPT_DEVICE static void decode_bytes(const Product& p, const uint32_t (&pair_words)[4], uint32_t (&bytes)[2]) {
    const uint32_t upper = pair_words[H], lower = pair_words[2 + H];
    const uint32_t digits = upper & 0x77777777u, choice = Table4::choice_of(upper), others = lower ^ 0x88888888u;
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t head = Table4::look_up(p.lookup, digits >> 16 * half, choice >> 16 * half);
      const uint32_t of_low = byte_permute(p.lookup[4], p.lookup[5], lower >> 16 * half);
      const uint32_t of_high = byte_permute(p.lookup[6], p.lookup[7], others >> 16 * half);
      bytes[half] = head + of_low + of_high;
    }
  }
};

template <int Bits>
struct TrellisToHalf : Trellis<Bits> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&pair_words)[4],
                                     uint32_t (&a)[4]) {
    constexpr uint32_t kBias = 0xe480e480u;  // -1024 - 128
    uint32_t bytes[2];
    Trellis<Bits>::template decode_bytes<H>(p, pair_words, bytes);
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      a[half] = half2_add(byte_permute(bytes[half], 0x64646464u, 0x4140u), kBias);
      a[half + 2] = half2_add(byte_permute(bytes[half], 0x64646464u, 0x4342u), kBias);
    }
  }
};

// The same from tables in shared memory: entry `e` holds, for two digits that are a byte `e` of a word, both numbers of the
// head as float16, once for each lane, then those of the tail. A lane reads a bank of its own, and a byte permutation
// makes an address of a byte and of the lane. This moves work from the units for integers, which limit TrellisToHalf,
// to those for loads.
template <int Bits>
struct TrellisFromShared : TrellisToHalf<Bits> {
  static constexpr size_t kTableBytes = size_t{256} * 2 * kWarp * 4;

  // The threads of a block fill the table, an entry each at a time; a barrier has to follow.
  GRAPHOPT_DEVICE static void fill(const Product& p, char* table) {
    for (unsigned entry = thread_index().x; entry < 256; entry += thread_count()) {
      const uint32_t choice = Table4::choice_of(entry), others = entry ^ 0x88888888u;
      const uint32_t head = Table4::look_up(p.lookup, entry & 0x77777777u, choice);
      const uint32_t tail = byte_permute(p.lookup[4], p.lookup[5], entry) + byte_permute(p.lookup[6], p.lookup[7], others);
      const uint32_t of_head = half2_add(byte_permute(head, 0x64646464u, 0x4140u), 0xe480e480u);  // -1024 - 128
      const uint32_t of_tail = half2_add(byte_permute(tail, 0x64646464u, 0x4140u), 0xe400e400u);  // -1024
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 8; ++i) {
        // threads side by side write different banks
        char* const to = table + entry * 2 * kWarp * 4 + (entry + i) % 8 * 16;
        store16(to, Word4{{of_head, of_head, of_head, of_head}});
        store16(to + kWarp * 4, Word4{{of_tail, of_tail, of_tail, of_tail}});
      }
    }
  }

  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product&, const char* table, const uint32_t (&pair_words)[4],
                                     uint32_t (&a)[4]) {
    const uint32_t of_lane = static_cast<uint32_t>(lane()) * 4;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      const uint32_t selector = 0x7704u + 0x10u * i;  // byte i above the lane's
      const char* const head = table + byte_permute(pair_words[H], of_lane, selector);
      const char* const tail = table + kWarp * 4 + byte_permute(pair_words[2 + H], of_lane, selector);
      a[i / 2 + i % 2 * 2] = half2_add(*reinterpret_cast<const uint32_t*>(head), *reinterpret_cast<const uint32_t*>(tail));
    }
  }
};

template <int Bits>
struct TrellisToByte : Trellis<Bits> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&pair_words)[4],
                                     uint32_t (&a)[2]) {
    Trellis<Bits>::template decode_bytes<H>(p, pair_words, a);
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) a[half] ^= 0x80808080u;
  }
};

}  // namespace graphopt
