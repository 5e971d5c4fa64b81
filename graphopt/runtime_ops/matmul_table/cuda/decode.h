// Packed codes to operands, in registers. A decoder handles pairs of units: their codes lie in words of their own, which
// prepare() makes kPairWords others of; how unit h of them is decoded depends on h alone. `block` is where the lane's first 16 bytes of a block are, 16 times
// the lane behind its beginning.
#pragma once

#include "matmul_table/cuda/product.h"

namespace graphopt {

// Which column of a tile a lane 4 g + t has as `half`; see layout.h.
template <typename Decode>
GRAPHOPT_BOTH constexpr unsigned column_of(unsigned g, unsigned half) {
  return Decode::kTrellis ? 2 * g + half : g + 8 * half;
}

// Decoders whose words are decoded as they are, and which hold columns g and g + 8.
template <int Words>
struct Plain {
  static constexpr int kWords = Words, kPairWords = Words;
  static constexpr bool kTrellis = false;
  static constexpr size_t kTableBytes = 0;  // in shared memory, of what the streamed kernel decodes

  GRAPHOPT_DEVICE static void prepare(unsigned, const uint32_t (&words)[Words], uint32_t (&pair_words)[Words]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < Words; ++i) pair_words[i] = words[i];
  }
};

// Decoders whose words of a block are 16-byte loads one after another: `Words` for each pair of units.
template <int Words>
struct Arithmetic : Plain<Words> {
  static constexpr int kWords = Words, kBits = Words * 2;
  static constexpr bool kTable = false, kWide = false;

  GRAPHOPT_DEVICE static void load_block(const Product& p, const uint8_t* block, uint32_t (&words)[4][kWords]) {
    GRAPHOPT_UNROLL
    for (int pair = 0; pair < 4; ++pair) reload(p, block, pair, words);
  }
  // Once pairs up to this one are multiplied, the words that are free hold those of another block.
  GRAPHOPT_DEVICE static void reload(const Product&, const uint8_t* block, int pair, uint32_t (&words)[4][kWords]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < Words; ++i) {
      if ((4 * i + 3) / Words != pair) continue;
      const Word4 word = load16_once(block + i * 512);
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) words[(4 * i + j) / Words][(4 * i + j) % Words] = word.words[j];
    }
  }
  GRAPHOPT_DEVICE static void load_pair(const Product&, const uint8_t* block, unsigned pair,
                                        uint32_t (&words)[kWords]) {
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < Words; ++i) {
      words[i] = load_word(block + byte_of_word(kBits, 0, pair * Words + i));
    }
  }
};

// float16: what a code exceeds the least one by is put behind the leading 1 of 1024, whose last bit is 1, or 4 bits
// further up, where it is 16.
struct Int4ToHalf : Arithmetic<2> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&words)[2], uint32_t (&a)[4]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const uint32_t word = words[H] >> 4 * i;
      // one instruction each, where the compiler would take two for (word & mask) | 1024
      a[i] = half2_add(lop3<0xea>(word, 0x000f000fu, 0x64006400u), p.lookup[0]);
      a[i + 1] = half2_fma(lop3<0xea>(word, 0x00f000f0u, 0x64006400u), 0x2c002c00u, p.lookup[1]);  // 1/16
    }
  }
};
struct Int8ToHalf : Arithmetic<4> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&words)[4], uint32_t (&a)[4]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = byte_permute(words[2 * H + i % 2], 0x64646464u, i < 2 ? 0x4240u : 0x4341u);
      a[i] = half2_add(pair, p.lookup[0]);
    }
  }
};

