// Codes of 8, 6 or 4 bits that stand for scale (code - the middle of all codes), each token with a scale of its own: loaded
// as what the scale is multiplied by.
#pragma once

#include "kv_attention/cpu/numbers.h"
#include "kv_attention/cpu/steps.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, loads.h)

namespace graphopt {

// A byte of 8 bits is a code. Codes of 4 bits are paired line by line: the low bits of 16 bytes are 16 codes, the high
// bits are the 16 that come next. 64 codes of 6 bits are three lines: two with their lower 4 bits, as codes of 4 bits, and
// one with their upper 2 bits, those of the first 16 codes lowest.
template <unsigned Bits>
struct Scaled {
  uint8_t byte;
};

namespace {

template <typename Number>
constexpr bool is_scaled = false;
template <unsigned Bits>
constexpr bool is_scaled<Scaled<Bits>> = true;

template <typename Number>
constexpr unsigned kBitsOf = 0;
template <unsigned Bits>
constexpr unsigned kBitsOf<Scaled<Bits>> = Bits;

template <unsigned Bits>
constexpr float kLargestCode = static_cast<float>((1 << Bits) - 1);

inline Floats load_numbers(const Scaled<8>* from) {
  return to_floats(load_bytes(from)) - all_lanes(kLargestCode<8> / 2);
}
inline Floats load_numbers(const Scaled<8>* from, size_t n) { return load_numbers(from + n); }
inline const Scaled<4>* number_at(const Scaled<4>* from, size_t n) { return from + n / 2; }
inline Floats load_numbers(const Scaled<4>* from, size_t n) {
  const Integers pair = load_bytes(from + n / (2 * kColumns) * kColumns);
  const int shift = n / kColumns % 2 ? 4 : 0;
  const Integers codes = by_parts<Integers>([&](size_t i) { return pair.part[i] >> shift & 15; });
  return to_floats(codes) - all_lanes(kLargestCode<4> / 2);
}

// 64 numbers from number `n` on, a multiple of 32: two pairs of 16, each read once, with shifts that are known.
inline void load_numbers(const Scaled<4>* from, size_t n, Floats (&numbers)[4]) {
  const Scaled<4>* const pairs = from + n / 2;
  const Floats middle = all_lanes(kLargestCode<4> / 2);
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    const Integers pair = load_bytes(pairs + i * kColumns);
    numbers[2 * i] = to_floats(by_parts<Integers>([&](size_t k) { return pair.part[k] & 15; })) - middle;
    numbers[2 * i + 1] = to_floats(by_parts<Integers>([&](size_t k) { return pair.part[k] >> 4; })) - middle;
  }
}

constexpr size_t kSixes = 64, kSixBytes = 48;  // codes of 6 bits that are packed together, and their bytes

inline const Scaled<6>* number_at(const Scaled<6>* from, size_t n) { return from + n / kSixes * kSixBytes; }
inline Floats load_numbers(const Scaled<6>* from, size_t n) {
  const Scaled<6>* const unit = number_at(from, n);
  const size_t group = n % kSixes / kColumns;
  const Integers lower = load_bytes(unit + group / 2 * kColumns), upper = load_bytes(unit + 2 * kColumns);
  const int shift = group % 2 ? 4 : 0, upper_shift = 2 * static_cast<int>(group);
  const Integers codes = by_parts<Integers>(
      [&](size_t i) { return (lower.part[i] >> shift & 15) | (upper.part[i] >> upper_shift & 3) << 4; });
  return to_floats(codes) - all_lanes(kLargestCode<6> / 2);
}

// 64 numbers from number `n` on, a multiple of 64: each line is read once, with shifts that are known.
inline void load_numbers(const Scaled<6>* from, size_t n, Floats (&numbers)[4]) {
  const Scaled<6>* const unit = number_at(from, n);
  const Floats middle = all_lanes(kLargestCode<6> / 2);
  const Integers upper = load_bytes(unit + 2 * kColumns);
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    const Integers pair = load_bytes(unit + i * kColumns);
    const int shift = 4 * static_cast<int>(i);
    numbers[2 * i] = to_floats(by_parts<Integers>([&](size_t k) {
                       return (pair.part[k] & 15) | (upper.part[k] >> shift & 3) << 4;
                     })) - middle;
    numbers[2 * i + 1] = to_floats(by_parts<Integers>([&](size_t k) {
                           return pair.part[k] >> 4 | (upper.part[k] >> (shift + 2) & 3) << 4;
                         })) - middle;
  }
}

