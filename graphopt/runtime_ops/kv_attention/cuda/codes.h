// Pages of 8-bit or 4-bit codes, multiplied by tensor cores as bytes, and the newest pages in their slots, as floats.
//
// key = low + step code, with a scale for each channel: q . key = sum q low + sum (q step) code. So for each page the
// queries are multiplied with the steps and rounded to integers of 16 bits, of which the largest is about 2^15; high
// and low bytes are columns of a product with codes. value = low + step code, with a scale for each token: the same
// with weights. Sums of a page are exact, and added as floats.
//
// Keys of a page and its values, with their scales, are copied to shared memory asynchronously, as soon as the keys or
// values there are done with. Eight neighbouring lanes copy 128 bytes that lie together, as the GPU asks its L2 for what
// eight lanes want at a time; the lanes that multiply them are others.
#pragma once

#include "kv_attention/cuda/bytes.h"
#include "kv_attention/cuda/slots.h"

namespace graphopt {

template <int Bits, int Spans>
struct CodePages : CodePlaces {
  static constexpr bool kFinite = true, kSlots = true, kNarrow = Bits == 4;
  static constexpr int kSums = 8 * Spans, kResults = 8 * Spans;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr int kBlocks = Spans == 2 ? (kNarrow ? 4 : 3) : 2;
#else
  static constexpr int kBlocks = Spans == 2 ? 3 : 2;  // sm_80 has shared memory for so many, and their registers
#endif
  static constexpr int kSteps = 2 * Spans;            // of 32 channels
  static constexpr int kLoads = kNarrow ? 1 : 2;      // of 16 bytes that a lane has of 32 x 32 codes
  static constexpr int kColumn = kTileTokens / 4 + 4; // the 4 spread columns over banks

  const Layout& layout;
  const State& state;
  const WarpScratch& buffers;
  Word4 *keys, *values;                    // [32 channels][32 tokens][place]
  Half *key_scales, *value_scales;         // [low, step][size], [low, step][64]
  uint32_t* columns;                       // of weights: [query][high, low][four tokens]
  FloatWeights floats;                     // in the same place, for slots
  float base = 0;                          // this lane's part of the sum of the values' lows
  Tile next = {};                          // that is copied next
  bool in_slot = false;
  int g = lane() / 4, t = lane() % 4;

  static GRAPHOPT_BOTH int steps(const Layout& layout) { return static_cast<int>((layout.size + 31) / 32); }
  static GRAPHOPT_BOTH size_t bytes(const Layout& layout, bool) {
    const size_t codes = static_cast<size_t>(steps(layout)) * 2 * kLoads * kWarp * sizeof(Word4);
    return 2 * codes + (2 * layout.size + 2 * kTileTokens) * sizeof(Half) + FloatWeights::kBytes;
  }

  GRAPHOPT_DEVICE CodePages(const Layout& layout, const State& state, const WarpScratch& buffers)
      : layout(layout), state(state), buffers(buffers) {
    keys = reinterpret_cast<Word4*>(buffers.pages);
    values = keys + steps(layout) * 2 * kLoads * kWarp;
    key_scales = reinterpret_cast<Half*>(values + steps(layout) * 2 * kLoads * kWarp);
    value_scales = key_scales + 2 * layout.size;
    floats.weights = reinterpret_cast<float*>(value_scales + 2 * kTileTokens);
    columns = reinterpret_cast<uint32_t*>(floats.weights);
    static_assert(2 * kQueries * kColumn * sizeof(uint32_t) <= FloatWeights::kBytes, "one of them at a time");
  }

  GRAPHOPT_DEVICE bool copies(const Tile& tile) const {
    return tile.there && !layout.in_slot(tile.page, buffers.reading->newest);
  }