// float16 whose exponents are biased as those of 6 bits: the step of the table makes up for it. Subnormal numbers are
// ones of float16 too. (FP6-LLM, Xia et al. 2024, section 5.3.)
struct E3M2ToHalf : Arithmetic<3> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product&, const uint32_t*, const uint32_t (&w)[3], uint32_t (&a)[4]) {
    constexpr uint32_t kMask = 0x9f009f00u;
    a[0] = w[2 * H] & kMask;
    a[1] = w[2 * H] << 8 & kMask;
    if constexpr (H == 0) {
      a[2] = w[1] & kMask;
      a[3] = w[1] << 8 & kMask;
    } else {
      a[2] = (w[0] >> 2 & 0x18001800u) | (w[1] >> 4 & 0x06000600u) | (w[2] << 1 & 0x80008000u) |
             (w[2] >> 5 & 0x01000100u);
      a[3] = (w[0] << 6 & 0x18001800u) | (w[1] << 4 & 0x06000600u) | (w[2] << 9 & 0x80008000u) |
             (w[2] << 3 & 0x01000100u);
    }
  }
};
struct E2M3ToHalf : Arithmetic<3> {
  GRAPHOPT_DEVICE static uint32_t rest(uint32_t word) { return word & 0x0f800f80u; }
  GRAPHOPT_DEVICE static uint32_t sign(uint32_t word) { return word & 0x80008000u; }
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product&, const uint32_t*, const uint32_t (&w)[3], uint32_t (&a)[4]) {
    if constexpr (H == 0) {
      a[0] = rest(w[0]) | sign(w[2]);
      a[1] = rest(w[0] << 5) | sign(w[2] << 1);
      a[2] = rest(funnel_right(w[0], w[0], 22)) | sign(w[2] << 2);
      a[3] = rest(w[1]) | sign(w[2] << 3);
    } else {
      a[0] = rest(w[1] << 5) | sign(w[2] << 14);
      a[1] = rest(funnel_right(w[1], w[1], 22)) | sign(w[2] << 15);
      a[2] = rest(w[2]) | sign(w[0] << 3);
      a[3] = rest(w[2] << 5) | sign(w[1] << 3);
    }
  }
};

// Bytes: a code is the upper half of one, which makes it 16 times its value, or the lower half of one without a sign.
struct Int4ToByte : Arithmetic<2> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&words)[2], uint32_t (&a)[2]) {
    a[0] = words[H] << p.lookup[0] & p.lookup[1];
    a[1] = words[H] >> (4 - p.lookup[0]) & p.lookup[1];
  }
};
struct Int8ToByte : Arithmetic<4> {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product&, const uint32_t*, const uint32_t (&words)[4], uint32_t (&a)[2]) {
    a[0] = words[2 * H];
    a[1] = words[2 * H + 1];
  }
};

// 4 bits by a table of 16 bytes in 4 registers, or of twice 16: a selector's digit has 3 bits, so both halves of the
// table are asked, and the fourth bit chooses.
struct Table4 : Arithmetic<2> {
  GRAPHOPT_DEVICE static uint32_t look_up(const uint32_t* table, uint32_t digits, uint32_t choice) {
    return byte_permute(byte_permute(table[0], table[1], digits), byte_permute(table[2], table[3], digits), choice);
  }
  GRAPHOPT_DEVICE static uint32_t choice_of(uint32_t word) { return (word >> 1 & 0x44444444u) | 0x32103210u; }
};
struct Table4To16Bits : Table4 {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&words)[2], uint32_t (&a)[4]) {
    const uint32_t digits = words[H] & 0x77777777u, choice = choice_of(words[H]);
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const uint32_t low = look_up(p.lookup, digits >> 8 * i, choice >> 8 * i);
      const uint32_t high = look_up(p.lookup + 4, digits >> 8 * i, choice >> 8 * i);
      a[i] = byte_permute(low, high, 0x5140);
      a[i + 1] = byte_permute(low, high, 0x7362);
    }
  }
};
struct Table4ToByte : Table4 {
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t*, const uint32_t (&words)[2], uint32_t (&a)[2]) {
    const uint32_t digits = words[H] & 0x77777777u, choice = choice_of(words[H]);
    a[0] = look_up(p.lookup, digits, choice);
    a[1] = look_up(p.lookup, digits >> 16, choice >> 16);
  }
};

// Any number of bits. Of a pair of units, words 0 and 1 are the planes of 4 bits, word 2 that of 2, word 3 that of 1
// bit; all four are bytes where there are 8 bits.
struct AnyBits : Plain<4> {
  static constexpr bool kTable = true;

