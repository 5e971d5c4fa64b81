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
      : head_(register_of(table.signed_head)), tail_(register_of(table.tail)) {}

  // sums: those of heads on what they begin with, and of tails.
  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][2], const uint8_t* unit,
                                           const uint32_t* word) const {
    static_assert(Width == 1);
    if constexpr (Bits == 4) {
      const Bytes first = load_line<Bytes>(unit), second = load_line<Bytes>(unit + kLine);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        const __m256i codes[2] = {part_of(first, i), part_of(second, i)};
        multiply_lines<0, 1, 2, 3>(sums[0][0], i, codes, codes, word);
      }
    } else if constexpr (Bits == 3) {
      // two bits of a code below two of neighbours: heads take both uppermost bits, tails two of the right one
      const Bytes low = load_line<Bytes>(unit), high = spread_single_bits(unit + kLine);
      const Bytes next_low = rotate_columns<1>(low, unit), next_high = rotate_columns<1>(high, nullptr);
      const Bytes of_head = select(high, shift_right<-1>(next_high), 0x55), of_tail = select(next_high, next_low, 0x55);
      const Bytes right = shift_right<2>(low);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        __m256i heads[2], tails[2];
        put_above(part_of(low, i), part_of(right, i), part_of(of_head, i), heads);
        put_above(part_of(low, i), part_of(right, i), part_of(of_tail, i), tails);
        multiply_lines<0, 2, 1, 3>(sums[0][0], i, heads, tails, word);
      }
    } else {
      const Bytes codes = load_line<Bytes>(unit), next = rotate_columns<1>(codes, unit), right = shift_right<2>(codes);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        __m256i indices[2];
        put_above(part_of(codes, i), part_of(right, i), part_of(next, i), indices);
        multiply_lines<0, 2, 1, 3>(sums[0][0], i, indices, indices, word);
      }
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

  // Entries less the least one; of two codes of 2 bits the first is the lower one here.
  static __m256i register_of(const uint8_t* table) {
    const int least = entries_of(table).least;
    uint8_t bytes[kEntries];
    for (int i = 0; i < kEntries; ++i) {
      bytes[Bits == 2 ? i >> 2 | (i & 3) << 2 : i] = static_cast<uint8_t>(static_cast<int8_t>(table[i]) - least);
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

  // Four lines, by the lower and the upper nibbles of two registers.
  template <size_t First, size_t Second, size_t Third, size_t Fourth>
  GRAPHOPT_FORCE_INLINE void multiply_lines(Integers (&sums)[2], size_t i, const __m256i (&heads)[2],
                                            const __m256i (&tails)[2], const uint32_t* word) const {
    constexpr size_t kLines[4] = {First, Second, Third, Fourth};
    __m256i of_tails;
#pragma GCC unroll 2
    for (size_t pair = 0; pair < 2; ++pair) {
      __m256i of_heads;
#pragma GCC unroll 2
      for (size_t line = 0; line < 2; ++line) {
        const __m256i x = _mm256_set1_epi32(static_cast<int>(word[kLines[2 * pair + line]]));
        const __m256i head = _mm256_maddubs_epi16(_mm256_shuffle_epi8(head_, nibble(heads[pair], line)), x);
        const __m256i tail = _mm256_maddubs_epi16(_mm256_shuffle_epi8(tail_, nibble(tails[pair], line)), x);
        of_heads = line ? _mm256_add_epi16(of_heads, head) : head;
        of_tails = pair || line ? _mm256_add_epi16(of_tails, tail) : tail;
      }
      add(sums[0].part[i], of_heads);
    }
    add(sums[1].part[i], of_tails);
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
