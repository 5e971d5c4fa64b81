// Codes of integers as the floats that they mean, for sets that have no instructions for products with codes.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

constexpr bool kMultiplyCodes = false;

// 16 numbers of a line of codes: number `k` of the four in each lane.
template <bool Narrow>
inline Floats codes_to_floats(const uint8_t* codes, size_t unit, size_t k) {
  const Integers line = load_line<Integers>(codes + (Narrow ? unit / 2 : unit) * kLine);
  const int shift = static_cast<int>(8 * k + (Narrow ? unit % 2 * 4 : 0));
  return to_floats(by_parts<Integers>([&](size_t i) { return line.part[i] >> shift & (Narrow ? 15 : 255); }));
}

// Calls take(i, number) for each 16 of `count` numbers in a line of codes.
template <bool Narrow, typename Take>
inline void decode_line(const uint8_t* codes, Ahead& ahead, size_t count, const Take& take) {
  constexpr size_t kOfUnit = Narrow ? 8 : 4;
  for (size_t i = 0; i < count; i += kOfUnit) {
    ahead.ask();
    for (size_t k = 0; k < kOfUnit; ++k) take(i + k, codes_to_floats<Narrow>(codes, (i + k) / 4, k % 4));
  }
}

// The keys of a page of codes, [page / 16, size, 16].
template <bool Narrow>
void decode_keys(const uint8_t* codes, Ahead& ahead, const float* scales, size_t size, size_t page, float* keys) {
  for (size_t i = 0; i < page / kColumns; ++i, codes += size * kColumns / (Narrow ? 2 : 1)) {
    decode_line<Narrow>(codes, ahead, size, [&](size_t c, const Floats& code) {
      store_line(keys + (i * size + c) * kColumns, code * scales[size + c] + all_lanes(scales[c]));
    });
  }
}

// The values of a page of codes, [page, size].
template <bool Narrow>
void decode_values(const uint8_t* codes, Ahead& ahead, const float* scales, size_t size, size_t page, float* values) {
  for (size_t c = 0; c < size; c += kColumns, codes += page * kColumns / (Narrow ? 2 : 1)) {
    decode_line<Narrow>(codes, ahead, page, [&](size_t t, const Floats& code) {
      store_line(values + t * size + c, code * scales[page + t] + all_lanes(scales[t]));
    });
  }
}

// Reads a page of codes: they become floats first.
template <bool Narrow, typename Reader>
inline void read_codes(const Reader& reader, int64_t logical, bool alike, const uint8_t* keys, const uint8_t* values,
                       const float* scales, Ahead ahead) {
  const size_t size = reader.layout.size, page = reader.layout.page, lines = page / kColumns;
  decode_keys<Narrow>(keys, ahead, scales, size, page, reader.buffers.keys);
  decode_values<Narrow>(values, ahead, scales + 2 * size, size, page, reader.buffers.values);
  const Stretch<float, float> decoded = {reader.buffers.keys, reader.buffers.values, nullptr, nullptr, 0};
  reader.read(logical, alike, lines, page, &decoded);
}

}  // namespace
}  // namespace graphopt
