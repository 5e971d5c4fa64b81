// How codes that become integers are multiplied with the words of x.
//
// An operand makes `Values` of the codes of a line, and says how many words belong to a line and how many planes of sums
// there are: sum = plane 0 + 256 * plane 1.
#pragma once

#include "matmul_table/cpu/lookup.h"

namespace graphopt {
namespace {

// As unsigned bytes: the low one, and the high one of wide tables.
template <int Bits, bool Wide, bool ByXor, bool Small>
class AsBytes {
 public:
  static constexpr size_t kWords = 1, kPlanes = Wide ? 2 : 1;
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

  explicit AsBytes(const Table& table) : low_(table.low) {
    if constexpr (Wide) high_ = LookUp<Bits>(table.high.table);
  }

  struct Values {
    Bytes plane[kPlanes];
  };
  GRAPHOPT_INLINE Values operator()(const Bytes& codes) const {
    Values values = {{low_(codes)}};
    if constexpr (Wide) values.plane[1] = high_(codes);
    return values;
  }

  // Puts the values into a block, and returns where those of the next line go.
  static GRAPHOPT_INLINE uint8_t* store(const Values& values, uint8_t* to) {
#pragma GCC unroll 2
    for (size_t plane = 0; plane < kPlanes; ++plane) store_line(to + plane * kLine, values.plane[plane]);
    return to + 2 * kLine;
  }

  static GRAPHOPT_INLINE Integers multiply(size_t plane, const Integers& sum, const Values& values, const uint32_t* word, size_t) {
    return plane ? dot<false>(sum, values.plane[plane], *word) : dot<Small>(sum, values.plane[0], *word);
  }

 private:
  struct Nothing {};
  ToByte<Bits, ByXor> low_;
  std::conditional_t<Wide, LookUp<Bits>, Nothing> high_;
};

// As numbers of 16 bits, of both bytes where the table is wide: rows 0 and 2 of a line, and rows 1 and 3. The sums of
// wide tables are those of `AsBytes`, plane 0 + 256 * plane 1, which fits 32 bits.
//
// `Signed`: half of a wide table is looked up, where the uppermost bit of a code is the sign.
template <int Bits, bool Wide, bool ByXor, bool Signed = false>
class AsPairs {
  static constexpr int kLookedUp = Signed ? Bits - 1 : Bits;

 public:
  static constexpr size_t kWords = 2, kPlanes = 1;
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

  explicit AsPairs(const Table& table) : low_(table.low) {
    if constexpr (Wide) high_ = LookUp<kLookedUp>(table.high.table, static_cast<uint8_t>(table.high.offset));
  }

  struct Values {
    Bytes even, odd;
  };
  GRAPHOPT_INLINE Values operator()(const Bytes& codes) const {
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

  static GRAPHOPT_INLINE uint8_t* store(const Values& values, uint8_t* to) {
    store_line(to, values.even);
    store_line(to + 2 * kLine, values.odd);
    return to + 4 * kLine;
  }

  // `word` is the first word of the line, `width` words before the second.
  static GRAPHOPT_INLINE Integers multiply(size_t, const Integers& sum, const Values& values, const uint32_t* word, size_t width) {
    return dot_pairs(dot_pairs(sum, values.even, word[0]), values.odd, word[width]);
  }

 private:
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  struct Nothing {};

  // a with the sign of b; 0 where b is 0, and so is the code then.
  static GRAPHOPT_INLINE Pairs with_sign(Pairs a, Pairs b) {
#if defined(__AVX2__)
    return reinterpret_cast<Pairs>(_mm256_sign_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    return (b >> 15) ? -a : a;
#endif
  }

  // The lower bytes of a, and the upper ones of b.
  static GRAPHOPT_INLINE Pairs with_upper(Pairs a, Pairs b) {
#if defined(__AVX2__)
    const __m256i upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    return reinterpret_cast<Pairs>(
        _mm256_blendv_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b), upper));
#else
    return (a & 0x00ff) | (b & 0xff00);
#endif
  }

  ToByte<kLookedUp, ByXor> low_;
  std::conditional_t<Wide, LookUp<kLookedUp>, Nothing> high_;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// As magnitudes below 2^14 where the uppermost bit of a code is its sign: 7 bits, and 128 times 7 bits. The sign goes to
// x. Two products fit 16 bits: 2 * 127 * 127.
template <int Bits>
class AsMagnitudes {
 public:
  static constexpr size_t kWords = 1, kPlanes = 1;
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
  GRAPHOPT_INLINE Values operator()(const Bytes& codes) const {
    const Bytes magnitudes = masked(codes, (1 << (Bits - 1)) - 1);
    return {low_(magnitudes), high_(magnitudes), shift_right<Bits - 8>(codes)};
  }

  static GRAPHOPT_INLINE Integers multiply(size_t, const Integers& sum, const Values& values, const uint32_t* word,
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
#endif

// Calls with_operand(type) where `type` is a pointer to the operand of these weights.
template <int Bits, typename WithOperand>
void choose_operand(const Table& table, Words form, const WithOperand& with_operand) {
  // where a table is one register, looking up costs no more than the exclusive or
  constexpr bool kXorIsFaster = !(kVectorBytes == kLine && Bits <= 6);
  const bool by_xor = kXorIsFaster && table.by_xor;
  if constexpr (kByPairs) {
    if (form == Words::kPairs) {
      if constexpr (Bits == 6 || Bits == 8) {
        if (table.wide && table.has_signs) {
          return with_operand(static_cast<const AsPairs<Bits, true, false, true>*>(nullptr));
        }
      }
      if (table.wide) return with_operand(static_cast<const AsPairs<Bits, true, false>*>(nullptr));
      if (by_xor) return with_operand(static_cast<const AsPairs<Bits, false, kXorIsFaster>*>(nullptr));
      return with_operand(static_cast<const AsPairs<Bits, false, false>*>(nullptr));
    }
  } else {
    (void)form;
    if (table.wide) return with_operand(static_cast<const AsBytes<Bits, true, false, false>*>(nullptr));
  }
  if (by_xor) return with_operand(static_cast<const AsBytes<Bits, false, kXorIsFaster, kByPairs>*>(nullptr));
  return with_operand(static_cast<const AsBytes<Bits, false, false, kByPairs>*>(nullptr));
}

// The same with what only few rows of x are multiplied by, bytes of a wide table.
template <int Bits, typename WithOperand>
void choose_operand_of_few(const Table& table, Words form, const WithOperand& with_operand) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (Bits == 5 || Bits == 6) {
    if (table.wide && form == Words::kBytes) return with_operand(static_cast<const AsMagnitudes<Bits>*>(nullptr));
  }
#endif
  choose_operand<Bits>(table, form, with_operand);
}

}  // namespace
}  // namespace graphopt
