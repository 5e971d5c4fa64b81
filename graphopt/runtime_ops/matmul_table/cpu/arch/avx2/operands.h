// Operands where products of bytes are made by way of numbers of 16 bits; see byte_operand.h.
#pragma once

#include "matmul_table/cpu/byte_operand.h"
#include "matmul_table/cpu/arch/avx2/forms.h"

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
  static constexpr size_t kWords = 2, kPlanes = 1, kSums = 1;
  static constexpr bool kPairsFit = false, kFromZero = false, kMultipliesUnits = false, kHasPanels = false;
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

  explicit AsPairs(const Table& table) : low_(table.low) {
    if constexpr (Wide) high_ = LookUp<kLookedUp>(table.high.table, static_cast<uint8_t>(table.high.offset));
  }

  struct Values {
    Bytes even, odd;
  };
  GRAPHOPT_FORCE_INLINE Values operator()(const Bytes& codes) const {
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

  static GRAPHOPT_FORCE_INLINE uint8_t* store(const Values& values, uint8_t* to) {
    store_line(to, values.even);
    store_line(to + 2 * kLine, values.odd);
    return to + 4 * kLine;
  }

  // `word` is the first word of the line, `width` words before the second.
  static GRAPHOPT_FORCE_INLINE Integers multiply(size_t, const Integers& sum, const Values& values,
                                                 const uint32_t* word, size_t width) {
    return dot_pairs(dot_pairs(sum, values.even, word[0]), values.odd, word[width]);
  }

 private:
  typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
  struct Nothing {};

  // a with the sign of b; 0 where b is 0, and so is the code then.
  static GRAPHOPT_FORCE_INLINE Pairs with_sign(Pairs a, Pairs b) {
    return reinterpret_cast<Pairs>(_mm256_sign_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
  }

  // The lower bytes of a, and the upper ones of b.
  static GRAPHOPT_FORCE_INLINE Pairs with_upper(Pairs a, Pairs b) {
    const __m256i upper = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    return reinterpret_cast<Pairs>(
        _mm256_blendv_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b), upper));
  }

  ToByte<kLookedUp, ByXor> low_;
  std::conditional_t<Wide, LookUp<kLookedUp>, Nothing> high_;
};

// Wide tables, four numbers of 16 bits after one another: those of two columns in the lower sums, of the next two in
// the upper ones. Two instructions put both bytes of each number together, where `AsPairs` takes four.
template <int Bits>
class AsFours {
 public:
  static constexpr size_t kWords = 2, kPlanes = 1, kSums = 2;
  static constexpr bool kPairsFit = false, kFromZero = true, kMultipliesUnits = true, kHasPanels = false;
  static constexpr bool kExact = LookUp<Bits>::kExact;

  explicit AsFours(const Table& table)
      : low_(table.low.table, 0), high_(table.high.table, static_cast<uint8_t>(table.high.offset)) {}

  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][2], const uint8_t* unit,
                                           const uint32_t* word) const {
    for_each_line([&](auto j) __attribute__((always_inline)) {
      constexpr size_t J = decltype(j)::value;
      const Bytes codes = codes_of_line<Bits, kExact, J>(unit), low = low_(codes), high = high_(codes);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        const __m256i below = reinterpret_cast<__m256i>(low.part[i]), above = reinterpret_cast<__m256i>(high.part[i]);
        const __m256i numbers[2] = {_mm256_unpacklo_epi8(below, above), _mm256_unpackhi_epi8(below, above)};
#pragma GCC unroll 2
        for (size_t row = 0; row < Width; ++row) {
          int64_t four;
          __builtin_memcpy(&four, word + (J * Width + row) * 2, sizeof four);
          const __m256i x = _mm256_set1_epi64x(four);
#pragma GCC unroll 2
          for (size_t half = 0; half < 2; ++half) {
            Integers::Part& sum = sums[0][row][half].part[i];
            sum += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(numbers[half], x));
            asm("" : "+x"(sum));  // see settle
          }
        }
      }
    });
  }

  static GRAPHOPT_FORCE_INLINE Integers total(const Integers (&sums)[2]) {
    return by_parts<Integers>([&](size_t i) __attribute__((always_inline)) {
      return reinterpret_cast<Integers::Part>(_mm256_hadd_epi32(reinterpret_cast<__m256i>(sums[0].part[i]),
                                                                reinterpret_cast<__m256i>(sums[1].part[i])));
    });
  }

 private:
  LookUp<Bits> low_, high_;
};

