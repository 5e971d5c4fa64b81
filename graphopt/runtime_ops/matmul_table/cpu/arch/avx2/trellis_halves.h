// One row of x times a trellis of 2 or 4 bits, the halves of windows summed up apart.
#pragma once

#include "matmul_table/cpu/to_byte.h"

namespace graphopt {
namespace {

// A weight is head[its own half of a window] + tail[that of a column to the right]: both are looked up by one index, which
// is put together once, and the sums of tails move to their columns where a segment ends. Entries of tails are unsigned
// bytes, from the least one on: products of two lines of them fit 16 bits. Those of heads are such bytes with 2 bits,
// where products of one line fit; with 4 they are signed, and the sign of x moves to them.
template <int Bits>
class TrellisHalves {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1, kSums = 3;
  static constexpr bool kFromZero = false, kMultipliesUnits = true;

  static bool fits(const Table& table) {
    const Entries head = entries_of(table.signed_head), tail = entries_of(table.tail);
    // entries are bytes, modulo 256: where no sum of two leaves its range, they are what sums are made of
    return head.least + tail.least >= -127 && head.most + tail.most <= 127 && tail.span() <= kMostOfTail &&
           (kSignedHead ? head.least >= -127 : head.span() <= kMostOfHead);
  }

  explicit TrellisHalves(const Table& table) {
    const int head = kSignedHead ? 0 : entries_of(table.signed_head).least, tail = entries_of(table.tail).least;
    head_ = register_of(table.signed_head, head);
    tail_ = register_of(table.tail, tail);
    offset_ = -head - tail;
  }

  // sums: what they begin with, those of heads, and of tails.
  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][3], const uint8_t* unit,
                                           const uint32_t* word) const {
    static_assert(Width == 1);
    if constexpr (Bits == 4) {
      const Bytes first = load_line<Bytes>(unit), second = load_line<Bytes>(unit + kLine);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        multiply_two(sums[0][0], i, reinterpret_cast<__m256i>(first.part[i]), word[0], word[1]);
        multiply_two(sums[0][0], i, reinterpret_cast<__m256i>(second.part[i]), word[2], word[3]);
      }
    } else {
      const Bytes codes = load_line<Bytes>(unit), next = rotate_columns<1>(codes, unit);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        // a code below its neighbour to the right, of lines 0 and 2, and of 1 and 3
        const __m256i code = reinterpret_cast<__m256i>(codes.part[i]), right = reinterpret_cast<__m256i>(next.part[i]);
        const __m256i swapped =
            _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(code, 2), right), _mm256_set1_epi8(0x33));
        multiply_two(sums[0][0], i, _mm256_xor_si256(code, _mm256_slli_epi16(swapped, 2)), word[0], word[2]);
        multiply_two(sums[0][0], i, _mm256_xor_si256(right, swapped), word[1], word[3]);
      }
    }
  }

  Integers total(const Integers (&sums)[3]) const {
    const Bytes tails = rotate_columns<4 / Bits>(
        by_parts<Bytes>([&](size_t i) { return reinterpret_cast<Bytes::Part>(sums[2].part[i]); }), nullptr);
    return by_parts<Integers>([&](size_t i) __attribute__((always_inline)) {
      // sums begin with -kByteOffset times the sum of x
      const Integers::Part start = sums[0].part[i] * offset_ / kByteOffset;
      return start + sums[1].part[i] + reinterpret_cast<Integers::Part>(tails.part[i]);
    });
  }

 private:
  static_assert(Bits == 2 || Bits == 4);
  static constexpr bool kSignedHead = Bits == 4;
  static constexpr int kByteOffset = 128;
  // 2 * 129 * 127 and 4 * 64 * 127 fit 16 bits.
  static constexpr int kMostOfHead = 129, kMostOfTail = 64, kEntries = 16;

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

  // Entries less `least`; of two codes the first is the lower one here.
  static __m256i register_of(const uint8_t* table, int least) {
    uint8_t bytes[kEntries];
    for (int i = 0; i < kEntries; ++i) {
      bytes[Bits == 2 ? i >> 2 | (i & 3) << 2 : i] = static_cast<uint8_t>(static_cast<int8_t>(table[i]) - least);
    }
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }

  // Two lines, by the lower and the upper nibbles.
  GRAPHOPT_FORCE_INLINE void multiply_two(Integers (&sums)[3], size_t i, __m256i nibbles, uint32_t lower_word,
                                          uint32_t upper_word) const {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    const __m256i indices[2] = {_mm256_and_si256(nibbles, mask), _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask)};
    const uint32_t words[2] = {lower_word, upper_word};
    __m256i tails[2];
#pragma GCC unroll 2
    for (size_t line = 0; line < 2; ++line) {
      const __m256i x = _mm256_set1_epi32(static_cast<int>(words[line]));
      const __m256i head = _mm256_shuffle_epi8(head_, indices[line]);
      tails[line] = _mm256_maddubs_epi16(_mm256_shuffle_epi8(tail_, indices[line]), x);
      add(sums[1].part[i], kSignedHead ? _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(head, x))
                                       : _mm256_maddubs_epi16(head, x));
    }
    add(sums[2].part[i], _mm256_add_epi16(tails[0], tails[1]));
  }

  static GRAPHOPT_FORCE_INLINE void add(Integers::Part& sum, __m256i pairs) {
    sum += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(sum));  // see settle
  }

  __m256i head_, tail_;
  int offset_;
};

}  // namespace
}  // namespace graphopt
