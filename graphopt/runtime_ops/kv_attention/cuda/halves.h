// Pages of float16, multiplied by tensor cores: keys [page / 16, size, 16], values [page, size].
//
// A query, or a weight, is two numbers of float16, 22 bits, in columns of their own. The 8 numbers of 16 bytes that a
// lane loads are of 8 tokens, or of 8 channels: rows of four products. A pair of rows is made of two loads.
//
// Loads are asynchronous copies to shared memory. A step is four of a lane, 2 KiB of a warp: of keys 16 channels of 64
// tokens, of values 16 tokens of 64 channels. Steps run on into the next tile. Eight neighbouring lanes copy 128 bytes
// that lie together, as the GPU asks its L2 for what eight lanes want at a time; the lanes that multiply them are others.
#pragma once

#include "kv_attention/cuda/floats.h"

namespace graphopt {

// `Size` is the channels of a head where they are known, else 0; a tile has Stages - 1 steps at least.
template <int Spans, int Stages = 4, int Size = 0>
struct HalfPages : FloatPlaces {
  static constexpr bool kFinite = false, kSlots = false;
  static constexpr int kBlocks = Spans == 2 && Stages == 4 ? 3 : 2, kSums = 16 * Spans, kResults = 8 * Spans;
  static constexpr int kStages = Stages, kColumn = kTileTokens / 2 + 4;  // the 4 spread columns over banks
  static constexpr float kUnit = 0x1p15f;                           // of weights
  static constexpr size_t kNone = ~size_t{0};

  const Layout& layout;
  const State& state;
  const WarpScratch& buffers;
  Word4* ring;        // [stage][4][lane]
  uint32_t* columns;  // of weights: [query][high, low][pair of tokens]
  Word2* products;    // [sinks][step][lane], of queries
  float power = 0, power_of_sinks = 0;  // what products with this lane's query are counted in
  int g = lane() / 4, t = lane() % 4;
  unsigned stage = 0;
  size_t now = kNone, then = kNone, copied = kNone;  // the first number of a tile, of keys and of values
  const Half* from = nullptr;                        // of what is copied
  int left = 0, span = 0, line = 0;                  // steps of it, and the channels and tokens of values
  bool of_keys = false;

  static GRAPHOPT_BOTH int channels(const Layout& layout) { return Size ? Size : static_cast<int>(layout.size); }
  static GRAPHOPT_BOTH int key_steps(const Layout& layout) { return channels(layout) / 16; }
  static GRAPHOPT_BOTH size_t bytes(const Layout& layout, bool sinks) {
    const size_t queries = static_cast<size_t>(key_steps(layout)) * kWarp * sizeof(Word2);
    return kStages * 4 * kWarp * sizeof(Word4) + 2 * kQueries * kColumn * sizeof(uint32_t) + (sinks ? 2 : 1) * queries;
  }

  GRAPHOPT_DEVICE HalfPages(const Layout& layout, const State& state, const WarpScratch& buffers)
      : layout(layout), state(state), buffers(buffers) {
    ring = reinterpret_cast<Word4*>(buffers.pages);
    columns = reinterpret_cast<uint32_t*>(ring + kStages * 4 * kWarp);
    products = reinterpret_cast<Word2*>(columns + 2 * kQueries * kColumn);
  }

  // Splits the queries.
  GRAPHOPT_DEVICE void prepare(bool sinks) {
    power = split(false);
    if (sinks) power_of_sinks = split(true);
  }

  // Both parts of two numbers.
  static GRAPHOPT_DEVICE uint32_t rest_of(float a, float b, uint32_t high) {
    return half2_of(a - to_float(half_low(high)), b - to_float(half_high(high)));
  }

