// Codes of integers as the floats that they mean, for sets that have no instructions for products with codes.
#pragma once

#include "kv_attention/cpu/decode_keys.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/planes.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

constexpr bool kMultiplyCodes = false;

// The values of a page of codes, [page, size].
template <unsigned Bits>
void decode_values(const uint8_t* codes, Ahead& ahead, const Half* scales, size_t size, size_t page, float* values) {
  for (size_t c = 0; c < size; c += kColumns, codes += page * kColumns * Bits / 8) {
    decode_line<Bits>(codes, ahead, page, [&](size_t t, const Floats& code) {
      store_line(values + t * size + c, code * number<float>(scales[page + t]) + all_lanes(number<float>(scales[t])));
    });
  }
}

// Reads a page of codes, of keys that have so many bits: they become floats first.
template <unsigned Bits, typename Reader>
inline void read_codes(const Reader& reader, int64_t logical, bool alike, const uint8_t* keys, const uint8_t* values,
                       const Half* scales, Ahead ahead) {
  const size_t size = reader.layout.size, page = reader.layout.page, lines = page / kColumns;
  decode_keys<Bits>(keys, ahead, scales, size, page, reader.buffers.keys);
  with_codes(reader.layout.value_storage, [&](auto holds) {
    if (reader.samples) return;
    decode_values<bits_of(holds)>(values, ahead, scales + 2 * size, size, page, reader.buffers.values);
  });
  float factors[kMostPage];
  const Stretch<float, float> decoded = {reader.buffers.keys, reader.buffers.values,
                                         load_factors(reader.layout, scales, factors), nullptr, 0};
  reader.read(logical, alike, lines, page, &decoded);
}

}  // namespace
}  // namespace graphopt