  GRAPHOPT_DEVICE static void load_block(const Product& p, const uint8_t* block, uint32_t (&words)[4][4]) {
    if (p.bits == 8) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Word4 word = load16_once(block + i * 512);
        GRAPHOPT_UNROLL
        for (int j = 0; j < 4; ++j) words[i][j] = word.words[j];
      }
      return;
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 16; ++i) words[i / 4][i % 4] = 0;
    if (p.bits & 4) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i, block += 512) {
        const Word4 word = load16_once(block);
        GRAPHOPT_UNROLL
        for (int j = 0; j < 4; ++j) words[2 * i + j / 2][j % 2] = word.words[j];
      }
    }
    if (p.bits & 2) {
      const Word4 word = load16_once(block);
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) words[j][2] = word.words[j];
      block += 512;
    }
    if (p.bits & 1) {
      const Word2 word = load8(block - lane() * 8);
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) words[j][3] = word.words[j / 2] >> 8 * (j % 2);
    }
  }
  GRAPHOPT_DEVICE static void reload(const Product& p, const uint8_t* block, int pair, uint32_t (&words)[4][4]) {
    if (pair == 3) load_block(p, block, words);
  }
  GRAPHOPT_DEVICE static void load_pair(const Product& p, const uint8_t* block, unsigned pair, uint32_t (&words)[4]) {
    const unsigned bits = static_cast<unsigned>(p.bits);
    const auto word = [&](unsigned index) { return load_word(block + byte_of_word(bits, 0, index)); };
    if (bits == 8) {
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < 4; ++i) words[i] = word(4 * pair + i);
      return;
    }
    const unsigned twos = bits & 4 ? 8 : 0, ones = twos + (bits & 2 ? 4 : 0);
    words[0] = bits & 4 ? word(2 * pair) : 0;
    words[1] = bits & 4 ? word(2 * pair + 1) : 0;
    words[2] = bits & 2 ? word(twos + pair) : 0;
    words[3] = bits & 1 ? load_word(block - lane() * 8 + byte_of_word(bits, 0, ones + pair / 2)) >> 8 * (pair % 2) : 0;
  }

  // The codes of slots i and i + 4 of unit H, in the halves of a word.
  template <int H>
  GRAPHOPT_DEVICE static uint32_t codes(const Product& p, const uint32_t (&words)[4], int i) {
    if (p.bits == 8) return words[2 * H + i % 2] >> (i < 2 ? 0 : 8) & 0x00ff00ffu;
    const uint32_t fours = words[H] >> 4 * i & 0x000f000fu, twos = words[2] >> (8 * H + 2 * i) & 0x00030003u;
    return fours | twos << (p.bits & 4) | (words[3] >> (4 * H + i) & 0x00010001u) << (p.bits & 6);
  }
  // The table's entries for both of them: the low 16 bits.
  GRAPHOPT_DEVICE static uint32_t look_up(const uint32_t* table, uint32_t codes) {
    return table[codes & 0xff] | table[codes >> 16] << 16;
  }
};
struct AnyTo16Bits : AnyBits {
  static constexpr bool kWide = false;
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t* table, const uint32_t (&words)[4],
                                     uint32_t (&a)[4]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = look_up(table, codes<H>(p, words, i));
  }
};
struct AnyToByte : AnyBits {
  static constexpr bool kWide = false;
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t* table, const uint32_t (&words)[4],
                                     uint32_t (&a)[2]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      a[i] = look_up(table, codes<H>(p, words, i)) | look_up(table, codes<H>(p, words, i + 2)) << 8;
    }
  }
};
// The low and the high byte of 16 bits.
struct AnyToBytes : AnyBits {
  static constexpr bool kWide = true;
  template <int H>
  GRAPHOPT_DEVICE static void decode(const Product& p, const uint32_t* table, const uint32_t (&words)[4],
                                     uint32_t (&a)[2], uint32_t (&high)[2]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t even = look_up(table, codes<H>(p, words, i)), odd = look_up(table, codes<H>(p, words, i + 2));
      a[i] = byte_permute(even, odd, 0x6240);
      high[i] = byte_permute(even, odd, 0x7351);
    }
  }
};

}  // namespace graphopt
