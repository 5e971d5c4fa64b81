// How codes that become integers are multiplied with the words of x.
//
// An operand makes `Values` of the codes of a line, and says how many words belong to a line and how many planes of
// sums there are: sum = plane 0 + 256 * plane 1. One that `kMultipliesUnits` has a loop of its own over a unit.
#pragma once

#include "matmul_table/cpu/to_byte.h"

namespace graphopt {
namespace {

// As bytes: the low one, and the high one of wide tables. Less kByteBias they are signed, which flips a bit.
template <int Bits, bool Wide, bool ByXor, bool Small>
class AsBytes {
 public:
  static constexpr size_t kWords = 1, kPlanes = Wide ? 2 : 1, kSums = 1;
  static constexpr bool kFromZero = false, kMultipliesUnits = false;
  // Where registers hold the sums and the totals of a panel, codes of 4 bits are looked up again sooner than they are
  // read from a block.
  static constexpr bool kHasPanels = Bits == 4 && !Wide && kVectorBytes == kLine;
  static constexpr bool kPairsFit = Small && !Wide;  // two products of bytes fit 16 bits
  static constexpr bool kExact = ToByte<Bits, ByXor>::kExact;

  explicit AsBytes(const Table& table) : low_(table.low, kByteBias) {
    if constexpr (Wide) high_ = LookUp<Bits>(table.high.table, kByteBias);
  }

  struct Values {
    Bytes plane[kPlanes];
  };
  GRAPHOPT_FORCE_INLINE Values operator()(const Bytes& codes) const {
    Values values = {{low_(codes)}};
    if constexpr (Wide) values.plane[1] = high_(codes);
    return values;
  }

  // Puts the values into a block, and returns where those of the next line go.
  static GRAPHOPT_FORCE_INLINE uint8_t* store(const Values& values, uint8_t* to) {
#pragma GCC unroll 2
    for (size_t plane = 0; plane < kPlanes; ++plane) store_line(to + plane * kLine, values.plane[plane]);
    return to + 2 * kLine;
  }

  static GRAPHOPT_FORCE_INLINE Integers multiply(size_t plane, const Integers& sum, const Values& values,
                                                 const uint32_t* word, size_t) {
    return plane ? dot<false>(sum, values.plane[plane], *word) : dot<Small>(sum, values.plane[0], *word);
  }

 private:
  struct Nothing {};
  ToByte<Bits, ByXor> low_;
  std::conditional_t<Wide, LookUp<Bits>, Nothing> high_;
};

// Whether codes become bytes by exclusive or where they can.
template <int Bits>
constexpr bool kXorIsFaster = Bits > kLookUpBits;

// Calls with_operand(type) where `type` is a pointer to the operand of a table whose integers fit a byte.
template <int Bits, typename WithOperand>
void choose_byte_operand(const Table& table, const WithOperand& with_operand) {
  if (kXorIsFaster<Bits> && table.by_xor) {
    return with_operand(static_cast<const AsBytes<Bits, false, kXorIsFaster<Bits>, kByPairs>*>(nullptr));
  }
  return with_operand(static_cast<const AsBytes<Bits, false, false, kByPairs>*>(nullptr));
}

}  // namespace
}  // namespace graphopt