  // Each lane splits what it multiplies, a part of query g / 2, and returns what products with its own are counted in.
  GRAPHOPT_DEVICE float split(bool sinks) const {
    const float* const query = buffers.query(sinks, g / 2);
    Word2* const to = products + (sinks ? key_steps(layout) * kWarp : 0) + lane();
    float most = 0;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4 * Spans; ++i) {
      const int c = 16 * i + 4 * t;
      if (c >= channels(layout)) continue;
      const Four four = load_four(query + c);
      GRAPHOPT_UNROLL
      for (int k = 0; k < 4; ++k) most = magnitude_of(four.number[k]) > most ? magnitude_of(four.number[k]) : most;
    }
    const float unit = power_below(reduce_max<4>(most)), inverse = inverse_of_power(unit) * 0x1p14f;
    for (int step = 0; step < key_steps(layout); ++step) {
      Word2 pairs;
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float a = query[16 * step + 8 * i + t] * inverse, b = query[16 * step + 8 * i + 4 + t] * inverse;
        const uint32_t high = half2_of(a, b), rest = rest_of(a, b, high);
        pairs.words[i] = g % 2 ? rest : high;
      }
      to[step * kWarp] = pairs;
    }
    return shuffle(unit * 0x1p-14f, 8 * t);
  }

  GRAPHOPT_DEVICE size_t first_of(const Tile& tile) const {
    if (!tile.there) return kNone;
    const size_t place = place_of(layout, buffers.reading->head, tile.page);
    return (place * layout.page + static_cast<size_t>(tile.offset)) * static_cast<size_t>(channels(layout));
  }
  GRAPHOPT_DEVICE int tokens() const {
    return layout.page < kTileTokens ? static_cast<int>(layout.page) : kTileTokens;
  }
  GRAPHOPT_DEVICE int spans() const { return (channels(layout) + 63) / 64; }
  // Of 16 tokens; a tile has at least as many steps as are copied ahead.
  GRAPHOPT_DEVICE int fours() const { return tokens() < 32 ? 2 : tokens() / 16; }
  static_assert(kStages == 4 || (Size == 128 && kStages <= 9), "the smallest tile has 3 steps; of 128 channels and 64 tokens 16");
  // The first keys of what eight lanes copy, from 16 tokens.
  GRAPHOPT_DEVICE const Half* keys_at(size_t first, int sixteen) const {
    const size_t block = static_cast<size_t>(16 * sixteen * channels(layout));
    return reinterpret_cast<const Half*>(state.keys) + first + block;
  }
  // Where in a fourth of a step this lane finds what it multiplies, in 16 bytes: the same eight lanes copied the keys.
  // Values are spread over banks, as eight lanes copy one token, and multiply four.
  GRAPHOPT_DEVICE int place_of_keys() const { return g / 2 * 8 + 2 * t + g % 2; }
  static GRAPHOPT_DEVICE int place_of_values(int token, int eight) { return 8 * token + (eight ^ (2 * token)); }

  // What is copied next: keys of a tile, its values, keys of the next one.
  GRAPHOPT_DEVICE void turn() {
    of_keys = !of_keys;
    if (of_keys) copied = then;
    left = of_keys ? key_steps(layout) : fours() * spans();
    if (of_keys) {
      from = keys_at(copied, lane() / 8) + lane() % 8 * 8;
    } else {
      span = 0, line = lane() / 8 * 4;
      from = reinterpret_cast<const Half*>(state.values) + copied + static_cast<size_t>(line * channels(layout));
      from += lane() % 8 * 8;
    }
  }
  // Copies a step, which may be of the next tile.
  GRAPHOPT_DEVICE void copy() {
    const int size = channels(layout);
    Word4* const step = ring + stage % kStages * (4 * kWarp);
    ++stage;
    if (left == 0) turn();
    --left;
    if (copied != kNone && of_keys) {
      Word4* const to = step + lane();
      const bool there = lane() / 8 * 16 < tokens();
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) copy_async16(to + i * kWarp, from + 64 * i, there);
      from += 256;
    } else if (copied != kNone) {
      Word4* const to = step + place_of_values(lane() / 8, lane() % 8);
      const bool there = 64 * span + lane() % 8 * 8 < size && line < tokens();
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) copy_async16(to + i * kWarp, from + i * size, there);
      from += 64, ++span;
      if (span == spans()) from += 16 * size - 64 * span, span = 0, line += 16;
    }
    commit_copies();
  }
  // The next step, once it is there; `place` is this lane's. All lanes.
  GRAPHOPT_DEVICE void take(int place, Word4 (&words)[4]) {
    wait_copies<kStages - 2>();
    sync_warp();  // all lanes' copies are there, and all lanes have read the step before
    const Word4* const at = ring + (stage + 1) % kStages * (4 * kWarp) + place;
    copy();  // to where the last one was taken from
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = load16(at + i * kWarp);
  }

  GRAPHOPT_DEVICE void begin(const Tile& tile) {
    then = first_of(tile);
    GRAPHOPT_NO_UNROLL
    for (int step = 0; step < kStages - 1; ++step) copy();
  }
  GRAPHOPT_DEVICE void open(const Tile& tile, const Tile& next) { now = first_of(tile), then = first_of(next); }

  // The rows of four products: pairs of neighbouring loads.
  static GRAPHOPT_DEVICE void multiply(const Word4 (&loaded)[4], const Word2& column, float (*sums)[4]) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t a[4] = {byte_permute(loaded[0].words[i], loaded[1].words[i], 0x5410),
                             byte_permute(loaded[0].words[i], loaded[1].words[i], 0x7632),
                             byte_permute(loaded[2].words[i], loaded[3].words[i], 0x5410),
                             byte_permute(loaded[2].words[i], loaded[3].words[i], 0x7632)};
      multiply_f16(sums[i], a, column.words);
    }
  }

  // `again` where the keys were taken before.
  GRAPHOPT_DEVICE void score(const Tile& tile, bool sinks, bool again, float (&scores)[kLaneTokens]) {
    float sums[4][4] = {};
    const Word2* const queries = products + (sinks ? key_steps(layout) * kWarp : 0) + lane();
    GRAPHOPT_NO_UNROLL
    for (int step = 0; step < key_steps(layout); ++step) {
      Word4 key[4] = {};
      if (!again) {
        take(place_of_keys(), key);
      } else if (8 * g < tile.tokens) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) key[i] = load16(keys_at(now, g / 2) + (256 * step + 64 * i + 16 * t + g % 2 * 8));
      }
      multiply(key, load8(queries + step * kWarp), sums);
    }
    const float unit = sinks ? power_of_sinks : power;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      const float(&sum)[4] = sums[i / 2];
      scores[i] = (sum[i % 2 * 2] + sum[i % 2 * 2 + 1]) * unit;
    }
  }
  GRAPHOPT_DEVICE void close_keys() {}
  GRAPHOPT_DEVICE float* parking() const { return reinterpret_cast<float*>(columns); }

  // Sets numbers to 0 that are not finite, and returns bits of which one is set if there were any.
  static GRAPHOPT_DEVICE uint32_t clear_bad(uint32_t& pair) {
    const uint32_t bad = ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
    pair &= ~((bad >> 15) * 0xffffu);
    return bad;
  }

  GRAPHOPT_DEVICE void keep(const float (&weights)[kLaneTokens]) const {
    Word4 high, rest;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float a = weights[2 * i] * kUnit, b = weights[2 * i + 1] * kUnit;
      high.words[i] = half2_of(a, b), rest.words[i] = rest_of(a, b, high.words[i]);
    }
    sync_warp();  // all lanes have read those of the tile before
    store16(columns + 2 * t * kColumn + 4 * g, high);
    store16(columns + (2 * t + 1) * kColumn + 4 * g, rest);
    sync_warp();
  }

  GRAPHOPT_DEVICE void add(const Tile& tile, float factor, const float (&weights)[kLaneTokens], float (&sums)[kSums]) {
    float(*const products_of)[4] = reinterpret_cast<float(*)[4]>(sums);
    keep(weights);
    if (factor != 1) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] *= factor;
    }
    uint32_t bad = 0;
    GRAPHOPT_NO_UNROLL
    for (int four = 0; four < fours(); ++four) {
      const Word2 column = load8(columns + g * kColumn + 8 * four + 2 * t);
      GRAPHOPT_UNROLL
      for (int span = 0; span < Spans; ++span) {
        if (64 * span >= channels(layout)) break;
        Word4 value[4];
        take(place_of_values(t, g), value);
        if (!tile.all) {
          // others than those read can hold NaN or infinity, and 0 times those is not 0
          const uint32_t read = static_cast<uint32_t>(tile.any >> (16 * four + 4 * t));
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            if (!(read >> i & 1)) value[i] = {};
          }
        }
        if (!tile.alike) {
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            uint32_t(&words)[4] = value[i].words;
            bad |= clear_bad(words[0]) | clear_bad(words[1]) | clear_bad(words[2]) | clear_bad(words[3]);
          }
        }
        multiply(value, column, products_of + 4 * span);
      }
    }
    if (!tile.alike && ballot(bad != 0)) spoil_sums(tile, sums);
  }

  // A value that is not finite reaches the results of the queries that read it, and of no others.
  GRAPHOPT_DEVICE void spoil_sums(const Tile& tile, float (&sums)[kSums]) const {
    uint32_t bad = 0;  // a bit for each result
    GRAPHOPT_NO_UNROLL
    for (int token = 0; token < tile.tokens; ++token) {
      if (!(tile.seen >> token & 1)) continue;
      const Half* const value =
          reinterpret_cast<const Half*>(state.values) + now + static_cast<size_t>(token) * layout.size;
      GRAPHOPT_NO_UNROLL
      for (int i = 0; i < kResults; ++i) {
        const int c = channel(i);
        if (c < static_cast<int>(layout.size) && (value[c].bits & 0x7c00) == 0x7c00) bad |= 1u << i;
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < kResults; ++i) {
      if (bad >> i & 1) sums[2 * i] = __builtin_nanf("");
    }
  }

  GRAPHOPT_DEVICE void finish() { wait_copies<0>(); }
  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int i) const {
    return (sums[2 * i] + sums[2 * i + 1]) * (1 / kUnit);
  }
};

}  // namespace graphopt
