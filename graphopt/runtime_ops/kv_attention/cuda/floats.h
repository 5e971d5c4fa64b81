// Pages of floats that are multiplied as floats: keys [page / 16, size, 16], values [page, size].
#pragma once

#include "kv_attention/cuda/reader.h"
#include "kv_attention/shared/float8.h"

namespace graphopt {

GRAPHOPT_DEVICE float number_of(float x) { return x; }
GRAPHOPT_DEVICE float number_of(BFloat16 x) { return to_float(x); }
GRAPHOPT_DEVICE float number_of(Float8 x) {
  // Shifted to where a float16 has exponent and fraction, it is 2^8 too small; that also takes in subnormal numbers.
  const uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 8;
  const Half half = {static_cast<uint16_t>(sign | (magnitude == 0x7f ? 0x7fffu : magnitude << 7))};
  return to_float(half) * 256.0f;
}

// Eight numbers that lie together.
template <typename Stored>
GRAPHOPT_DEVICE void load_eight(const Stored* from, float (&numbers)[8]) {
  union {
    uint32_t words[8];
    Stored stored[32 / sizeof(Stored)];
  } bits;
  constexpr int kWords = 2 * sizeof(Stored);
  if constexpr (kWords == 2) {
    const Word2 word = load8(from);
    bits.words[0] = word.words[0], bits.words[1] = word.words[1];
  } else {
    GRAPHOPT_UNROLL
    for (int i = 0; i < kWords; i += 4) {
      const Word4 word = load16(reinterpret_cast<const char*>(from) + 4 * i);
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) bits.words[i + j] = word.words[j];
    }
  }
  GRAPHOPT_UNROLL
  for (int i = 0; i < 8; ++i) numbers[i] = number_of(bits.stored[i]);
}

// Weights of the warp's queries as all lanes read them, [query][token].
struct FloatWeights {
  float* weights;

  static constexpr int kStride = kTileTokens + 4;
  static constexpr size_t kBytes = kQueries * kStride * sizeof(float);
  static_assert(kBytes >= kLaneTokens * kWarp * sizeof(float), "scores are parked here");

  GRAPHOPT_DEVICE const float* own() const { return weights + lane() % 4 * kStride; }
  // Keeps those of four tokens of this lane's query.
  GRAPHOPT_DEVICE void keep(int token, const float* four) const {
    store_four(weights + lane() % 4 * kStride + token, {{four[0], four[1], four[2], four[3]}});
  }
};

// Which tokens and channels a lane has, of storages of floats.
struct FloatPlaces {
  static GRAPHOPT_DEVICE int token(int i) { return lane() / 4 * 8 + i; }
  static GRAPHOPT_DEVICE int channel(int i) { return i / 8 * 64 + lane() / 4 * 8 + i % 8; }
};

template <typename Stored, int Spans>
struct FloatPages : FloatPlaces {
  static constexpr bool kFinite = false, kSlots = false;
  static constexpr int kBlocks = 2, kSums = 8 * Spans, kResults = 8 * Spans;

  const Layout& layout;
  const State& state;
  const WarpScratch& buffers;
  FloatWeights shared;
  size_t from = 0;  // the first number of the tile, of keys and of values

  static GRAPHOPT_BOTH size_t bytes(const Layout& layout, bool) {
    const size_t values = kQueries * layout.size * sizeof(float);
    return values < FloatWeights::kBytes ? FloatWeights::kBytes : values;
  }
  GRAPHOPT_DEVICE FloatPages(const Layout& layout, const State& state, const WarpScratch& buffers)
      : layout(layout), state(state), buffers(buffers), shared{reinterpret_cast<float*>(buffers.pages)} {}

  GRAPHOPT_DEVICE void begin(const Tile&) {}
  GRAPHOPT_DEVICE void prepare(bool) {}
  GRAPHOPT_DEVICE void open(const Tile& tile, const Tile&) {
    const size_t place = place_of(layout, buffers.reading->head, tile.page);
    from = (place * layout.page + static_cast<size_t>(tile.offset)) * layout.size;
  }

  GRAPHOPT_DEVICE void score(const Tile& tile, bool sinks, bool, float (&scores)[kLaneTokens]) {
    const int g = lane() / 4, size = static_cast<int>(layout.size);
    const float* const queries = buffers.query(sinks, lane() % 4);
    const size_t block = static_cast<size_t>(g / 2 * 16) * layout.size + static_cast<size_t>(g % 2 * 8);
    const Stored* const keys = reinterpret_cast<const Stored*>(state.keys) + from + block;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) scores[i] = 0;
    if (token(0) >= tile.tokens) return;
    GRAPHOPT_NO_UNROLL
    for (int c = 0; c < size; c += 4) {
      const Four query = load_four(queries + c);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        float key[8];
        load_eight(keys + (c + i) * 16, key);
        GRAPHOPT_UNROLL
        for (int k = 0; k < 8; ++k) scores[k] = multiply_add(query.number[i], key[k], scores[k]);
      }
    }
  }
  GRAPHOPT_DEVICE void close_keys() {}
  GRAPHOPT_DEVICE float* parking() const { return shared.weights; }

  GRAPHOPT_DEVICE void add(const Tile& tile, float factor, const float (&weights)[kLaneTokens], float (&sums)[kSums]) {
    sync_warp();  // all lanes have read those of the tile before
    shared.keep(token(0), weights), shared.keep(token(4), weights + 4);
    sync_warp();
    if (factor != 1) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] *= factor;
    }
    const Stored* const values = reinterpret_cast<const Stored*>(state.values) + from;
    GRAPHOPT_NO_UNROLL
    for (int t = 0; t < tile.tokens; ++t) {
      if (!(tile.seen >> t & 1)) continue;  // it can hold any value
      const float weight = shared.own()[t];
      const Stored* const value = values + static_cast<size_t>(t) * layout.size;
      GRAPHOPT_UNROLL
      for (int span = 0; span < Spans; ++span) {
        const int at = channel(8 * span);
        if (at >= static_cast<int>(layout.size)) continue;
        float number[8];
        load_eight(value + at, number);
        GRAPHOPT_UNROLL
        for (int i = 0; i < 8; ++i) sums[8 * span + i] = multiply_add(weight, number[i], sums[8 * span + i]);
      }
    }
  }

  GRAPHOPT_DEVICE void finish() {}
  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int i) const { return sums[i]; }
};

}  // namespace graphopt
