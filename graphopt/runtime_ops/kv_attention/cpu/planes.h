// How codes of few bits lie in the lines of a page: spec/layout.py.
#pragma once

#include <type_traits>

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// Codes that have more bits than a plane of 1, 2 or 4 holds are cut into a lower and an upper plane. A unit is the
// lines of 64 bytes that hold whole bytes of both, for 16 lanes.
template <unsigned Bits>
struct Planes {
  static constexpr unsigned kUpper = Bits == 6 ? 2 : Bits == 3 ? 1 : 0, kLower = Bits - kUpper;
  static constexpr size_t kFours = 8 / (kUpper ? kUpper : kLower);  // of codes in a lane of a unit
  static constexpr size_t kCodes = 4 * kFours;
  static constexpr size_t kLowerLines = kFours * kLower / 8, kLines = kLowerLines + (kUpper ? 1 : 0);
  static constexpr size_t kBytes = kLines * kLine;
  // The line that has the lower bits of four `F`, and where they begin in each byte.
  static constexpr size_t line(size_t four) { return four * kLower / 8; }
  static constexpr unsigned shift(size_t four) { return static_cast<unsigned>(four) * kLower % 8; }
  // By how much the upper bits are to be moved to the right to stand above the lower ones.
  static constexpr int upper_shift(size_t four) {
    return static_cast<int>(four) * static_cast<int>(kUpper) - static_cast<int>(kLower);
  }
  static constexpr unsigned kLowerMask = (1u << kLower) - 1, kUpperMask = ((1u << kUpper) - 1) << kLower;
};

// Calls visit(f) for f from 0 to Count - 1, as numbers that the compiler knows.
template <size_t Count, size_t First = 0, typename Visit>
inline __attribute__((always_inline)) void each_four(const Visit& visit) {
  if constexpr (First < Count) {
    visit(std::integral_constant<size_t, First>());
    each_four<Count, First + 1>(visit);
  }
}

// Sets the code of a lane in units that were zero: number `k` of four `four`.
template <unsigned Bits>
inline void put_code(uint8_t* units, size_t four, size_t lane, size_t k, unsigned code) {
  using Of = Planes<Bits>;
  uint8_t* const unit = units + four / Of::kFours * Of::kBytes + lane * 4 + k;
  const size_t f = four % Of::kFours;
  uint8_t& lower = unit[Of::line(f) * kLine];
  lower = static_cast<uint8_t>(lower | (code & Of::kLowerMask) << Of::shift(f));
  if (!Of::kUpper) return;
  uint8_t& upper = unit[Of::kLowerLines * kLine];
  upper = static_cast<uint8_t>(upper | code >> Of::kLower << f * Of::kUpper);
}

}  // namespace
}  // namespace graphopt
