// One row of x times a trellis of 2, 3 or 4 bits, the halves of windows summed up apart.
#pragma once

#include "matmul_table/cpu/to_byte.h"

namespace graphopt {
namespace {

// A weight is head[a half of a window] + tail[the other half, which stands in a column to the right]. Both are looked up
// where their codes are, and the sums of tails move to their columns where a segment ends. Entries are unsigned bytes,
// from the least one on, and so small that the products of two lines of heads, and of four lines of tails, fit 16 bits.
template <int Bits>
class TrellisHalves {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1, kSums = 2;
  static constexpr bool kFromZero = false, kMultipliesUnits = true;

  static bool fits(const Table& table) {
    const Entries head = entries_of(table.signed_head), tail = entries_of(table.tail);
    // entries are bytes, modulo 256: where no sum of two leaves its range, they are what sums are made of
    return head.least + tail.least >= -127 && head.most + tail.most <= 127 && head.span() <= kMostOfHead &&
           tail.span() <= kMostOfTail;
  }

  explicit TrellisHalves(const Table& table)
      : head_(register_of(table.signed_head, false)), tail_(register_of(table.tail, Bits == 3)) {}

  // sums: those of heads on what they begin with, and of tails.
  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][2], const uint8_t* unit,
                                           const uint32_t* word) const {
    static_assert(Width == 1);
    __m256i indices[kParts][2];
    const auto identity = [](__m256i index, size_t, size_t, size_t) __attribute__((always_inline)) { return index; };
    if constexpr (Bits == 4) {
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        indices[i][0] = load(unit + i * kVectorBytes), indices[i][1] = load(unit + kLine + i * kVectorBytes);
      }
      multiply_lines<0, 1, 2, 3>(sums[0][0], indices, identity, word);
    } else if constexpr (Bits == 3) {
      multiply_threes(sums[0][0], unit, word);
    } else {
      const Bytes codes = load_line<Bytes>(unit), next = rotate_columns<1>(codes, unit), right = shift_right<2>(codes);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) put_above(part_of(codes, i), part_of(right, i), part_of(next, i), indices[i]);
      multiply_lines<0, 2, 1, 3>(sums[0][0], indices, identity, word);
    }
  }

  static GRAPHOPT_FORCE_INLINE Integers total(const Integers (&sums)[2]) {
    const Bytes tails = rotate_columns<Bits == 2 ? 2 : 1>(
        by_parts<Bytes>([&](size_t i) { return reinterpret_cast<Bytes::Part>(sums[1].part[i]); }), nullptr);
    return by_parts<Integers>(
        [&](size_t i) { return sums[0].part[i] + reinterpret_cast<Integers::Part>(tails.part[i]); });
  }

 private:
  static_assert(Bits >= 2 && Bits <= 4);
  // 2 * 2 * 64 * 127 and 4 * 2 * 32 * 127 fit 16 bits.
  static constexpr int kMostOfHead = 64, kMostOfTail = 32, kEntries = 16;

  struct Entries {
    int least, most;
    int span() const { return most - least; }
  };
  static Entries entries_of(const uint8_t* table) {
    Entries entries = {127, -128};
    for (int i = 0; i < kEntries; ++i) {
      const int entry = static_cast<int8_t>(table[i]);
      entries.least = entry < entries.least ? entry : entries.least;
      entries.most = entry > entries.most ? entry : entries.most;
    }
    return entries;
  }

  // Entries less the least one; of two codes of 2 bits the first is the lower one here. `swaps`: the upper two bits of an
  // index are the other way round here.
  static __m256i register_of(const uint8_t* table, bool swaps) {
    const int least = entries_of(table).least;
    uint8_t bytes[kEntries];
    for (int i = 0; i < kEntries; ++i) {
      const int swapped = (i & 3) | (i & 4) << 1 | (i & 8) >> 1;
      bytes[Bits == 2 ? i >> 2 | (i & 3) << 2 : swaps ? swapped : i] = static_cast<uint8_t>(static_cast<int8_t>(table[i]) - least);
    }
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }

  static GRAPHOPT_FORCE_INLINE __m256i part_of(const Bytes& bytes, size_t i) {
    return reinterpret_cast<__m256i>(bytes.part[i]);
  }

  // Two bits of each line above two of its codes: of lines 0 and 2, and of 1 and 3. `right`: codes less those of line 0.
  static GRAPHOPT_FORCE_INLINE void put_above(__m256i codes, __m256i right, __m256i above, __m256i (&nibbles)[2]) {
    const __m256i swapped = _mm256_and_si256(_mm256_xor_si256(right, above), _mm256_set1_epi8(0x33));
    nibbles[0] = _mm256_xor_si256(codes, _mm256_slli_epi16(swapped, 2));
    nibbles[1] = _mm256_xor_si256(above, swapped);
  }

  // Four lines of 3 bits. What names a head is a code, h and two bits below it, and n above them, the uppermost bit of the
  // code to the right; what names a tail, where it is looked up, the same with the second bit of that code in place of h.
  GRAPHOPT_FORCE_INLINE void multiply_threes(Integers (&sums)[2], const uint8_t* unit, const uint32_t* word) const {
    // Even bits of this plane are those of the left eight columns, odd ones of the right eight. It is turned by a column;
    // what comes to the end is of the other eight.
    const __m256i high = load(unit + kLine);
    const __m256i turned = _mm256_alignr_epi8(_mm256_permute2x128_si256(high, high, 1), high, 4);
    const __m256i first = _mm256_set1_epi32(word_of(unit));
    __m256i heads[kParts][2], differ[kParts][2];
#pragma GCC unroll 2
    for (size_t i = 0; i < kParts; ++i) {
      const __m256i low = load(unit + i * kVectorBytes), own = i ? _mm256_srli_epi16(high, 1) : high;
      const __m256i next_low = i ? _mm256_blend_epi32(load(unit + kVectorBytes + 4), first, 0x80) : load(unit + 4);
      const __m256i next = _mm256_sllv_epi32(
          turned, i ? _mm256_setr_epi32(0, 0, 0, 0, 0, 0, 0, 1) : _mm256_setr_epi32(1, 1, 1, 1, 1, 1, 1, 0));
      const __m256i evens = _mm256_and_si256(_mm256_xor_si256(own, next), _mm256_set1_epi8(0x55));
      put_above(low, _mm256_srli_epi16(low, 2), _mm256_xor_si256(evens, next), heads[i]);
      // 1 where the bits that stand for each other differ: bits 2 and 6, of lines 0 and 2, and of lines 1 and 3
      const __m256i mixed_bits = _mm256_xor_si256(high, i ? next_low : _mm256_srli_epi16(next_low, 1));
      differ[i][0] = _mm256_and_si256(_mm256_slli_epi16(mixed_bits, i ? 1 : 2), _mm256_set1_epi8(0x44));
      differ[i][1] = _mm256_and_si256(i ? _mm256_srli_epi16(mixed_bits, 1) : mixed_bits, _mm256_set1_epi8(0x44));
    }
    const auto of_tail = [&](__m256i index, size_t i, size_t pair, size_t upper) __attribute__((always_inline)) {
      // a shuffle does not look at bits 4 to 6
      return _mm256_xor_si256(index, upper ? _mm256_srli_epi16(differ[i][pair], 4) : differ[i][pair]);
    };
    multiply_lines<0, 2, 1, 3>(sums, heads, of_tail, word);
  }

  static GRAPHOPT_FORCE_INLINE __m256i load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  static GRAPHOPT_FORCE_INLINE int word_of(const uint8_t* from) {
    int word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
  }

  // Four lines, by the lower and the upper nibbles of two registers for each half of the columns. of_tail(index of a head,
  // half of the columns, register, 1 for the upper nibble): the index of a tail.
  template <size_t First, size_t Second, size_t Third, size_t Fourth, typename OfTail>
  GRAPHOPT_FORCE_INLINE void multiply_lines(Integers (&sums)[2], const __m256i (&indices)[kParts][2],
                                            const OfTail& of_tail, const uint32_t* word) const {
    constexpr size_t kLines[4] = {First, Second, Third, Fourth};
    __m256i of_tails[kParts];
#pragma GCC unroll 2
    for (size_t pair = 0; pair < 2; ++pair) {
      __m256i of_heads[kParts];
#pragma GCC unroll 2
      for (size_t line = 0; line < 2; ++line) {
        const __m256i x = _mm256_set1_epi32(static_cast<int>(word[kLines[2 * pair + line]]));
#pragma GCC unroll 2
        for (size_t i = 0; i < kParts; ++i) {
          const __m256i index = nibble(indices[i][pair], line), other = of_tail(index, i, pair, line);
          const __m256i head = _mm256_maddubs_epi16(_mm256_shuffle_epi8(head_, index), x);
          const __m256i tail = _mm256_maddubs_epi16(_mm256_shuffle_epi8(tail_, other), x);
          of_heads[i] = line ? _mm256_add_epi16(of_heads[i], head) : head;
          of_tails[i] = pair || line ? _mm256_add_epi16(of_tails[i], tail) : tail;
        }
      }
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) add(sums[0].part[i], of_heads[i]);
    }
#pragma GCC unroll 2
    for (size_t i = 0; i < kParts; ++i) add(sums[1].part[i], of_tails[i]);
  }

  static GRAPHOPT_FORCE_INLINE __m256i nibble(__m256i nibbles, size_t upper) {
    return _mm256_and_si256(upper ? _mm256_srli_epi16(nibbles, 4) : nibbles, _mm256_set1_epi8(0x0f));
  }

  static GRAPHOPT_FORCE_INLINE void add(Integers::Part& sum, __m256i pairs) {
    sum += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(sum));  // see settle
  }

  __m256i head_, tail_;
};

}  // namespace
}  // namespace graphopt
