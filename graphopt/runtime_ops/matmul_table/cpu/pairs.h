// Operands of AVX2, where products of bytes are made by way of numbers of 16 bits; see operands.h.
#pragma once

#include "matmul_table/cpu/lookup.h"

#if GRAPHOPT_BY_PAIRS

namespace graphopt {
namespace {

// As numbers of 16 bits, of both bytes where the table is wide: rows 0 and 2 of a line, and rows 1 and 3. The sums of
// wide tables are those of `AsBytes`, plane 0 + 256 * plane 1, which fits 32 bits.
//
// `Signed`: half of a wide table is looked up, where the uppermost bit of a code is the sign.
template <int Bits, bool Wide, bool ByXor, bool Signed = false>
class AsPairs {
  static constexpr int kLookedUp = Signed ? Bits - 1 : Bits;

 public:
  static constexpr size_t kWords = 2, kPlanes = 1;
  static constexpr bool kPairsFit = false;
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

  explicit AsPairs(const Table& table) : low_(table.low) {
    if constexpr (Wide) high_ = LookUp<kLookedUp>(table.high.table, static_cast<uint8_t>(table.high.offset));
  }

  struct Values {
    Bytes even, odd;
  };
  GRAPHOPT_UNCALLED Values operator()(const Bytes& codes) const {
    const Bytes looked_up = Signed ? masked(codes, (1 << kLookedUp) - 1) : codes, low = low_(looked_up);
    Bytes high = {};
    if constexpr (Wide) high = high_(looked_up);
    Values values;
#pragma GCC unroll 4
    for (size_t i = 0; i < kParts; ++i) {
      const Pairs below = reinterpret_cast<Pairs>(low.part[i]), above = reinterpret_cast<Pairs>(high.part[i]);
      Pairs even = Wide ? with_upper(below, above << 8) : below & 0x00ff;
      Pairs odd = Wide ? with_upper(below >> 8, above) : below >> 8;
      if constexpr (Signed) {
        const Pairs signs = reinterpret_cast<Pairs>(codes.part[i]) << (8 - Bits);
        even = with_sign(even, signs << 8);
        odd = with_sign(odd, signs);
      }
      values.even.part[i] = reinterpret_cast<Bytes::Part>(even);
      values.odd.part[i] = reinterpret_cast<Bytes::Part>(odd);
    }
    return values;
  }

  static GRAPHOPT_UNCALLED uint8_t* store(const Values& values, uint8_t* to) {
    store_line(to, values.even);
    store_line(to + 2 * kLine, values.odd);
    return to + 4 * kLine;
  }

  // `word` is the first word of the line, `width` words before the second.
  static GRAPHOPT_UNCALLED Integers multiply(size_t, const Integers& sum, const Values& values, const uint32_t* word,
                                           size_t width) {
    return dot_pairs(dot_pairs(sum, values.even, word[0]), values.odd, word[width]);
  }

 private:
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  struct Nothing {};

  // a with the sign of b; 0 where b is 0, and so is the code then.
  static GRAPHOPT_UNCALLED Pairs with_sign(Pairs a, Pairs b) {
    return reinterpret_cast<Pairs>(_mm256_sign_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
  }

  // The lower bytes of a, and the upper ones of b.
  static GRAPHOPT_UNCALLED Pairs with_upper(Pairs a, Pairs b) {
    const __m256i upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    return reinterpret_cast<Pairs>(
        _mm256_blendv_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b), upper));
  }

  ToByte<kLookedUp, ByXor> low_;
  std::conditional_t<Wide, LookUp<kLookedUp>, Nothing> high_;
};

// As magnitudes below 2^14 where the uppermost bit of a code is its sign: lower 7 bits + 128 * upper 7 bits. The sign
// goes to x. Two products fit 16 bits: 2 * 127 * 127.
template <int Bits>
class AsMagnitudes {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1;
  static constexpr bool kPairsFit = false;
  static constexpr bool kExact = true;

  explicit AsMagnitudes(const Table& table) {
    uint8_t low[64] = {}, high[64] = {};
    for (size_t code = 0; code < 64; ++code) {
      const int integer = table.low.table[code] + 256 * (table.high.table[code] - table.high.offset);
      low[code] = static_cast<uint8_t>(integer & 127);
      high[code] = static_cast<uint8_t>(integer >> 7);
    }
    low_ = LookUp<Bits - 1>(low);
    high_ = LookUp<Bits - 1>(high);
  }

  struct Values {
    Bytes low, high, signs;
  };
  GRAPHOPT_UNCALLED Values operator()(const Bytes& codes) const {
    const Bytes magnitudes = masked(codes, (1 << (Bits - 1)) - 1);
    return {low_(magnitudes), high_(magnitudes), shift_right<Bits - 8>(codes)};
  }

  static GRAPHOPT_UNCALLED Integers multiply(size_t, const Integers& sum, const Values& values, const uint32_t* word,
                                           size_t) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(*word));
    return by_parts<Integers>([&](size_t i) __attribute__((always_inline)) {
      // 0 where the code is 0, and so is its value
      const __m256i signed_x = _mm256_sign_epi8(x, reinterpret_cast<__m256i>(values.signs.part[i]));
      const auto products = [&](const Bytes& bytes, int16_t factor) __attribute__((always_inline)) {
        const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(bytes.part[i]), signed_x);
        return reinterpret_cast<Integers::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)));
      };
      return sum.part[i] + (products(values.low, 1) + products(values.high, 128));
    });
  }

 private:
  LookUp<Bits - 1> low_, high_;
};

}  // namespace
}  // namespace graphopt

#endif
