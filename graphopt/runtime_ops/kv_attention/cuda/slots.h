// The newest pages of storages of codes, in their slots as floats: keys [page, size], then values [page, size]. Lanes
// have the tokens and channels that they have of pages of codes.
#pragma once

#include "kv_attention/cuda/floats.h"

namespace graphopt {

// Which tokens and channels a lane has, of storages of codes: of each 32 four.
struct CodePlaces {
  static GRAPHOPT_DEVICE int token(int i) { return i / 4 * 32 + lane() / 4 * 4 + i % 4; }
  static GRAPHOPT_DEVICE int channel(int i) { return token(i); }
};

// Scores of the 16 tokens of a tile, which the first 16 lanes have. Each lane multiplies every fourth four of the channels, for all queries; then lanes swap sums until each has those
// of its own query.
GRAPHOPT_DEVICE void score_slot(const float* keys, const WarpScratch& buffers, bool sinks, int size,
                                float (&scores)[kLaneTokens]) {
  const int t = lane() % 4;
  float sums[4][kQueries] = {};  // [token][query]
  const int first = CodePlaces::token(0);
  const float* const key = keys + static_cast<size_t>(first < kSlotTokens ? first : 0) * static_cast<size_t>(size) + 4 * t;
  GRAPHOPT_NO_UNROLL
  for (int c = 0; c < size; c += 16) {
    Four loaded[4];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) loaded[i] = load_four(key + i * size + c);
    GRAPHOPT_UNROLL
    for (int j = 0; j < kQueries; ++j) {
      const Four query = load_four(buffers.query(sinks, j) + c + 4 * t);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 4; ++k) sums[i][j] = multiply_add(query.number[k], loaded[i].number[k], sums[i][j]);
      }
    }
  }
  GRAPHOPT_UNROLL
  for (int i = 0; i < 4; ++i) {
    float two[2];
    GRAPHOPT_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float mine = t & 1 ? sums[i][2 * j + 1] : sums[i][2 * j];
      two[j] = mine + shuffle_xor(t & 1 ? sums[i][2 * j] : sums[i][2 * j + 1], 1);
    }
    scores[i] = spoil((t & 2 ? two[1] : two[0]) + shuffle_xor(t & 2 ? two[0] : two[1], 2));
    scores[4 + i] = 0;
  }
}

// Adds a slot's values; `seen` has a bit for each token that this lane's query reads, others can hold any value.
template <int Count>
GRAPHOPT_DEVICE void add_slot(const float* values, const float* weights, int size, uint64_t seen,
                              float (&sums)[Count]) {
  GRAPHOPT_NO_UNROLL
  for (int t = 0; t < kSlotTokens; t += 2) {
    Four loaded[2][Count / 4];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      GRAPHOPT_UNROLL
      for (int four = 0; four < Count / 4; ++four) {
        const int c = CodePlaces::channel(4 * four);
        loaded[i][four] = load_four(values + static_cast<size_t>(t + i) * static_cast<size_t>(size) + (c < size ? c : 0));
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (!(seen >> (t + i) & 1)) continue;
      GRAPHOPT_UNROLL
      for (int four = 0; four < Count / 4; ++four) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 4; ++k) {
          float& sum = sums[4 * four + k];
          sum = multiply_add(weights[t + i], loaded[i][four].number[k], sum);
        }
      }
    }
  }
}

}  // namespace graphopt