  // The codes of 32 tokens by 32 channels: two blocks, of keys 16 tokens each, of values 16 channels, in which 64 bytes
  // are four codes of each of the 16, or eight. Lane group g multiplies fours 4 (g / 4) to 4 (g / 4) + 3 of them.
  static constexpr int kLines = 4 * kLoads;  // of 64 bytes, in each block
  // Where 16 bytes of a line are put, four of a token or channel each: lines of other t are in other banks.
  static GRAPHOPT_DEVICE int place_of_codes(int block, int line, int four) {
    if constexpr (kNarrow) return 16 * block + line / 2 * 8 + ((line % 2 * 4 + four) ^ (line / 2 * 2));
    return 32 * block + line / 2 * 8 + ((line % 2 * 4 + four) ^ (line / 2 * 2));
  }
  // Copies codes of 32 by 32, the blocks of which are `apart`; what is not `there` of either block becomes 0.
  template <typename There>
  GRAPHOPT_DEVICE void copy_codes(Word4* to, const char* from, size_t apart, const There& there) const {
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int block = kNarrow ? lane() / 16 : i, line = lane() / 4 % kLines, four = lane() % 4;
      const char* const at = from + static_cast<size_t>(block) * apart + (64 * line + 16 * four);
      copy_async16(to + place_of_codes(block, line, four), at, there(block, line));
    }
  }
  // Keys [page / 16, size / 4 (or 8), 16, 4].
  GRAPHOPT_DEVICE void copy_keys(const Tile& tile) {
    if (copies(tile)) {
      const size_t of_page = place_of(layout, buffers.reading->head, tile.page);
      const int words = static_cast<int>(layout.size) / (kNarrow ? 8 : 4);
      const char* const from = state.keys + of_page * layout.key_bytes() + tile.offset / 16 * words * 64;
      GRAPHOPT_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step >= steps(layout)) break;
        GRAPHOPT_UNROLL
        for (int half = 0; half < 2; ++half) {
          copy_codes(keys + (2 * step + half) * kLoads * kWarp, from + (2 * half * words + step * kLines) * 64,
                     static_cast<size_t>(words) * 64, [&](int block, int line) {
                       return step * kLines + line < words && 32 * half + 16 * block < tile.tokens;
                     });
        }
      }
      const Half* const scales = state.scales + of_page * layout.scales();
      for (int i = 8 * lane(); i < 2 * static_cast<int>(layout.size); i += 8 * kWarp) {
        copy_async16(key_scales + i, scales + i, true);
      }
    }
    commit_copies();
  }
  // Values [size / 16, page / 4 (or 8), 16, 4].
  GRAPHOPT_DEVICE void copy_values(const Tile& tile) {
    if (copies(tile)) {
      const size_t of_page = place_of(layout, buffers.reading->head, tile.page);
      const int page = static_cast<int>(layout.page), size = static_cast<int>(layout.size);
      const int words = page / (kNarrow ? 8 : 4);
      const char* const from =
          state.values + of_page * layout.value_bytes() + tile.offset / (kNarrow ? 8 : 4) * 64;
      GRAPHOPT_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if (step >= steps(layout)) break;
        GRAPHOPT_UNROLL
        for (int half = 0; half < 2; ++half) {
          copy_codes(values + (2 * step + half) * kLoads * kWarp, from + (2 * step * words + half * kLines) * 64,
                     static_cast<size_t>(words) * 64, [&](int block, int line) {
                       return 32 * step + 16 * block < size && 32 * half + (kNarrow ? 8 : 4) * line < tile.tokens;
                     });
        }
      }
      const int which = lane() / 8, at = lane() % 8 * 8;  // of the lanes that copy
      const Half* const scales = state.scales + of_page * layout.scales() + 2 * size + which * page + tile.offset;
      if (which < 2) copy_async16(value_scales + 8 * lane(), scales + at, at < tile.tokens);
    }
    commit_copies();
  }

  GRAPHOPT_DEVICE void begin(const Tile& tile) { copy_keys(tile), copy_values(tile); }
  GRAPHOPT_DEVICE void prepare(bool) {}
  GRAPHOPT_DEVICE void open(const Tile& tile, const Tile& after) {
    in_slot = layout.in_slot(tile.page, buffers.reading->newest);
    if (in_slot) {
      const float* const from = slot(tile);
      for (int i = 32 * lane(); i < tile.tokens * static_cast<int>(layout.size); i += 32 * kWarp) {
        prefetch(from + i), prefetch(from + layout.page * layout.size + i);
      }
    }
    next = after;
    wait_copies<1>();
    sync_warp();
  }
  GRAPHOPT_DEVICE const float* slot(const Tile& tile) const {
    const size_t place = buffers.reading->head * layout.slots() + layout.slot(tile.page);
    return state.recent + place * layout.slot_floats() + static_cast<size_t>(tile.offset) * layout.size;
  }

  // What this lane multiplies of 32 by 32 codes.
  GRAPHOPT_DEVICE void load(const Word4* from, Word4 (&loaded)[kLoads]) const {
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLoads; ++i) loaded[i] = load16(from + place_of_codes(g / 4, kLoads * t + i, g % 4));
  }

  // The queries times the steps of the keys, as columns: lanes 2 j and 2 j + 1 of g share query j, first each makes
  // what is multiplied with every other four channels. Returns what products of this lane's query are counted in.
  GRAPHOPT_DEVICE float fold(bool sinks, uint32_t (&column)[kSteps][2], float& lows) const {
    const bool odd = g % 2;
    const float* const query = buffers.query(sinks, g / 2) + 8 * t + 4 * (g % 2);
    const Half* const scale = key_scales + 8 * t + 4 * (g % 2);
    float products[kSteps][4], most = 0, sum = 0;
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) products[step][i] = 0;
      if (32 * step + 8 * t >= static_cast<int>(layout.size)) continue;
      const Four of_query = load_four(query + 32 * step), low = load_four(scale + 32 * step);
      const Four size = load_four(scale + layout.size + 32 * step);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        products[step][i] = of_query.number[i] * size.number[i];
        sum = multiply_add(of_query.number[i], low.number[i], sum);
        most = max_or_nan(most, magnitude_of(products[step][i]));
      }
    }
    GRAPHOPT_UNROLL
    for (int mask = 1; mask < 8; mask *= 2) {
      most = max_or_nan(most, shuffle_xor(most, mask)), sum = sum + shuffle_xor(sum, mask);
    }
    const Unit unit(most);
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const Bytes bytes(products[step], unit.inverse);
      const uint32_t other = shuffle_xor(odd ? bytes.high : bytes.rest, 4);
      column[step][0] = odd ? other : bytes.high, column[step][1] = odd ? bytes.rest : other;
    }
    lows = spoil(shuffle(sum, 8 * t));
    return shuffle(unit.unit, 8 * t);
  }

  GRAPHOPT_DEVICE void score(const Tile& tile, bool sinks, bool, float (&scores)[kLaneTokens]) {
    const int size = static_cast<int>(layout.size);
    if (in_slot) return score_slot(slot(tile), buffers, sinks, size, scores);
    uint32_t column[kSteps][2];
    float lows;
    const float unit = fold(sinks, column, lows);
    int32_t sums[4][4] = {};
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (32 * step >= size) break;
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i % 2) continue;
        Word4 loaded[kLoads];
        load(keys + (2 * step + i / 2) * kLoads * kWarp, loaded);
        GRAPHOPT_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t a[4];
          codes_of_rows<Bits>(loaded, row, a);
          multiply_u8s8(sums[i + row], a, column[step]);
        }
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      const int32_t(&sum)[4] = sums[i / 2];
      scores[i] = multiply_add(Bytes::sum_of(sum[i % 2 * 2], sum[i % 2 * 2 + 1]), unit, lows);
    }
  }
  GRAPHOPT_DEVICE float* parking() const { return floats.weights; }
  // The keys of this tile are done with.
  GRAPHOPT_DEVICE void close_keys() {
    sync_warp();
    copy_keys(next);
    wait_copies<1>();
    sync_warp();
  }

  GRAPHOPT_DEVICE void add(const Tile& tile, float factor, const float (&weights)[kLaneTokens], float (&sums)[kSums]) {
    if (factor != 1) {
      base *= factor;
      GRAPHOPT_UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] *= factor;
    }
    if (in_slot) {
      floats.keep(token(0), weights), floats.keep(token(4), weights + 4);
      sync_warp();
      const float* const from = slot(tile) + layout.page * layout.size;
      add_slot(from, floats.own(), static_cast<int>(layout.size), tile.seen, sums);
    } else {
      add_codes(tile, weights, sums);
    }
    sync_warp();
    copy_values(next);
  }

  // The weights times the steps of the values, as columns, and to `base` this lane's part of the weights times their
  // lows. Returns what products of this lane's query are counted in.
  GRAPHOPT_DEVICE float weigh_values(const Tile& tile, const Half* scales, const float (&weights)[kLaneTokens],
                                     float& base, uint32_t* columns) const {
    float numbers[2][4], most = 0;
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int first = token(4 * half);
      const Four low = load_four(scales + first), step = load_four(scales + kTileTokens + first);
      const uint32_t read = static_cast<uint32_t>(tile.seen >> first);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const bool is_read = read >> i & 1;  // others can have any scale
        const float weight = weights[4 * half + i];
        numbers[half][i] = is_read ? weight * step.number[i] : 0.0f;
        base = multiply_add(weight, is_read ? low.number[i] : 0.0f, base);
        most = max_or_nan(most, magnitude_of(numbers[half][i]));
      }
    }
    const Unit unit(most_of_query(most));
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Bytes bytes(numbers[half], unit.inverse);
      columns[2 * t * kColumn + 8 * half + g] = bytes.high;
      columns[(2 * t + 1) * kColumn + 8 * half + g] = bytes.rest;
    }
    return unit.unit;
  }

  GRAPHOPT_DEVICE void add_codes(const Tile& tile, const float (&weights)[kLaneTokens], float (&sums)[kSums]) {
    const float unit = weigh_values(tile, value_scales, weights, base, columns);
    uint32_t column[2][2];
    sync_warp();
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Word2 own = load8(columns + g * kColumn + 8 * half + 2 * t);
      column[half][0] = own.words[0], column[half][1] = own.words[1];
    }
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (32 * step >= static_cast<int>(layout.size)) break;
      int32_t products[2][4] = {};
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        Word4 loaded[kLoads];
        load(values + (2 * step + half) * kLoads * kWarp, loaded);
        GRAPHOPT_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t a[4];
          codes_of_rows<Bits>(loaded, row, a);
          multiply_u8s8(products[row], a, column[half]);
        }
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int32_t(&product)[4] = products[i / 2];
        float& sum = sums[4 * step + i];
        sum = multiply_add(Bytes::sum_of(product[i % 2 * 2], product[i % 2 * 2 + 1]), unit, sum);
      }
    }
  }

  GRAPHOPT_DEVICE void finish() {
    wait_copies<0>();
    base = sum_of_query(base);
  }
  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int i) const { return sums[i] + base; }
};

}  // namespace graphopt
