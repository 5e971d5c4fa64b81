// How codes that become integers are multiplied with the words of x.
//
// An operand makes `Values` of the codes of a line, and says how many words belong to a line and how many planes of
// sums there are: sum = plane 0 + 256 * plane 1.
#pragma once

#include "matmul_table/cpu/lookup.h"
#include "matmul_table/cpu/pairs.h"

namespace graphopt {
namespace {

// As bytes: the low one, and the high one of wide tables. Less kByteBias they are signed, which flips a bit.
template <int Bits, bool Wide, bool ByXor, bool Small>
class AsBytes {
 public:
  static constexpr size_t kWords = 1, kPlanes = Wide ? 2 : 1, kSums = 1;
  static constexpr bool kFromZero = false;
  static constexpr bool kPairsFit = Small && !Wide;  // two products of bytes fit 16 bits
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

#if GRAPHOPT_NEON
  explicit AsBytes(const Table& table) : low_(table.low, kByteBias) {
    if constexpr (Wide) high_ = LookUp<Bits>(table.high.table, kByteBias);
  }
#else
  explicit AsBytes(const Table& table) : low_(table.low) {
    if constexpr (Wide) high_ = LookUp<Bits>(table.high.table);
  }
#endif

  struct Values {
    Bytes plane[kPlanes];
  };
  GRAPHOPT_UNCALLED Values operator()(const Bytes& codes) const {
    Values values = {{low_(codes)}};
    if constexpr (Wide) values.plane[1] = high_(codes);
    return values;
  }

  // Puts the values into a block, and returns where those of the next line go.
  static GRAPHOPT_UNCALLED uint8_t* store(const Values& values, uint8_t* to) {
#pragma GCC unroll 2
    for (size_t plane = 0; plane < kPlanes; ++plane) store_line(to + plane * kLine, values.plane[plane]);
    return to + 2 * kLine;
  }

  static GRAPHOPT_UNCALLED Integers multiply(size_t plane, const Integers& sum, const Values& values,
                                           const uint32_t* word, size_t) {
    return plane ? dot<false>(sum, values.plane[plane], *word) : dot<Small>(sum, values.plane[0], *word);
  }

 private:
  struct Nothing {};
  ToByte<Bits, ByXor> low_;
  std::conditional_t<Wide, LookUp<Bits>, Nothing> high_;
};

// Calls with_operand(type) where `type` is a pointer to the operand of these weights.
template <int Bits, typename WithOperand>
void choose_operand(const Table& table, Words form, const WithOperand& with_operand) {
  // where a table is one register, looking up costs no more than the exclusive or
  constexpr bool kXorIsFaster = Bits > (kVectorBytes == kLine ? 6 : kDecodesFloats ? 4 : 0);
  const bool by_xor = kXorIsFaster && table.by_xor;
#if GRAPHOPT_BY_PAIRS && !GRAPHOPT_BYTES_ALONE
  if (form == Words::kPairs) {
    if constexpr (Bits == 6 || Bits == 8) {
      if (table.wide && table.has_signs) {
        return with_operand(static_cast<const AsPairs<Bits, true, false, true>*>(nullptr));
      }
    }
    if (table.wide) return with_operand(static_cast<const AsPairs<Bits, true, false>*>(nullptr));
    // integers of fewer bits are small enough for products of bytes
    if constexpr (Bits == 8) {
      if (by_xor) return with_operand(static_cast<const AsPairs<Bits, false, true>*>(nullptr));
    }
    return with_operand(static_cast<const AsPairs<Bits, false, false>*>(nullptr));
  }
#else
  (void)form;
  if (!kByPairs && table.wide) return with_operand(static_cast<const AsBytes<Bits, true, false, false>*>(nullptr));
#endif
  if (by_xor) return with_operand(static_cast<const AsBytes<Bits, false, kXorIsFaster, kByPairs>*>(nullptr));
  return with_operand(static_cast<const AsBytes<Bits, false, false, kByPairs>*>(nullptr));
}

// The same where codes are looked up as they are multiplied.
template <int Bits, typename WithOperand>
void choose_operand_of_few(const Table& table, Words form, const WithOperand& with_operand) {
#if GRAPHOPT_BY_PAIRS && !GRAPHOPT_BYTES_ALONE
  if constexpr (Bits == 5 || Bits == 6) {
    if (is_minifloat(table, Bits)) {
      if (table.wide) return with_operand(static_cast<const AsMinifloats<Bits, true>*>(nullptr));
      return with_operand(static_cast<const AsMinifloats<Bits, false>*>(nullptr));
    }
  }
  if constexpr (Bits >= 3 && Bits <= 5) {
    if (form == Words::kFours) return with_operand(static_cast<const AsFours<Bits>*>(nullptr));
  }
#endif
  choose_operand<Bits>(table, form, with_operand);
}

}  // namespace
}  // namespace graphopt
