// What a warp has before it that reads pages for 8 queries, and how its lanes share them.
//
// Lane 4 g + q stands for query g. Of 64 tokens it holds the scores of 16, and of the result every fourth group of 8 or 16
// channels: which ones depends on how a storage lays out its pages, so that what is loaded as 16 bytes is multiplied where it
// was loaded, and no number but those of a sum has to change lanes.
#pragma once

#include "cuda/matrix.h"
#include "kv_attention/cuda_call.h"

namespace graphopt {

constexpr int kQueries = 8, kTileTokens = 64, kLaneTokens = 16;
// What stands in the lower half of a number that is split in two: the rest, times 2^11, so that it is not subnormal.
constexpr float kRest = 2048.0f;

// A number of 22 bits as two of float16, for products that are summed in float32.
struct Split {
  uint32_t high, low;  // pairs

  GRAPHOPT_DEVICE Split(float a, float b) {
    high = half2_of(a, b);
    const float rest_a = a - to_float(half_low(high)), rest_b = b - to_float(half_high(high));
    low = half2_of(rest_a * kRest, rest_b * kRest);
  }
};

// The power of two at or below |x|, which float16 numbers are counted in; its inverse is exact.
GRAPHOPT_DEVICE float power_below(float x) {
  const float power = float_of_bits(bits_of_float(x) & 0x7f800000u);
  return power < 0x1p-120f ? 0x1p-120f : power > 0x1p120f ? 0x1p120f : power;
}
GRAPHOPT_DEVICE float inverse_of_power(float power) { return float_of_bits((254u << 23) - bits_of_float(power)); }

// The largest over the lanes of a query.
GRAPHOPT_DEVICE float most_of_query(float x) { return reduce_max<4>(x); }
GRAPHOPT_DEVICE float sum_of_query(float x) { return reduce_sum<4>(x); }

// Up to 64 tokens of a page.
struct Tile {
  int64_t page;  // of the sequence
  size_t offset;  // of its first token in the page
  int tokens;
  bool all;    // every query of the warp reads every token
  bool alike;  // all queries read the same tokens
  Visible seen;  // by this lane's query; of the page

  GRAPHOPT_DEVICE bool sees(int token) const {
    const int at = static_cast<int>(offset) + token;
    return token < tokens && ((at >= seen.first[0] && at < seen.end[0]) || (at >= seen.first[1] && at < seen.end[1]));
  }
};

// Of this lane's query: the largest score, and the sum of the weights that this lane has seen.
struct Softmax {
  float largest = kNothing, sum = 0;

  // Turns scores into weights; what is not read weighs 0, and nothing else does. Returns the factor of what came before.
  template <typename TokenOf>
  GRAPHOPT_DEVICE float weigh(const Layout& layout, const Tile& tile, const TokenOf& token_of, float (&scores)[kLaneTokens]) {
    uint32_t read = 0xffffu;
    if (!tile.all || tile.tokens < kTileTokens) {
      read = 0;
      GRAPHOPT_UNROLL
      for (int i = 0; i < kLaneTokens; ++i) read |= static_cast<uint32_t>(tile.sees(token_of(i))) << i;
    }
    float most = kNothing;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      scores[i] = soften(layout, spoil(scores[i]));
      if (read >> i & 1) most = scores[i] > most ? scores[i] : most;
    }
    most = most_of_query(most);
    const float before = largest;
    largest = most > before ? most : before;
    const float factor = largest == before ? 1.0f : exponential(before - largest);
    float added = 0;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      scores[i] = read >> i & 1 ? exponential(scores[i] - largest) : 0.0f;
      added += scores[i];
    }
    sum = sum * factor + added;
    return factor;
  }
};

// The shared memory of a warp. Lanes have queries as they need them: [step][lane], four channels each.
struct Desk {
  float *queries, *sink_queries;     // times the scale
  Word4 *products, *sink_products;   // the same, ready to be multiplied
  float* weights;                    // [query][token]

  static constexpr int kStride = kTileTokens + 4;

  GRAPHOPT_BOTH Desk(char* memory, int steps, bool sinks, bool multiplies) {
    const int bytes = steps * kWarp * 16;
    const auto take = [&](bool used) {
      char* const part = memory;
      if (used) memory += bytes;
      return part;
    };
    queries = reinterpret_cast<float*>(take(true));
    sink_queries = reinterpret_cast<float*>(take(sinks));
    products = reinterpret_cast<Word4*>(take(multiplies));
    sink_products = reinterpret_cast<Word4*>(take(multiplies && sinks));
    weights = reinterpret_cast<float*>(memory);
  }
  static GRAPHOPT_BOTH size_t bytes(int steps, bool sinks, bool multiplies) {
    const size_t arrays = (sinks ? 2u : 1u) * (multiplies ? 2u : 1u);
    return arrays * static_cast<size_t>(steps) * kWarp * 16 + kQueries * kStride * sizeof(float);
  }
};

}  // namespace graphopt
