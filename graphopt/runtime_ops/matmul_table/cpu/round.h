// Rounds rows of x to the numbers that a product multiplies.
#pragma once

#include "matmul_table/cpu/kernels.h"
#include "matmul_table/cpu/segments.h"
#include "arch/vector.h"

namespace graphopt {
namespace {

// Magnitudes as integers: they have the same order, with infinity and then NaN above all others.
inline uint32_t largest_magnitude(const float* x, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of<uint32_t>(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

struct Scale {
  float scale = 0, inverse = 0;
  int32_t zero_point = 0;  // codes begin at minus this, where they are those of a range
};

inline Scale scale_for(uint32_t largest, float clip, float levels) {
  const float magnitude = bits_of<float>(largest) * clip;
  if (largest >= 0x7f800000u) return {__builtin_nanf(""), 0};
  if (magnitude < 1e-30f) return {};
  return {magnitude / levels, levels / magnitude};
}

// x * inverse to the nearest integer, to the even one of two, within the levels. Adding 1.5 * 2^23 leaves no bits for
// fractions. NaN becomes the highest level; the scale then carries the NaN or infinity.
inline int32_t nearest(float x, float inverse, float levels) {
  constexpr float kShift = 12582912.0f;
  float quotient = x * inverse;
  quotient = quotient < levels ? quotient : levels;
  quotient = quotient > -levels ? quotient : -levels;
  return static_cast<int32_t>(bits_of<uint32_t>(quotient + kShift) - bits_of<uint32_t>(kShift));
}

// The scale of numbers and 0 with codes from the least to the largest of them.
inline Scale scale_of_range(const float* x, size_t count, float levels) {
  float low = 0, high = 0;
  for (size_t i = 0; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  const float width = high - low;
  if (largest_magnitude(x, count) >= 0x7f800000u || bits_of<uint32_t>(width) >= 0x7f800000u) {
    return {__builtin_nanf(""), 0};
  }
  if (width < 1e-30f) return {};
  const float inverse = levels / width;
  return {width / levels, inverse, nearest(-low, inverse, levels)};
}

inline uint16_t bfloat16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The most numbers of a row that are rounded at a time.
constexpr size_t kMost = Weights::kSegment;

// Puts the `count` words of a row where they belong, `AtOnce` of them side by side, those of `width` rows in turn.
template <size_t AtOnce = 1>
inline void scatter(const void* row, uint32_t* to, size_t count, size_t width) {
  constexpr size_t kBytes = AtOnce * sizeof(uint32_t);
  if (width == 1) {
    __builtin_memcpy(to, row, count * sizeof(uint32_t));
    return;
  }
  const auto* const words = static_cast<const char*>(row);
  for (size_t i = 0; i < count / AtOnce; ++i) __builtin_memcpy(to + i * width * AtOnce, words + i * kBytes, kBytes);
}

// Words of 4 numbers of 8 bits as two words of 16 bits each: numbers 0 and 2, then 1 and 3.
inline void to_pairs(const uint32_t* words, size_t count, uint32_t* pairs) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = words[i];
    const auto pair = [](int32_t lower, int32_t upper) {
      return (static_cast<uint32_t>(lower) & 0xffffu) | (static_cast<uint32_t>(upper) & 0xffff0000u);
    };
    pairs[2 * i] = pair(static_cast<int32_t>(word << 24) >> 24, static_cast<int32_t>(word << 8) >> 8);
    pairs[2 * i + 1] = pair(static_cast<int32_t>(word << 16) >> 24, static_cast<int32_t>(word) >> 8);
  }
}

// The same in order, numbers 0 and 1, then 2 and 3.
inline void to_fours(const void* bytes, size_t count, uint32_t* fours) {
  for (size_t i = 0; i < 4 * count; ++i) {
    const auto number = static_cast<int16_t>(static_cast<const int8_t*>(bytes)[i]);
    __builtin_memcpy(reinterpret_cast<char*>(fours) + i * sizeof number, &number, sizeof number);
  }
}

// One row of a panel, on its way to where the products read it.
struct PanelRow {
  const Weights* weights;
  const Rounded* rounded;
  const float* x;
  size_t panel, width, row;  // the last counts from the first row of the panel
  Scale scale;

  size_t at(const Segment& segment) const { return segment.index * rounded->padded + panel * rounded->panel + row; }
  // Where its words go, `after` rows further.
  uint32_t* words(const Segment& segment, size_t after = 0) const {
    return rounded->words_of(segment.unit, segment.units, panel) + (row + after) * rounded->words_at_once();
  }
  // Numbers of the segment that are there; the others are 0.
  size_t count(const Segment& segment) const {
    const size_t remaining_rows = weights->rows - segment.row;
    return remaining_rows < segment.units * 16 ? remaining_rows : segment.units * 16;
  }
  void put_integers(const Segment& segment, const uint32_t* integers, size_t after, float of_one, int32_t sum) const {
    if (rounded->form == Words::kPairs) {
      uint32_t pairs[kMost / 2];
      to_pairs(integers, segment.units * 4, pairs);
      scatter(pairs, words(segment, after), segment.units * 8, width);
    } else if (rounded->form == Words::kFours) {
      uint32_t fours[kMost / 2];
      to_fours(integers, segment.units * 4, fours);
      scatter<2>(fours, words(segment, after), segment.units * 8, width);
    } else {
      scatter(integers, words(segment, after), segment.units * 4, width);
    }
    rounded->scales[at(segment) + after] = of_one * static_cast<float>(weights->table.step);
    rounded->sums[at(segment) + after] = static_cast<float>(sum);
    rounded->starts[0][at(segment) + after] = (kByteBias - weights->table.low.offset) * sum;
    rounded->starts[1][at(segment) + after] = (kByteBias - weights->table.high.offset) * sum;
  }
};

// The largest rounded number.
inline float levels_of(const Rounded& rounded) {
  return static_cast<float>(rounded.kind == Activations::kInt16 ? rounded.levels * 128 : rounded.levels);
}

inline void round_to_integers(PanelRow& row, const Segment& segment) {
  const Weights& weights = *row.weights;
  const float levels = levels_of(*row.rounded);
  if (!row.rounded->whole_row && segment.begins_group) {
    const size_t end = segment.row + weights.group < weights.rows ? segment.row + weights.group : weights.rows;
    const float* const group = row.x + segment.row;
    const size_t numbers = end - segment.row;
    row.scale = row.rounded->of_range ? scale_of_range(group, numbers, levels)
                                      : scale_for(largest_magnitude(group, numbers), row.rounded->clip, levels);
  }
  const size_t count = row.count(segment);
  const float *const from = row.x + segment.row, inverse = row.scale.inverse;
  uint32_t words[kMost / 4];
  auto* const integers = reinterpret_cast<int8_t*>(words);
  __builtin_memset(integers + count, 0, segment.units * 16 - count);
  int32_t sum = 0;
  if (row.rounded->of_range) {
    const int32_t least = -row.scale.zero_point, most = static_cast<int32_t>(levels) + least;
    for (size_t i = 0; i < count; ++i) {
      int32_t integer = nearest(from[i], inverse, levels);
      integer = integer < most ? integer : most;
      integer = integer > least ? integer : least;
      integers[i] = static_cast<int8_t>(integer);
      sum += integer;
    }
    return row.put_integers(segment, words, 0, row.scale.scale, sum);
  }
  if (row.rounded->kind == Activations::kInt8) {
    for (size_t i = 0; i < count; ++i) {
      const int32_t integer = nearest(from[i], inverse, levels);
      integers[i] = static_cast<int8_t>(integer);
      sum += integer;
    }
    return row.put_integers(segment, words, 0, row.scale.scale, sum);
  }
  uint32_t rest_words[kMost / 4];
  auto* const rest_numbers = reinterpret_cast<int8_t*>(rest_words);
  __builtin_memset(rest_numbers + count, 0, segment.units * 16 - count);
  int32_t rest_sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t integer = nearest(from[i], inverse, levels), above = (integer + 64) >> 7;
    integers[i] = static_cast<int8_t>(above);
    rest_numbers[i] = static_cast<int8_t>(integer - above * 128);
    sum += above;
    rest_sum += integer - above * 128;
  }
  row.put_integers(segment, words, 0, row.scale.scale * 128.0f, sum);
  row.put_integers(segment, rest_words, 1, row.scale.scale, rest_sum);
}

inline void round_to_floats(const PanelRow& row, const Segment& segment) {
  const size_t count = row.count(segment), all = segment.units * row.rounded->words_of_unit();
  const float* const from = row.x + segment.row;
  uint32_t words[kMost];
  if (count < segment.units * 16) __builtin_memset(words, 0, all * sizeof(uint32_t));
  float sum = 0;
  if (row.rounded->kind == Activations::kBfloat16) {
    if (row.rounded->form == Words::kFloats) {
      for (size_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>(bfloat16(from[i])) << 16;
    } else {
      auto* const halves = reinterpret_cast<uint16_t*>(words);
      for (size_t i = 0; i < count; ++i) halves[i] = bfloat16(from[i]);
    }
    // nothing else reads the sums
    const bool with_zero_points = row.weights->has_zero_points();
    for (size_t i = 0; with_zero_points && i < count; ++i) {
      sum += bits_of<float>(static_cast<uint32_t>(bfloat16(from[i])) << 16);
    }
  } else {
    __builtin_memcpy(words, from, count * sizeof(float));
  }
  scatter(words, row.words(segment), all, row.width);
  row.rounded->sums[row.at(segment)] = sum;
}

// Fills the unused rows of a panel.
void clear(const Rounded& rounded, const Segment& segment, size_t panel, size_t width) {
  __builtin_memset(rounded.words_of(segment.unit, segment.units, panel), 0,
                   segment.units * rounded.words_of_unit() * width * sizeof(uint32_t));
  const size_t at = segment.index * rounded.padded + panel * rounded.panel;
  for (size_t row = at; row < at + width; ++row) {
    rounded.scales[row] = rounded.sums[row] = 0;
    rounded.starts[0][row] = rounded.starts[1][row] = 0;
  }
}

void round_panel(const Weights& weights, const Rounded& rounded, const float* x, size_t panel) {
  const size_t first = panel * rounded.panel, width = rounded.width(panel), all = rounded.rows();
  const size_t count = all - first < width ? all - first : width;
  const bool integers = rounded.kind == Activations::kInt16 || rounded.kind == Activations::kInt8;
  PanelRow rows[kMostRows];
  size_t count_of_rows = 0;
  for (size_t row = 0; row < count; row += rounded.rows_of_one(), x += weights.rows) {
    rows[count_of_rows] = {&weights, &rounded, x, panel, width, row, {}};
    if (rounded.whole_row) {
      rows[count_of_rows].scale = scale_for(largest_magnitude(x, weights.rows), rounded.clip, levels_of(rounded));
    }
    ++count_of_rows;
  }
  // segment by segment, so that what the rows of a panel share is written while it is near
  for_each_segment(weights, [&](const Segment& segment) {
    if (count < width) clear(rounded, segment, panel, width);
    for (size_t i = 0; i < count_of_rows; ++i) {
      if (integers) {
        round_to_integers(rows[i], segment);
      } else {
        round_to_floats(rows[i], segment);
      }
    }
  });
}

}  // namespace
}  // namespace graphopt
