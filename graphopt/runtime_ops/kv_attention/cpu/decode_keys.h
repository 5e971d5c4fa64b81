// Codes of keys as the floats that they mean: for sets that have no instructions for products with codes, and for
// latents, whose page is keys and values at once.
#pragma once

#include "abi/convert.h"
#include "kv_attention/cpu/planes.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

// 16 numbers of a line of codes: number `k` of the four in each lane.
template <unsigned Bits>
inline Floats codes_to_floats(const uint8_t* codes, size_t four, size_t k) {
  using Of = Planes<Bits>;
  const size_t f = four % Of::kFours;
  const uint8_t* const unit = codes + four / Of::kFours * Of::kBytes;
  const Integers lower = load_line<Integers>(unit + Of::line(f) * kLine);
  const int byte = static_cast<int>(8 * k), shift = byte + static_cast<int>(Of::shift(f));
  Integers numbers = by_parts<Integers>(
      [&](size_t i) { return lower.part[i] >> shift & static_cast<int>(Of::kLowerMask); });
  if (Of::kUpper) {
    const Integers upper = load_line<Integers>(unit + Of::kLowerLines * kLine);
    numbers = by_parts<Integers>([&](size_t i) {
      const auto bits = upper.part[i] >> (byte + static_cast<int>(f * Of::kUpper));
      return numbers.part[i] | (bits & static_cast<int>(Of::kUpperMask >> Of::kLower)) << Of::kLower;
    });
  }
  return to_floats(numbers);
}

// Calls take(i, number) for each 16 of `count` numbers in a line of codes.
template <unsigned Bits, typename Take>
inline void decode_line(const uint8_t* codes, Ahead& ahead, size_t count, const Take& take) {
  for (size_t i = 0; i < count; ++i) {
    if (i % Planes<Bits>::kCodes == 0) {
      for (size_t line = 0; line < Planes<Bits>::kLines; ++line) ahead.ask();
    }
    take(i, codes_to_floats<Bits>(codes, i / 4, i % 4));
  }
}

// The factors of the keys of a page as floats; null where there are none.
inline const float* load_factors(const Layout& layout, const Half* scales, float (&factors)[kMostPage]) {
  if (!layout.token_factors) return nullptr;
  for (size_t t = 0; t < layout.page; t += kColumns) store_line(factors + t, load_halves(scales + layout.factors_at() + t));
  return factors;
}

// The keys of a page of codes, [page / 16, size, 16].
template <unsigned Bits>
void decode_keys(const uint8_t* codes, Ahead& ahead, const Half* scales, size_t size, size_t page, float* keys) {
  for (size_t i = 0; i < page / kColumns; ++i, codes += size * kColumns * Bits / 8) {
    decode_line<Bits>(codes, ahead, size, [&](size_t c, const Floats& code) {
      store_line(keys + (i * size + c) * kColumns, code * number<float>(scales[size + c]) + all_lanes(number<float>(scales[c])));
    });
  }
}

}  // namespace
}  // namespace graphopt
