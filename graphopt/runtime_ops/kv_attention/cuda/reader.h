// What a warp has before it that reads pages for 4 queries, and how its lanes share them.
//
// Lane 4 g + t stands for query t. Of 64 tokens it holds the scores of 8, and of the result 8 of each 64 channels:
// which ones depends on how a storage lays out its pages, so that what is loaded as 16 bytes is multiplied in the lane
// that loaded it. In products of matrices rows are tokens, or channels, and columns are the high and the low parts of
// the queries, or of their weights: so a lane's sums are of its own query, both parts of them.
#pragma once

#include "cuda/matrix.h"
#include "kv_attention/cuda/call.h"
#include "kv_attention/cuda/plan.h"

namespace graphopt {

constexpr int kQueries = kTileQueries, kTileTokens = 64, kLaneTokens = 8;
constexpr int kSlotTokens = kTileTokens / kAttendWarps;  // of a tile in a slot
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945f;

// The power of two at or below |x|, which float16 numbers are counted in; its inverse is exact.
GRAPHOPT_DEVICE float power_below(float x) {
  const float power = float_of_bits(bits_of_float(x) & 0x7f800000u);
  return power < 0x1p-112f ? 0x1p-112f : power > 0x1p126f ? 0x1p126f : power;
}
GRAPHOPT_DEVICE float inverse_of_power(float power) { return float_of_bits((254u << 23) - bits_of_float(power)); }

// Over the lanes that share a query's tokens; NaN propagates.
GRAPHOPT_DEVICE float most_of_query(float x) {
  GRAPHOPT_UNROLL
  for (int mask = 4; mask < kWarp; mask *= 2) x = max_or_nan(x, shuffle_xor(x, mask));
  return x;
}
GRAPHOPT_DEVICE float sum_of_query(float x) {
  GRAPHOPT_UNROLL
  for (int mask = 4; mask < kWarp; mask *= 2) x = x + shuffle_xor(x, mask);
  return x;
}

// Up to 64 tokens of a page: where they are, and what is read of them.
struct Tile {
  int64_t page;  // of the sequence
  int offset;    // the first token in the page
  int tokens;
  bool whole;     // nothing of the page is left out, but for a window
  bool there;     // there is one
  bool all;       // every query of the warp reads every token
  bool alike;     // all queries read the same tokens
  uint64_t seen;  // bit i: this lane's query reads token i
  uint64_t any;   // of all queries
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

// What all lanes of a warp share, so that it need not stay in registers.
struct alignas(16) Reading {
  PageRange range;  // of pages, where there is no list
  const int32_t* list;
  int64_t first, last;  // positions of the queries
  int64_t newest;       // the last page that has a token
  uint32_t head;        // among those of all rows
  bool whole;           // all pages are read whole, but for a window
  bool slots;           // some pages of the block may be in slots
};

// Goes through the tiles of a warp: of every kAttendWarps-th page of its block's, from `index` on. Pages in slots, which
// take long, come last, and there each warp takes 16 tokens of 64.
struct Walk {
  int begin, index, end, offset = 0;
  bool in_slots = false;

  GRAPHOPT_DEVICE void step() {
    offset = in_slots ? kSlotTokens * warp() : 0;
    index += in_slots ? 1 : kAttendWarps;
  }
  template <bool Slots>
  GRAPHOPT_DEVICE Tile take(const Layout& layout, const Reading& reading) {
    Tile tile = {};
    const int tokens = static_cast<int>(layout.page);
    GRAPHOPT_NO_UNROLL
    for (;; step()) {
      if (index >= end) {
        if (!Slots || in_slots || !reading.slots) return tile;
        in_slots = true, index = begin, offset = kSlotTokens * warp();
      }
      tile.whole = reading.whole;
      if (reading.list) tile.page = reading.list[index] >> 1, tile.whole = reading.list[index] & 1;
      else tile.page = reading.range.page(static_cast<size_t>(index));
      if (!Slots || (layout.in_slot(tile.page, reading.newest) == in_slots && offset < tokens)) break;
    }
    tile.there = true;
    tile.offset = offset, tile.tokens = in_slots ? kSlotTokens : tokens < kTileTokens ? tokens : kTileTokens;
    offset += kTileTokens;
    if (offset >= tokens) step();
    return tile;
  }
};

// What is read of a tile; `behind` is how far this lane's query is from the last, -1 where it has none. All lanes.
GRAPHOPT_DEVICE void look_at(const Layout& layout, const Reading& reading, int behind, Tile& tile) {
  const int64_t base = tile.page * static_cast<int64_t>(layout.page) + tile.offset;
  const uint64_t every = ~uint64_t{0} >> (64 - tile.tokens);
  tile.all = tile.alike = true, tile.seen = tile.any = every;
  if (!tile.whole || layout.window || base + tile.tokens > reading.first + 1) {
    const auto seen_at = [&](int64_t position) {
      return bits_of(visible(layout, position, tile.page, tile.whole), tile.offset, tile.tokens);
    };
    tile.seen = seen_at(reading.last);
    tile.alike = reading.first == reading.last;
    tile.all = tile.seen == every;
    if (!tile.alike) {
      // if two queries read all of it, all queries between them do
      tile.all = tile.alike = tile.all && seen_at(reading.first) == every;
      tile.seen = seen_at(reading.last - behind);
    }
    tile.any = behind < 0 ? 0 : tile.seen;
    if (!tile.all) tile.any |= shuffle_xor(tile.any, 1), tile.any |= shuffle_xor(tile.any, 2);
  }
  if (behind < 0) tile.seen = 0;
}

// The queries of a block in shared memory, times the scale, and behind them those for tokens below the sinks.
struct SharedQueries {
  float* numbers;
  int stride;  // from query to query

