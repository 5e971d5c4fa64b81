// A decoder: codes become the bytes that an integer product multiplies.
#pragma once

#include <type_traits>

#include "matmul_table/cpu/unpack.h"
#include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, lookup.h)

namespace graphopt {
namespace {

// Codes become unsigned bytes by exclusive or where the table is that of an integer format, else by the table. `flip`
// is exclusive-ored into each byte.
template <int Bits, bool ByXor>
class ToByte {
 public:
  static constexpr bool kExact = ByXor ? Bits < 8 : LookUp<Bits>::kExact;

  explicit ToByte(const IntegerPlane& plane, uint8_t flip = 0) : mask_(plane.mask ^ flip) {
    if constexpr (!ByXor) look_up_ = LookUp<Bits>(plane.table, flip);
  }

  GRAPHOPT_FORCE_INLINE Bytes operator()(const Bytes& codes) const {
    if constexpr (ByXor) {
      return by_parts<Bytes>([&](size_t i) { return codes.part[i] ^ (Bytes::Part{} + mask_); });
    } else {
      return look_up_(codes);
    }
  }

 private:
  uint8_t mask_;
  struct Nothing {};
  std::conditional_t<ByXor, Nothing, LookUp<Bits>> look_up_;
};

}  // namespace
}  // namespace graphopt
