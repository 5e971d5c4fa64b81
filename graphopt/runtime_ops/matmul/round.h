// Rows of x to the numbers that a product multiplies.
#pragma once

#include "matmul/cpu.h"
#include "matmul/segments.h"
#include "matmul/vector.h"

namespace graphopt {
namespace {

// Magnitudes as integers: they have the same order, with infinity and then what is no number above all others.
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
};

inline Scale scale_for(uint32_t largest, float clip, float levels) {
  const float magnitude = bits_of<float>(largest) * clip;
  if (largest >= 0x7f800000u) return {__builtin_nanf(""), 0};
  if (magnitude < 1e-30f) return {};
  return {magnitude / levels, levels / magnitude};
}

// x * inverse to the nearest integer, to the even one of two, within the levels. Adding 1.5 * 2^23 leaves no bits for
// what is less than 1.
inline int32_t nearest(float x, float inverse, float levels) {
  constexpr float kShift = 12582912.0f;
  float scaled = x * inverse;
  scaled = scaled > levels ? levels : scaled;
  scaled = scaled < -levels ? -levels : scaled;
  return static_cast<int32_t>(bits_of<uint32_t>(scaled + kShift) - bits_of<uint32_t>(kShift));
}

inline uint16_t bfloat16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Where the words of one row go, `width` apart.
template <typename T>
struct Words {
  uint32_t* at;
  size_t width;
  T* whole;  // the row by itself, where `width` is more than 1

  T* begin() const { return width == 1 ? reinterpret_cast<T*>(at) : whole; }
  void place(size_t count) const {
    if (width == 1) return;
    for (size_t i = 0; i < count; ++i) __builtin_memcpy(at + i * width, whole + i * (4 / sizeof(T)), 4);
  }
};

// The most numbers of a row that are rounded at a time.
constexpr size_t kSegmentRows = Weights::kSegment;

void round_to_integers(const Weights& weights, const Rounded& rounded, const float* x, size_t row, size_t first,
                       size_t width, size_t panel) {
  const bool two = rounded.kind == Activations::kInt16;
  const size_t words = rounded.words_of_row(weights), segments = weights.segments();
  uint32_t* const data = rounded.words + panel * rounded.panel * words;
  float* const scales = rounded.scales + panel * rounded.panel * segments;
  float* const sums = rounded.sums + panel * rounded.panel * segments;
  const float levels = static_cast<float>(two ? rounded.levels * 128 : rounded.levels);
  const float step = static_cast<float>(weights.table.step);
  alignas(64) int8_t upper[kSegmentRows], lower[kSegmentRows];
  Scale scale;
  if (rounded.whole_row) scale = scale_for(largest_magnitude(x, weights.rows), rounded.clip, levels);
  for_each_segment(weights, [&](const Segment& segment) {
    if (!rounded.whole_row && segment.begins_group) {
      const size_t end = segment.row + weights.group < weights.rows ? segment.row + weights.group : weights.rows;
      scale = scale_for(largest_magnitude(x + segment.row, end - segment.row), rounded.clip, levels);
    }
    const size_t count = segment.units * 16;
    const size_t given = weights.rows - segment.row < count ? weights.rows - segment.row : count;
    const Words<int8_t> high = {data + segment.unit * 4 * width + row - first, width, upper};
    const Words<int8_t> low = {high.at + 1, width, lower};
    int8_t *const q = high.begin(), *const rest = low.begin();
    const float* const from = x + segment.row;
    int32_t sum = 0, rest_sum = 0;
    if (!two) {
      for (size_t i = 0; i < given; ++i) {
        const int32_t integer = nearest(from[i], scale.inverse, levels);
        q[i] = static_cast<int8_t>(integer);
        sum += integer;
      }
    } else {
      for (size_t i = 0; i < given; ++i) {
        const int32_t integer = nearest(from[i], scale.inverse, levels), above = (integer + 64) >> 7;
        q[i] = static_cast<int8_t>(above);
        rest[i] = static_cast<int8_t>(integer - above * 128);
        sum += above;
        rest_sum += integer - above * 128;
      }
      for (size_t i = given; i < count; ++i) rest[i] = 0;
      low.place(count / 4);
      scales[segment.index * width + row - first + 1] = scale.scale * step;
      sums[segment.index * width + row - first + 1] = static_cast<float>(rest_sum);
    }
    for (size_t i = given; i < count; ++i) q[i] = 0;
    high.place(count / 4);
    scales[segment.index * width + row - first] = scale.scale * step * (two ? 128.0f : 1.0f);
    sums[segment.index * width + row - first] = static_cast<float>(sum);
  });
}

void round_to_floats(const Weights& weights, const Rounded& rounded, const float* x, size_t row, size_t first,
                     size_t width, size_t panel) {
  const bool half = rounded.kind == Activations::kBfloat16;
  const size_t words = rounded.words_of_row(weights), segments = weights.segments();
  uint32_t* const data = rounded.words + panel * rounded.panel * words;
  float* const scales = rounded.scales + panel * rounded.panel * segments;
  float* const sums = rounded.sums + panel * rounded.panel * segments;
  alignas(64) uint16_t halves[kSegmentRows];
  for_each_segment(weights, [&](const Segment& segment) {
    const size_t count = segment.units * 16;
    const size_t given = weights.rows - segment.row < count ? weights.rows - segment.row : count;
    const float* const from = x + segment.row;
    float sum = 0;
    if (half) {
      const Words<uint16_t> to = {data + segment.unit * 8 * width + row - first, width, halves};
      uint16_t* const h = to.begin();
      for (size_t i = 0; i < given; ++i) h[i] = bfloat16(from[i]);
      for (size_t i = given; i < count; ++i) h[i] = 0;
      for (size_t i = 0; i < given; ++i) sum += bits_of<float>(static_cast<uint32_t>(h[i]) << 16);
      to.place(count / 2);
    } else {
      uint32_t* const to = data + segment.unit * 16 * width + row - first;
      for (size_t i = 0; i < given; ++i) to[i * width] = bits_of<uint32_t>(from[i]);
      for (size_t i = given; i < count; ++i) to[i * width] = 0;
    }
    scales[segment.index * width + row - first] = 1;
    sums[segment.index * width + row - first] = sum;
  });
}

void round_panel(const Weights& weights, const Rounded& rounded, const float* x, size_t panel) {
  const size_t first = panel * rounded.panel, width = rounded.width(panel);
  const size_t words = rounded.words_of_row(weights), segments = weights.segments();
  const bool two = rounded.kind == Activations::kInt16;
  const size_t rows = rounded.rows() - first < width ? rounded.rows() - first : width;
  if (rows < width) {
    __builtin_memset(rounded.words + first * words, 0, width * words * sizeof(uint32_t));
    __builtin_memset(rounded.scales + first * segments, 0, width * segments * sizeof(float));
    __builtin_memset(rounded.sums + first * segments, 0, width * segments * sizeof(float));
  }
  for (size_t row = first; row < first + rows; row += two ? 2 : 1) {
    const float* const of_x = x + (two ? row / 2 : row) * weights.rows;
    const bool integers = two || rounded.kind == Activations::kInt8;
    (integers ? round_to_integers : round_to_floats)(weights, rounded, of_x, row, first, width, panel);
  }
}

}  // namespace
}  // namespace graphopt