  GRAPHOPT_BOTH SharedQueries(char* memory, const Layout& layout)
      : numbers(reinterpret_cast<float*>(memory)), stride(stride_of(layout)) {}
  static GRAPHOPT_BOTH int stride_of(const Layout& layout) {
    return static_cast<int>((layout.size + 31) / 32 * 32) + 4;  // the 4 spread queries over banks
  }
  static GRAPHOPT_BOTH size_t bytes(const Layout& layout, bool sinks) {
    return static_cast<size_t>((sinks ? 2 : 1) * kQueries * stride_of(layout)) * sizeof(float);
  }
  GRAPHOPT_DEVICE float* query(bool sinks, int index) const {
    return numbers + ((sinks ? kQueries : 0) + index) * stride;
  }
};

// The shared memory of a warp: what it reads, and in the end its results.
struct WarpScratch {
  SharedQueries queries;
  Reading* reading;
  float *largest, *sums;  // of each query
  char* pages;            // for the storage's own use, and in the end for values, [query][size]

  GRAPHOPT_BOTH WarpScratch(const SharedQueries& queries, char* memory) : queries(queries) {
    reading = reinterpret_cast<Reading*>(memory);
    largest = reinterpret_cast<float*>(reading + 1), sums = largest + kQueries;
    pages = reinterpret_cast<char*>(sums + kQueries);
  }
  static constexpr size_t kBytes = sizeof(Reading) + 2 * kQueries * sizeof(float);  // and those of the storage

  GRAPHOPT_DEVICE const float* query(bool sinks, int index) const { return queries.query(sinks, index); }
  GRAPHOPT_DEVICE float* values() const { return reinterpret_cast<float*>(pages); }
};

// Of this lane's query: the largest score, and the sum of the weights that this lane has seen; scores are logarithms
// to base 2.
struct Softmax {
  float largest = kNothing, sum = 0;

  // Turns scores into weights, of tokens that are not read into 0; `read` has a bit for each. Returns the factor of
  // what came before.
  GRAPHOPT_DEVICE float weigh(const Layout& layout, uint32_t read, bool finite, float (&scores)[kLaneTokens]) {
    if (!finite) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kLaneTokens; ++i) scores[i] = spoil(scores[i]);
    }
    if (layout.softcap != 0) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kLaneTokens; ++i) scores[i] = soften(layout, scores[i]) * kLog2E;
    }
    if (read != 0xff) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kLaneTokens; ++i) scores[i] = read >> i & 1 ? scores[i] : kNothing;
    }
    float most = largest;  // NaN is never larger
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) most = scores[i] > most ? scores[i] : most;
    GRAPHOPT_UNROLL
    for (int mask = 4; mask < kWarp; mask *= 2) {
      const float other = shuffle_xor(most, mask);
      most = other > most ? other : most;
    }
    const float factor = largest == most ? 1.0f : exp2_of(largest - most);
    largest = most;
    const float zero = most == kNothing ? 0.0f : most;  // where nothing is read the difference would be NaN
    float added = 0;
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      scores[i] = exp2_of(scores[i] - zero);
      added += scores[i];
    }
    sum = multiply_add(sum, factor, added);
    return factor;
  }
};

// Where a page of a head lies in tensors that have as many pages as the cache.
GRAPHOPT_DEVICE size_t place_of(const Layout& layout, uint32_t head, int64_t page) {
  const size_t first = head * layout.pages;
  if (page < static_cast<int64_t>(layout.pages)) return first + static_cast<size_t>(page);  // without a division
  return first + layout.physical(page);
}

}  // namespace graphopt
