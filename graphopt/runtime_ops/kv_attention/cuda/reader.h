// What a warp has before it that reads pages for 8 queries, and how its lanes share them.
//
// Lane 4 g + q stands for query g. Of 64 tokens it holds the scores of 16, and of the result every fourth group of 8
// or 16 channels: which ones depends on how a storage lays out its pages, so that what is loaded as 16 bytes is
// multiplied in the lane that loaded it, and only sums have to cross lanes.
#pragma once

#include "cuda/matrix.h"
#include "kv_attention/cuda/call.h"

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
  int64_t page;        // of the sequence
  int offset, tokens;  // its first token in the page, and how many
  bool all;            // every query of the warp reads every token
  bool alike;          // all queries read the same tokens
  uint64_t seen;       // bit t: this lane's query reads token t
};

// Of what a query reads of a page the tokens from `offset` on, a bit for each.
GRAPHOPT_DEVICE uint64_t bits_of(const Visible& seen, int offset, int tokens) {
  uint64_t bits = 0;
  GRAPHOPT_UNROLL
  for (int run = 0; run < 2; ++run) {
    const int first = seen.first[run] > offset ? seen.first[run] - offset : 0;
    const int end = seen.end[run] < offset + tokens ? seen.end[run] - offset : tokens;
    if (first < end) bits |= ~uint64_t{0} >> (64 - (end - first)) << first;
  }
  return bits;
}

// What all lanes of a warp share, loaded page by page so that it need not stay in registers.
struct alignas(16) Reading {
  PageRange range;      // of pages, where there is no list
  const int32_t* list;
  int64_t first, last;  // positions of the queries
  int64_t newest;       // the last page that has a token
  uint32_t head;                // among those of all rows
  int32_t segment, of_segment;  // of the plan, and which unit of that
  int32_t end;                  // of the pages that this warp has
  int32_t prepared;             // whether products are of queries for tokens below the sinks, 1, others, 0, or none
  bool whole;                   // all of them are read whole, but for a window
};

// The shared memory of a warp. Lanes have queries as they need them: [step][lane], four channels each.
struct Desk {
  float* queries;   // times the scale, and behind them those for tokens below the sinks
  Word4* products;  // of one kind of queries, ready to be multiplied
  float* weights;   // [query][token]; scores, until they are weights
  Reading* reading;
  int steps;

  static constexpr int kStride = kTileTokens + 4;

  GRAPHOPT_BOTH Desk(char* memory, int steps, bool sinks, bool multiplies) : steps(steps) {
    queries = reinterpret_cast<float*>(memory);
    products = reinterpret_cast<Word4*>(memory + (sinks ? 2 : 1) * steps * kWarp * 16);
    weights = reinterpret_cast<float*>(products + (multiplies ? steps * kWarp : 0));
    reading = reinterpret_cast<Reading*>(weights + kQueries * kStride);
  }
  static GRAPHOPT_BOTH size_t bytes(int steps, bool sinks, bool multiplies) {
    const size_t arrays = (sinks ? 2u : 1u) + (multiplies ? 1u : 0u);
    return arrays * static_cast<size_t>(steps) * kWarp * 16 + kQueries * kStride * sizeof(float) + sizeof(Reading);
  }
  // Weights of this lane's query, of tokens from `token` on.
  GRAPHOPT_DEVICE float* weights_from(int token) const { return weights + lane() / 4 * kStride + token; }
  // A number of this lane's own.
  GRAPHOPT_DEVICE float* note() const { return weights_from(kTileTokens + lane() % 4); }
  // Keeps the score of one of them, if it is below `limit`.
  GRAPHOPT_DEVICE void keep(int token, int limit, float score) const {
    if (token < limit) *weights_from(token) = score;
  }
  GRAPHOPT_DEVICE float* queries_of(bool sinks) const { return queries + (sinks ? steps * kWarp * 4 : 0); }
};

// Of this lane's query: the largest score, and the sum of the weights that this lane has seen.
struct Softmax {
  float largest = kNothing, sum = 0;

  // Turns scores into weights; tokens that are not read get 0, and no others do. Returns the factor of what came
  // before.
  template <typename TokenOf>
  GRAPHOPT_DEVICE float weigh(const Layout& layout, const Tile& tile, const TokenOf& token_of, const Desk& desk) {
    float scores[kLaneTokens];
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; i += 4) {
      const Four four = load_four(desk.weights_from(token_of(i)));
      GRAPHOPT_UNROLL
      for (int k = 0; k < 4; ++k) scores[i + k] = four.number[k];
    }
    uint32_t read = 0;  // bits of this lane's tokens, of which always four are neighbours
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; i += 4) read |= static_cast<uint32_t>(tile.seen >> token_of(i) & 15) << i;
    float most = kNothing;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) scores[i] = spoil(scores[i]);
    if (layout.softcap != 0) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kLaneTokens; ++i) scores[i] = soften(layout, scores[i]);
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
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
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; i += 4) {
      store_four(desk.weights_from(token_of(i)), {{scores[i], scores[i + 1], scores[i + 2], scores[i + 3]}});
    }
    return factor;
  }
};

// Where a page of a head lies in tensors that have as many pages as the cache.
GRAPHOPT_DEVICE size_t place_of(const Layout& layout, uint32_t head, int64_t page) {
  return head * layout.pages + layout.physical(page);
}

}  // namespace graphopt
