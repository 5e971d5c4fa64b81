// Rows of x to operands, and parts of y to y.
#pragma once

#include "matmul_table/cuda/product.h"

namespace graphopt {

constexpr unsigned kRoundThreads = 256;

// x [rows, count] to another type, [rows, pitch]; the padding of a row becomes 0.
struct Conversion {
  const void* x;
  void* to;
  size_t count, pitch;
};

template <typename From, typename To>
GRAPHOPT_KERNEL(kRoundThreads, 4)
void convert(Conversion c) {
  const From* const from = static_cast<const From*>(c.x) + block_index().x * c.count;
  To* const to = static_cast<To*>(c.to) + block_index().x * c.pitch;
  for (size_t i = block_index().y * kRoundThreads + thread_index().x; i < c.pitch;
       i += size_t{kRoundThreads} * block_count().y) {
    to[i] = from_float<To>(i < c.count ? to_float(from[i]) : 0.0f);
  }
}

// x [rows of the grid, count] to bytes: q = round(x (levels / m)) with m = clip max|x|, of a row or of a group.
//
// A row of bytes is cut into 32 rows of K: 8 bytes for each t, rows 4 t to 4 t + 3 of one unit and of the next; or it is in
// the order of K, where gemm_sm90_bytes.h reads it. Rounded to 16 bits, a number is 128 upper + lower, in two rows.
struct Rounding {
  const void* x;
  int8_t* to;        // [operand rows][pitch], pitch a multiple of 128 and at least count
  float* scales;     // [segment][scale_pitch], or [operand rows] where a row has one; of 1, times the table's step
  size_t count, pitch;
  unsigned group, groups, segments_of_group, segments, scale_pitch;
  float levels, clip, step;
  bool whole_row, two, in_order;
};

struct RowScale {
  float scale, inverse;
};

// Magnitudes as integers have the same order, with infinity and then NaN above all others.
GRAPHOPT_DEVICE RowScale scale_of(uint32_t largest, const Rounding& r) {
  const float magnitude = float_of_bits(largest) * r.clip;
  if (largest >= 0x7f800000u) return {float_of_bits(0x7fc00000u), 0};
  if (magnitude < 1e-30f) return {0, 0};
  return {magnitude / r.levels, r.levels / magnitude};
}

GRAPHOPT_DEVICE int32_t nearest(float x, float inverse, float levels) {
  float quotient = x * inverse;
  // NaN becomes the highest level; the scale carries the NaN or infinity
  quotient = quotient < levels ? quotient : levels;
  quotient = quotient > -levels ? quotient : -levels;
  return round_to_int(quotient);
}

template <typename T>
GRAPHOPT_DEVICE uint32_t largest_of(const T* x, size_t first, size_t end, unsigned thread, unsigned threads) {
  uint32_t largest = 0;
  for (size_t i = first + thread; i < end; i += threads) {
    const uint32_t magnitude = bits_of_float(to_float(x[i])) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return reduce_max(largest);
}

// Four numbers, with 0 past the end of the row.
template <typename T>
GRAPHOPT_DEVICE void round_four(const Rounding& r, const T* x, size_t first, size_t row, RowScale scale) {
  uint32_t words[2] = {0, 0};
  GRAPHOPT_UNROLL
  for (unsigned k = 0; k < 4; ++k) {
    const int32_t integer = first + k < r.count ? nearest(to_float(x[first + k]), scale.inverse, r.levels) : 0;
    const int32_t upper = (integer + 64) >> 7;
    words[0] |= (static_cast<uint32_t>(r.two ? upper : integer) & 255) << 8 * k;
    words[1] |= (static_cast<uint32_t>(integer - 128 * upper) & 255) << 8 * k;
  }
  const size_t at = r.in_order ? first : first / 32 * 32 + first % 16 * 2 + first % 32 / 16 * 4;
  *reinterpret_cast<uint32_t*>(r.to + row * r.pitch + at) = words[0];
  if (r.two) *reinterpret_cast<uint32_t*>(r.to + (row + 1) * r.pitch + at) = words[1];
}

GRAPHOPT_DEVICE void put_scale(const Rounding& r, unsigned segment, size_t row, float scale) {
  float* const to = r.scales + static_cast<size_t>(segment) * r.scale_pitch + row;
  to[0] = (r.two ? scale * 128.0f : scale) * r.step;
  if (r.two) to[1] = scale * r.step;
}

// One block for each row.
template <typename T>
GRAPHOPT_KERNEL(kRoundThreads, 4)
void round_rows(Rounding r) {
  const T* const x = static_cast<const T*>(r.x) + block_index().x * r.count;
  const size_t row = block_index().x * (r.two ? 2 : 1);
  const unsigned thread = thread_index().x;
  if (r.whole_row || r.groups == 1) {
    uint32_t* const of_warps = reinterpret_cast<uint32_t*>(shared_memory());
    const uint32_t mine = largest_of(x, 0, r.count, thread, kRoundThreads);
    if (lane() == 0) of_warps[warp()] = mine;
    sync_block();
    uint32_t largest = 0;
    for (unsigned i = 0; i < kRoundThreads / kWarp; ++i) largest = of_warps[i] > largest ? of_warps[i] : largest;
    const RowScale scale = scale_of(largest, r);
    for (size_t first = 4 * thread; first < r.pitch; first += 4 * kRoundThreads) round_four(r, x, first, row, scale);
    for (unsigned i = thread; i < (r.whole_row ? 1 : r.segments); i += kRoundThreads) put_scale(r, i, row, scale.scale);
    return;
  }
  for (unsigned group = static_cast<unsigned>(warp()); group < r.groups; group += kRoundThreads / kWarp) {
    const size_t first = static_cast<size_t>(group) * r.group;
    const size_t end = first + r.group < r.count ? first + r.group : r.count;
    const RowScale scale = scale_of(largest_of(x, first, end, static_cast<unsigned>(lane()), kWarp), r);
    // the last group fills up the row
    const size_t end_of_padding = group + 1 < r.groups ? end : r.pitch;
    for (size_t i = first + 4 * static_cast<unsigned>(lane()); i < end_of_padding; i += 4 * kWarp) {
      round_four(r, x, i, row, scale);
    }
    for (unsigned i = static_cast<unsigned>(lane()); i < r.segments_of_group; i += kWarp) {
      const unsigned segment = group * r.segments_of_group + i;
      if (segment < r.segments) put_scale(r, segment, row, scale.scale);
    }
  }
}

// The parts of each number in their order, and the bias.
struct Addition {
  const float *partials, *bias;
  void* y;
  size_t count, columns;  // of y, of a row of it
  unsigned splits;
  int y_type;
};

GRAPHOPT_KERNEL(kRoundThreads, 4)
void add_splits(Addition a) {
  wait_for_previous();
  const size_t i = size_t{block_index().x} * kRoundThreads + thread_index().x;
  if (i >= a.count) return;
  float sum = 0;
  for (unsigned split = 0; split < a.splits; ++split) sum += a.partials[split * a.count + i];
  put_y(a.y, a.y_type, i, a.bias ? sum + a.bias[i % a.columns] : sum);
}

}  // namespace graphopt