// Formats of 5 or 6 bits whose uppermost bit is the sign, as magnitudes; the sign goes to x, whose number becomes 0
// where the code is 0, and so is its value.
//
// `Wide`: the upper half of the magnitudes is multiplied apart from the lower one, less a factor that all of it has.
// What is multiplied is so small that the products of a unit, or of two lines of it, are summed up in 16 bits.
template <int Bits, bool Wide>
class AsMinifloats {
  static constexpr int kMagnitudes = 1 << (Bits - 1), kHalf = kMagnitudes / 2;

 public:
  static constexpr size_t kWords = 1, kPlanes = 1, kSums = 1;
  static constexpr bool kPairsFit = false, kFromZero = true, kExact = true;
  static constexpr bool kMultipliesUnits = true, kHasPanels = false;

  explicit AsMinifloats(const Table& table) : factor_(_mm256_set1_epi16(static_cast<int16_t>(table.upper_factor))) {
    // Of 5 bits both halves are looked up with the same index; of 6 each has a register to itself.
    uint8_t lower[16] = {}, upper[16] = {};
    for (int code = 0; code < kMagnitudes; ++code) {
      const bool is_upper = code >= kHalf;
      const int integer = table.integer_of(code) / (Wide && is_upper ? table.upper_factor : 1);
      (is_upper ? upper : lower)[code % 16] = static_cast<uint8_t>(integer);
    }
    lower_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lower)));
    upper_ = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
  }

  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][1], const uint8_t* unit,
                                           const uint32_t* word) const {
    __m256i of_lower[Width][kParts], of_upper[Width][kParts];
    for_each_line([&](auto j) __attribute__((always_inline)) {
      constexpr size_t J = decltype(j)::value;
      const Bytes codes = codes_of_line<Bits, kExact, J>(unit);
#pragma GCC unroll 2
      for (size_t i = 0; i < kParts; ++i) {
        const __m256i code = reinterpret_cast<__m256i>(codes.part[i]), signs = _mm256_slli_epi16(code, 8 - Bits);
        const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi8(kMagnitudes - 1));
        __m256i of_lower_half = magnitude, of_upper_half = magnitude;
        if constexpr (Bits == 6) {  // an index of 128 or more finds 0
          of_lower_half = _mm256_add_epi8(magnitude, _mm256_set1_epi8(112));
          of_upper_half = _mm256_sub_epi8(magnitude, _mm256_set1_epi8(16));
        }
        const __m256i lower = _mm256_shuffle_epi8(lower_, of_lower_half);
        const __m256i upper = _mm256_shuffle_epi8(upper_, of_upper_half);
#pragma GCC unroll 2
        for (size_t row = 0; row < Width; ++row) {
          const __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(static_cast<int>(word[J * Width + row])), signs);
          Integers::Part& sum = sums[0][row][0].part[i];
          if constexpr (Wide) {
            add<J == 0>(of_lower[row][i], _mm256_maddubs_epi16(lower, x));
            add<J % 2 == 0>(of_upper[row][i], _mm256_maddubs_epi16(upper, x));
            if constexpr (J == 3) add_run(sum, of_lower[row][i], _mm256_set1_epi16(1));
            if constexpr (J % 2 == 1) add_run(sum, of_upper[row][i], factor_);
          } else {
            add<J % 2 == 0>(of_lower[row][i], _mm256_maddubs_epi16(_mm256_or_si256(lower, upper), x));
            if constexpr (J % 2 == 1) add_run(sum, of_lower[row][i], _mm256_set1_epi16(1));
          }
        }
      }
    });
  }

 private:
  template <bool First>
  static GRAPHOPT_FORCE_INLINE void add(__m256i& run, __m256i products) {
    run = First ? products : _mm256_add_epi16(run, products);
    asm("" : "+x"(run));  // see settle
  }

  static GRAPHOPT_FORCE_INLINE void add_run(Integers::Part& sum, __m256i run, __m256i factor) {
    sum += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(run, factor));
    asm("" : "+x"(sum));
  }

  __m256i lower_, upper_, factor_;
};


// Bytes of 32 at most: the sums of a unit have 16 bits, see Int8Runs, so those of six rows fit registers. Of 16 at most
// the sums of two units have, see has_groups_of_runs.
template <int Bits, typename Operand>
class AsRuns : public Operand {
 public:
  static constexpr bool kMultipliesUnits = true, kHasPanels = true;
  static constexpr size_t kUnitsOfRun = Bits == 4 ? kRowsOfRun / 16 : 1;
  static bool sums_groups(const Weights& weights) { return has_groups_of_runs(weights); }

