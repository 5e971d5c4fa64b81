#include "matmul_table/shared/weights.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "abi/convert.h"

namespace graphopt {
namespace {

// The largest power of two that all values are multiples of; 1 where all are 0.
double step_of(const float* values, size_t entries) {
  int lowest = 1024;
  for (size_t i = 0; i < entries; ++i) {
    int exponent = 0;
    double fraction = std::frexp(static_cast<double>(values[i]), &exponent);
    if (fraction == 0) continue;
    while (fraction != std::trunc(fraction)) {
      fraction *= 2;
      --exponent;
    }
    if (exponent < lowest) lowest = exponent;
  }
  return lowest == 1024 ? 1 : std::ldexp(1, lowest);
}

uint16_t bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The half of a window that a kernel's index stands for. With 3 bits an index has the code's own two lower bits first,
// then those of two neighbours that belong to the half; with any other number it is the half.
size_t half_of(size_t index, int half, int bits) {
  if (bits != 3) return index;
  const auto bit = [&](int position) { return index >> position & 1; };
  if (!half) return (index & 7) << 1 | bit(3);
  return (index & 3) << 2 | bit(2) << 1 | bit(3);
}

}  // namespace

int Table::integer_of(size_t code) const {
  return low.table[code] - low.offset + (wide ? 256 * (high.table[code] - high.offset) : 0);
}

void Table::make(const float* values, size_t entries, int bits) {
  double largest = 0, least = values[0], greatest = values[0];
  for (size_t i = 0; i < entries; ++i) {
    if (std::fabs(values[i]) > largest) largest = std::fabs(values[i]);
    if (values[i] < least) least = values[i];
    if (values[i] > greatest) greatest = values[i];
  }
  constexpr double kLargest = 32767;
  step = step_of(values, entries);
  wide = (greatest - least) / step > 255 || std::fabs(least) / step > kLargest || greatest / step > kLargest;
  if (largest / step > kLargest) step = largest / kLargest;
  low.offset = wide ? 0 : -static_cast<int>(least / step);
  high.offset = 128;
  const size_t size = size_t{1} << bits;
  for (size_t i = 0; i < 256; ++i) {
    const size_t code = i % size;
    const float value = code < entries ? values[code] : values[0];
    uint32_t as_float;
    std::memcpy(&as_float, &value, sizeof as_float);
    for (int k = 0; k < 4; ++k) floats[k][i] = static_cast<uint8_t>(as_float >> 8 * k);
    for (int k = 0; k < 2; ++k) bfloat16s[k][i] = static_cast<uint8_t>(bfloat16(value) >> 8 * k);
    const int integer = static_cast<int>(std::nearbyint(value / step));
    low.table[i] = static_cast<uint8_t>(wide ? integer & 255 : integer + low.offset);
    high.table[i] = static_cast<uint8_t>((integer >> 8) + high.offset);
  }
  low.mask = low.table[0];
  by_xor = !wide;
  holds_signed_bytes = holds_unsigned_bytes = !wide && step >= 0x1p-16 && step <= 0x1p16;
  holds_bfloat16s = true;
  most = wide ? 255 : 0;
  has_signs = integer_of(0) == 0;
  floats_have_signs = true;
  for (size_t code = 0; code < size / 2; ++code) {
    const int integer = integer_of(code);
    has_signs = has_signs && integer >= 0 && integer_of(code + size / 2) == -integer;
    floats_have_signs = floats_have_signs && !(floats[3][code] >> 7) && floats[0][code] == floats[0][code + size / 2] &&
                        floats[1][code] == floats[1][code + size / 2] &&
                        floats[2][code] == floats[2][code + size / 2] &&
                        (floats[3][code] ^ 0x80) == floats[3][code + size / 2];
  }
  if (has_signs) upper_factor = factor_of_upper(size / 2);
  for (size_t code = 0; code < size; ++code) {
    by_xor = by_xor && low.table[code] == (code ^ low.mask);
    if (!wide && low.table[code] > most) most = low.table[code];
    const int integer = integer_of(code);
    largest_integer = std::max(largest_integer, std::abs(integer));
    holds_signed_bytes = holds_signed_bytes && integer >= -128 && integer <= 127;
    holds_unsigned_bytes = holds_unsigned_bytes && integer >= 0;
    holds_bfloat16s = holds_bfloat16s && !floats[0][code] && !floats[1][code];
  }
}

bool Table::make_trellis(const float* values, size_t entries, int bits) {
  constexpr double kLargest = 127;
  is_trellis = true;
  step = step_of(values, 2 * entries);
  double least[2] = {values[0], values[entries]}, greatest[2] = {values[0], values[entries]};
  for (size_t i = 0; i < 2 * entries; ++i) {
    const size_t half = i / entries;
    if (values[i] < least[half]) least[half] = values[i];
    if (values[i] > greatest[half]) greatest[half] = values[i];
    if (std::fabs(values[i]) / step > 32767) return false;
  }
  const bool fits = least[0] + least[1] >= -kLargest * step && greatest[0] + greatest[1] <= kLargest * step;
  if (!fits || step < 0x1p-16 || step > 0x1p16) return false;
  const int least_sum = static_cast<int>((least[0] + least[1]) / step);
  most = static_cast<int>((greatest[0] + greatest[1]) / step) - least_sum;
  low.offset = fits_pairs() ? -least_sum : 128;
  // either table may reach further than their sums, by what the other takes off: bytes are sums modulo 256
  const auto byte_of = [&](float value) { return static_cast<uint8_t>(std::llrint(static_cast<double>(value) / step)); };
  for (size_t i = 0; i < 64; ++i) {
    signed_head[i] = byte_of(values[half_of(i % entries, 0, bits)]);
    head[i] = static_cast<uint8_t>(signed_head[i] + low.offset);
    tail[i] = byte_of(values[entries + half_of(i % entries, 1, bits)]);
  }
  return true;
}

int Table::factor_of_upper(size_t magnitudes) const {
  int sum = 0;
  for (size_t code = magnitudes / 2; code < magnitudes; ++code) sum |= integer_of(code);
  return sum ? sum & -sum : 1;
}

float Leveled::number(size_t tile, size_t group, size_t lane, int span_bits, float low) const {
  const uint8_t* const of_tile = bytes + tile * tile_bytes;
  const uint8_t* const unit = of_tile + group / 16 * 32 * static_cast<size_t>(bits);
  const size_t row = group % 16, position = 64 * (row / 4) + 4 * lane + row % 4;
  int code = unit[position];
  if (bits < 8) {
    code = unit[position / 128 * 64 + position % 64] >> position % 128 / 64 * 4 & 15;
    if (bits == 6) code |= (unit[128 + position % 64] >> position / 64 * 2 & 3) << 4;
  }
  Half step;
  std::memcpy(&step, of_tile + first_step + 2 * (16 * (group >> span_bits) + lane), sizeof step);
  return (static_cast<float>(code) + low) * graphopt::number<float>(step);
}

void unpack_digits(const uint8_t* digits, size_t units, uint8_t* codes) {
  constexpr size_t kBytes = Weights::kDigitBytes, kDigits = 5, kLine = 64;
  for (; units; --units, digits += kBytes, codes += kLine) {
    uint8_t positions[kDigits * kBytes];
    for (size_t b = 0; b < kBytes; ++b) {
      unsigned byte = digits[b];
      for (size_t i = 0; i < kDigits; ++i) {
        const unsigned third = byte * 171 >> 9;  // left / 3, up to 255
        positions[kBytes * i + b] = static_cast<uint8_t>(byte - 3 * third);
        byte = third;
      }
    }
    for (size_t b = 0; b < kLine; ++b) {
      codes[b] = static_cast<uint8_t>(positions[b] | positions[b + kLine] << 2 | positions[b + 2 * kLine] << 4 |
                                      positions[b + 3 * kLine] << 6);
    }
  }
}

int digit(const uint8_t* unit, size_t position) {
  constexpr int kPowers[] = {1, 3, 9, 27, 81};
  return unit[position % Weights::kDigitBytes] / kPowers[position / Weights::kDigitBytes] % 3;
}

size_t Weights::segments() const {
  const size_t of_group = segments_of_group(), before = groups() - 1;
  return before * of_group + (rows - before * group + kSegment - 1) / kSegment;
}

Weights Weights::of_expert(size_t expert) const {
  Weights expert_weights = *this;
  const size_t numbers = expert * tiles() * groups() * 16;
  expert_weights.experts = 0;
  expert_weights.codes += expert * tiles() * tile_bytes();
  if (levels.bytes) expert_weights.levels.bytes += expert * tiles() * levels.tile_bytes;
  if (zero_levels.bytes) expert_weights.zero_levels.bytes += expert * tiles() * zero_levels.tile_bytes;
  if (scales) expert_weights.scales += numbers;
  if (half_scales) expert_weights.half_scales += numbers;
  if (zero_points) expert_weights.zero_points += numbers;
  if (half_zero_points) expert_weights.half_zero_points += numbers;
  if (bias) expert_weights.bias += expert * columns;
  return expert_weights;
}

}  // namespace graphopt