// Rounds a token to codes, one in each byte; returns its scale, NaN where a number is not finite.
template <unsigned Bits>
float round_token(const float* token, size_t size, uint8_t* codes) {
  Floats most = all_lanes(0.f), spoiled = most;
  for (size_t c = 0; c < size; c += kColumns) {
    const Floats x = load_line<Floats>(token + c);
    most = larger(magnitude(x), most), spoiled = spoiled + (x - x);
  }
  const float largest = largest_of(most);
  const Steps steps(all_lanes(-largest), all_lanes(largest), all_lanes(sum_of(spoiled)), kLargestCode<Bits>);
  for (size_t c = 0; c < size; c += kColumns) {
    to_codes(load_line<Floats>(token + c), steps.low, steps.inverse, kLargestCode<Bits>, codes + c);
  }
  float lanes[kColumns];
  store_line(lanes, steps.step + (steps.low - steps.low));
  return lanes[0];
}

// The same, with what a channel is rounded by going to those behind it by the weights [size, size]; `rest` has room for
// the token. See round_with_feedback.
template <unsigned Bits>
float round_token(const float* token, size_t size, const float* feedback, float* rest, uint8_t* codes) {
  const float scale = round_token<Bits>(token, size, codes), levels = kLargestCode<Bits>;
  if (!(scale > 0)) return scale;  // codes are 0
  float largest = 0;
  for (size_t c = 0; c < size; ++c) largest = __builtin_fabsf(token[c]) > largest ? __builtin_fabsf(token[c]) : largest;
  const float low = -largest, inverse = levels / (largest + largest);
  __builtin_memcpy(rest, token, size * sizeof *rest);
  for (size_t c = 0; c < size; ++c) {
    const float steps = (rest[c] - low) * inverse, above = steps > 0 ? steps : 0;
    const float code = __builtin_rintf(above < levels ? above : levels), e = rest[c] - (low + scale * code);
    const float error = e - e == 0 ? e : 0;
    codes[c] = static_cast<uint8_t>(code);
    for (size_t i = c / kColumns * kColumns; i < size; i += kColumns) {
      const Floats change = all_lanes(error) * load_line<Floats>(feedback + c * size + i);
      store_line(rest + i, load_line<Floats>(rest + i) - change);
    }
  }
  return scale;
}

// Writes the codes of a token at `offset` of a run: keys [tokens / 16, size, 16], values [tokens, size].
inline void put_codes(const uint8_t* codes, size_t size, size_t offset, bool is_key, Scaled<8>* to) {
  if (!is_key) return static_cast<void>(__builtin_memcpy(to + offset * size, codes, size));
  Scaled<8>* const lane = to + offset / kColumns * size * kColumns + offset % kColumns;
  for (size_t c = 0; c < size; ++c) lane[c * kColumns].byte = codes[c];
}
inline void put_codes(const uint8_t* codes, size_t size, size_t offset, bool is_key, Scaled<6>* to) {
  const auto lower = [&](size_t first, size_t second) {
    return Scaled<6>{static_cast<uint8_t>((codes[first] & 15) | (codes[second] & 15) << 4)};
  };
  const auto upper = [&](size_t first, size_t step) {
    unsigned bits = 0;
    for (size_t i = 0; i < 4; ++i) bits |= static_cast<unsigned>(codes[first + i * step] >> 4) << 2 * i;
    return Scaled<6>{static_cast<uint8_t>(bits)};
  };
  if (is_key) {  // a line is one channel of 16 tokens
    Scaled<6>* unit = to + offset / kColumns * size * kColumns / kSixes * kSixBytes + offset % kColumns;
    for (size_t c = 0; c < size; c += 4, unit += kSixBytes) {
      unit[0] = lower(c, c + 1), unit[kColumns] = lower(c + 2, c + 3), unit[2 * kColumns] = upper(c, 1);
    }
    return;
  }
  Scaled<6>* unit = to + offset * size / kSixes * kSixBytes;
  for (size_t c = 0; c < size; c += kSixes, unit += kSixBytes) {
    for (size_t i = 0; i < kColumns; ++i) {
      unit[i] = lower(c + i, c + kColumns + i);
      unit[kColumns + i] = lower(c + 2 * kColumns + i, c + 3 * kColumns + i);
      unit[2 * kColumns + i] = upper(c + i, kColumns);
    }
  }
}
inline void put_codes(const uint8_t* codes, size_t size, size_t offset, bool is_key, Scaled<4>* to) {
  const auto both = [&](size_t first, size_t second) {
    return Scaled<4>{static_cast<uint8_t>(codes[first] | codes[second] << 4)};
  };
  if (is_key) {
    Scaled<4>* const lane = to + offset / kColumns * (size / 2) * kColumns + offset % kColumns;
    for (size_t c = 0; c < size; c += 2) lane[c / 2 * kColumns] = both(c, c + 1);
    return;
  }
  to += offset * (size / 2);
  for (size_t c = 0; c < size; c += 2 * kColumns) {
    for (size_t i = 0; i < kColumns; ++i) to[c / 2 + i] = both(c + i, c + kColumns + i);
  }
}

}  // namespace
}  // namespace graphopt