  using Operand::Operand;

  template <size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_unit(Integers (&sums)[1][Width][1], const uint8_t* unit,
                                           const uint32_t* word) const {
    multiply_units<1>(sums, unit, word);
  }

  template <size_t Units, size_t Width>
  GRAPHOPT_FORCE_INLINE void multiply_units(Integers (&sums)[1][Width][1], const uint8_t* unit,
                                            const uint32_t* word) const {
    __m256i runs[Width][2];  // not lines: the compiler would copy them through memory
#pragma GCC unroll 2
    for (size_t of_run = 0; of_run < Units; ++of_run, unit += 32 * Bits, word += kUnitLines * Width) {
      for_each_line([&](auto j) __attribute__((always_inline)) {
        constexpr size_t J = decltype(j)::value;
        const Bytes values = (*this)(codes_of_line<Bits, AsRuns::kExact, J>(unit)).plane[0];
        const __m256i left = reinterpret_cast<__m256i>(values.part[0]), right = reinterpret_cast<__m256i>(values.part[1]);
#pragma GCC unroll 8
        for (size_t row = 0; row < Width; ++row) {
          const __m256i x = _mm256_set1_epi32(static_cast<int>(word[J * Width + row]));
          __m256i of_left = _mm256_maddubs_epi16(left, x), of_right = _mm256_maddubs_epi16(right, x);
          if (J > 0 || of_run > 0) {
            of_left = _mm256_add_epi16(runs[row][0], of_left), of_right = _mm256_add_epi16(runs[row][1], of_right);
          }
          asm("" : "+x"(of_left), "+x"(of_right));  // see settle
          runs[row][0] = of_left, runs[row][1] = of_right;
        }
      });
    }
    const int16_t* const ones = ones_near();
#pragma GCC unroll 8
    for (size_t row = 0; row < Width; ++row) {
      Integers& sum = sums[0][row][0];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const __m256i one = _mm256_load_si256(reinterpret_cast<const __m256i*>(ones));
        sum.part[i] += reinterpret_cast<Integers::Part>(_mm256_madd_epi16(runs[row][i], one));
      }
    }
  }
};

// Calls with_operand(type) where `type` is a pointer to the operand of these weights.
template <int Bits, typename WithOperand>
void choose_operand(const Weights& weights, Words form, const WithOperand& with_operand) {
  if (form == Words::kPairs) {
    if constexpr (Bits == 6 || Bits == 8) {
      if (weights.table.wide && weights.table.has_signs) {
        return with_operand(static_cast<const AsPairs<Bits, true, false, true>*>(nullptr));
      }
    }
    if (weights.table.wide) return with_operand(static_cast<const AsPairs<Bits, true, false>*>(nullptr));
    // integers of fewer bits are small enough for products of bytes
    if constexpr (Bits == 8) {
      const auto* const by_xor = static_cast<const AsPairs<Bits, false, true>*>(nullptr);
      if (kXorIsFaster<Bits> && weights.table.by_xor) return with_operand(by_xor);
    }
    return with_operand(static_cast<const AsPairs<Bits, false, false>*>(nullptr));
  }
  choose_byte_operand<Bits>(weights.table, with_operand);
}

// The same where codes are looked up as they are multiplied.
template <int Bits, typename WithOperand>
void choose_operand_of_small_m(const Weights& weights, Words form, const WithOperand& with_operand) {
  if constexpr (Bits == 5 || Bits == 6) {
    if (is_minifloat(weights.table, Bits)) {
      if (weights.table.wide) return with_operand(static_cast<const AsMinifloats<Bits, true>*>(nullptr));
      return with_operand(static_cast<const AsMinifloats<Bits, false>*>(nullptr));
    }
  }
  if constexpr (Bits >= 3 && Bits <= 5) {
    if (form == Words::kFours) return with_operand(static_cast<const AsFours<Bits>*>(nullptr));
  }
  choose_operand<Bits>(weights, form, [&](auto* null) {
    using Operand = std::remove_const_t<std::remove_pointer_t<decltype(null)>>;
    if constexpr (kSumsRuns<Bits> && Operand::kPairsFit) {
      if (sums_runs(weights)) return with_operand(static_cast<const AsRuns<Bits, Operand>*>(nullptr));
    }
    with_operand(null);
  });
}

}  // namespace
}  // namespace graphopt
