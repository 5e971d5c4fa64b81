// Many queries of one head, of new tokens or a prompt, over pages of float16: a block reads each page once for 16 of them,
// its warps together. For heads of 128 channels and pages of 64 or 128 tokens.
//
// Of a page's scores each warp sums over a fourth of the channels, for all queries; through shared memory each warp then
// gets those of 4 queries, and makes weights of them as elsewhere. Of the results a warp has half of the channels of 8
// queries.
#include "cuda/launch.h"
#include "kv_attention/cuda/halves.h"
#include "kv_attention/cuda/wide.h"

namespace graphopt {
namespace {

using Pages = HalfPages<2>;

constexpr int kChannels = kWideChannels, kKeySteps = kChannels / 16, kStages = 2, kColumn = Pages::kColumn;
// Of values 4 tokens lie together, and 32 bytes further apart than they are long: that spreads loads over banks.
constexpr unsigned kPiece = 4 * kChannels * 2, kApart = kPiece + 32;
constexpr unsigned kKeyBytes = kTileTokens * kChannels * 2, kValueBytes = kKeyBytes / kPiece * kApart;
constexpr unsigned kWord = sizeof(Word4), kCopies = kKeyBytes / kWord / kWideThreads;  // of a thread
static_assert(kWideThreads * kWord % kPiece == 0, "copies of a thread lie whole pieces apart");
static_assert(kWideTiles == 4, "warps share channels and queries so");

// The shared memory of a block.
struct WideMemory {
  uint64_t *seen, *any;             // of each query, and of those of each warp
  float *factors, *largest, *sums;  // of each query
  Word2* products;                  // [tile][step][lane]
  uint32_t* columns;                // [query][high, low][pair of tokens]
  Word4* parts;                     // of scores: [tile][warp][2][lane]; before that queries, in the end results
  char *keys, *values;              // [stage]

  static constexpr size_t kPartBytes = kWideTiles * kWideTiles * 2 * kWarp * sizeof(Word4);
  static constexpr size_t kSmall = kWideQueries + kWideTiles;  // of 8 bytes
  static constexpr size_t kBytes = kSmall * 8 + 3 * kWideQueries * 4 + kWideTiles * kKeySteps * kWarp * sizeof(Word2) +
                                   2 * kWideQueries * kColumn * 4 + kPartBytes + kStages * (kKeyBytes + kValueBytes);
  static_assert(kSmall % 2 == 0, "what follows is aligned");

  GRAPHOPT_DEVICE explicit WideMemory(char* memory) {
    seen = reinterpret_cast<uint64_t*>(memory), any = seen + kWideQueries;
    factors = reinterpret_cast<float*>(any + kWideTiles), largest = factors + kWideQueries, sums = largest + kWideQueries;
    products = reinterpret_cast<Word2*>(sums + kWideQueries);
    columns = reinterpret_cast<uint32_t*>(products + kWideTiles * kKeySteps * kWarp);
    parts = reinterpret_cast<Word4*>(columns + 2 * kWideQueries * kColumn);
    keys = reinterpret_cast<char*>(parts) + kPartBytes, values = keys + kStages * kKeyBytes;
  }
  GRAPHOPT_DEVICE float* query(const Layout& layout, int index) const {
    return reinterpret_cast<float*>(parts) + index * SharedQueries::stride_of(layout);
  }
};
static_assert(kWideQueries * (kChannels + 4) * sizeof(float) <= WideMemory::kPartBytes, "queries lie there first");

// Copies to a stage by all threads, each as a group of its own; where there is no tile the group is empty.
struct WideCopies {
  const Layout& layout;
  const State& state;
  const WideMemory& memory;
  uint32_t head;

  // Where in a tile's bytes this thread copies first.
  GRAPHOPT_DEVICE const char* first_of(const char* numbers, const Tile& tile) const {
    const size_t token = place_of(layout, head, tile.page) * layout.page + static_cast<size_t>(tile.offset);
    return numbers + token * (kChannels * sizeof(Half)) + thread_index().x * kWord;
  }
  GRAPHOPT_DEVICE void copy_keys(const Tile& tile, int stage) const {
    if (tile.there) {
      const char* const from = first_of(state.keys, tile);
      char* const to = memory.keys + static_cast<unsigned>(stage) * kKeyBytes + thread_index().x * kWord;
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < kCopies; ++i) {
        copy_async16(to + i * (kWideThreads * kWord), from + i * (kWideThreads * kWord), true);
      }
    }
    commit_copies();
  }
  GRAPHOPT_DEVICE void copy_values(const Tile& tile, int stage) const {
    if (tile.there) {
      const char* const from = first_of(state.values, tile);
      const unsigned at = thread_index().x * kWord;
      char* const to = memory.values + static_cast<unsigned>(stage) * kValueBytes + at / kPiece * kApart + at % kPiece;
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < kCopies; ++i) {
        copy_async16(to + i * (kWideThreads * kWord / kPiece * kApart), from + i * (kWideThreads * kWord), true);
      }
    }
    commit_copies();
  }
};

// The rows of four products: pairs of neighbouring loads; and a product with each of several columns.
GRAPHOPT_DEVICE void rows_of(const Word4 (&loaded)[4], int i, uint32_t (&a)[4]) {
  a[0] = byte_permute(loaded[0].words[i], loaded[1].words[i], 0x5410);
  a[1] = byte_permute(loaded[0].words[i], loaded[1].words[i], 0x7632);
  a[2] = byte_permute(loaded[2].words[i], loaded[3].words[i], 0x5410);
  a[3] = byte_permute(loaded[2].words[i], loaded[3].words[i], 0x7632);
}

// Splits this warp's queries, and returns what products with this lane's are counted in; see HalfPages::split.
GRAPHOPT_DEVICE float split_queries(const Layout& layout, const WideMemory& memory) {
  const int g = lane() / 4, t = lane() % 4;
  const float* const query = memory.query(layout, warp() * kQueries + g / 2);
  Word2* const to = memory.products + warp() * kKeySteps * kWarp + lane();
  float most = 0;
  for (int c = t; c < kChannels; c += 4) most = magnitude_of(query[c]) > most ? magnitude_of(query[c]) : most;
  const float unit = power_below(reduce_max<4>(most)), inverse = inverse_of_power(unit) * 0x1p14f;
  GRAPHOPT_NO_UNROLL
  for (int step = 0; step < kKeySteps; ++step) {
    Word2 pairs;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float a = query[16 * step + 8 * i + t] * inverse, b = query[16 * step + 8 * i + 4 + t] * inverse;
      const uint32_t high = half2_of(a, b), rest = Pages::rest_of(a, b, high);
      pairs.words[i] = g % 2 ? rest : high;
    }
    to[step * kWarp] = pairs;
  }
  return shuffle(unit * 0x1p-14f, 8 * t);
}

// This warp's part of all scores, of its fourth of the channels.
GRAPHOPT_DEVICE void score_part(const WideMemory& memory, const char* keys) {
  const int g = lane() / 4, t = lane() % 4;
  float sums[kWideTiles][4][4] = {};
  GRAPHOPT_UNROLL
  for (int part = 0; part < kKeySteps / kWideTiles; ++part) {
    const int step = kKeySteps / kWideTiles * warp() + part;
    const Half* const block = reinterpret_cast<const Half*>(keys) + g / 2 * 16 * kChannels;
    const Half* const at = block + 256 * step + 16 * t + g % 2 * 8;
    Word4 key[4];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) key[i] = load16(at + 64 * i);
    Word2 column[kWideTiles];
    GRAPHOPT_UNROLL
    for (int tile = 0; tile < kWideTiles; ++tile) {
      column[tile] = load8(memory.products + (tile * kKeySteps + step) * kWarp + lane());
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t a[4];
      rows_of(key, i, a);
      GRAPHOPT_UNROLL
      for (int tile = 0; tile < kWideTiles; ++tile) multiply_f16(sums[tile][i], a, column[tile].words);
    }
  }
  GRAPHOPT_UNROLL
  for (int tile = 0; tile < kWideTiles; ++tile) {
    float* const to = reinterpret_cast<float*>(memory.parts + (tile * kWideTiles + warp()) * 2 * kWarp + lane());
    const float(&sum)[4][4] = sums[tile];
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      Four four;
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float(&product)[4] = sum[2 * half + i / 2];
        four.number[i] = product[i % 2 * 2] + product[i % 2 * 2 + 1];
      }
      store_four(to + half * (4 * kWarp), four);
    }
  }
}

GRAPHOPT_KERNEL(kWideThreads, 2)
void attend_wide(AttendRun run) {
  let_next_begin();
  const CudaCall& call = run.call;
  const Layout& layout = call.layout;
  const WideUnit unit(run, static_cast<int32_t>(block_index().x));
  const Reading& reading = unit.reading;
  const int index = warp(), g = lane() / 4, t = lane() % 4;
  const WideMemory memory(shared_memory());
  WideWalk<false> walk = {unit.begin, unit.end};
  wait_for_previous();
  const WideCopies copies{layout, call.state, memory, reading.head};
  Tile tile = walk.take(layout, reading), next = walk.take(layout, reading);
  copies.copy_keys(tile, 0), copies.copy_values(tile, 0), copies.copy_keys(next, 1);
  for (int i = 0; i < kQueries; ++i) {
    take_query(call, TileQueries(run, unit.query_tile, i), call.query, memory.query(layout, index * kQueries + i));
  }
  sync_warp();
  const float power = split_queries(layout, memory);
  wait_copies<2>();  // the first keys are there
  sync_block();

  Softmax softmax;
  const int span = index % 2, first_of_two = index / 2 * 2;  // of the tiles whose results this warp has
  float sums[2][16] = {};
  int stage = 0;
  GRAPHOPT_NO_UNROLL
  while (tile.there) {
    const Tile after = walk.take(layout, reading);
    score_part(memory, memory.keys + static_cast<unsigned>(stage) * kKeyBytes);
    sync_block();  // keys have been read, and so have values of the tile before
    copies.copy_values(next, stage ^ 1), copies.copy_keys(after, stage);
    float scores[kLaneTokens] = {};
    GRAPHOPT_UNROLL
    for (int from = 0; from < kWideTiles; ++from) {
      const Word4* const word = memory.parts + (index * kWideTiles + from) * 2 * kWarp + lane();
      const float* const at = reinterpret_cast<const float*>(word);
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Four four = load_four(at + half * (4 * kWarp));
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) scores[4 * half + i] += four.number[i];
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) scores[i] *= power;
    look_at(layout, reading, unit.behind, tile);
    const float of_before = softmax.weigh(layout, tokens_read<FloatPlaces>(tile), false, scores);
    Word4 high, rest;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float a = scores[2 * i] * Pages::kUnit, b = scores[2 * i + 1] * Pages::kUnit;
      high.words[i] = half2_of(a, b), rest.words[i] = Pages::rest_of(a, b, high.words[i]);
    }
    uint32_t* const column = memory.columns + (index * kQueries + t) * 2 * kColumn + 4 * g;
    store16(column, high), store16(column + kColumn, rest);
    if (g == 0) memory.factors[index * kQueries + t] = of_before, memory.seen[index * kQueries + t] = tile.seen;
    if (lane() == 0) memory.any[index] = tile.any;
    wait_copies<2>();  // all but what was started above: this tile's values are there, and the next one's keys
    sync_block();

    uint64_t any = 0;
    if (!tile.all) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < kWideTiles; ++i) any |= memory.any[i];
    }
    GRAPHOPT_UNROLL
    for (int two = 0; two < 2; ++two) {
      const float factor = memory.factors[(first_of_two + two) * kQueries + t];
      if (factor != 1) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 16; ++i) sums[two][i] *= factor;
      }
    }
    const char* const there = memory.values + static_cast<unsigned>(stage) * kValueBytes;
    const Half* const values = reinterpret_cast<const Half*>(there) + 64 * span + 8 * g;
    uint32_t bad = 0;
    GRAPHOPT_UNROLL
    for (int four = 0; four < kTileTokens / 16; ++four) {
      Word4 value[4];
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        value[i] = load16(values + (4 * four + t) * static_cast<int>(kApart / 2) + i * kChannels);
      }
      if (!tile.all) {
        // others than those read can hold NaN or infinity, and 0 times those is not 0
        const uint32_t of_four = static_cast<uint32_t>(any >> (16 * four + 4 * t));
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (!(of_four >> i & 1)) value[i] = {};
        }
      }
      if (!tile.alike) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint32_t(&words)[4] = value[i].words;
          bad |= Pages::clear_bad(words[0]) | Pages::clear_bad(words[1]) |
                 Pages::clear_bad(words[2]) | Pages::clear_bad(words[3]);
        }
      }
      Word2 weights[2];
      GRAPHOPT_UNROLL
      for (int two = 0; two < 2; ++two) {
        const uint32_t* const column = memory.columns + ((first_of_two + two) * 2 * kQueries + g) * kColumn;
        weights[two] = load8(column + 8 * four + 2 * t);
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t a[4];
        rows_of(value, i, a);
        GRAPHOPT_UNROLL
        for (int two = 0; two < 2; ++two) multiply_f16(reinterpret_cast<float(*)[4]>(sums[two])[i], a, weights[two].words);
      }
    }
    if (!tile.alike && ballot(bad != 0)) {
      // a value that is not finite reaches the results of the queries that read it, and of no others
      GRAPHOPT_UNROLL
      for (int two = 0; two < 2; ++two) {
        const uint64_t seen = memory.seen[(first_of_two + two) * kQueries + t];
        uint32_t spoiled = 0;
        GRAPHOPT_NO_UNROLL
        for (int token = 0; token < kTileTokens; ++token) {
          if (!(seen >> token & 1)) continue;
          const Half* const value = values + token / 4 * static_cast<int>(kApart / 2) + token % 4 * kChannels;
          for (int i = 0; i < 8; ++i) {
            if ((value[i].bits & 0x7c00) == 0x7c00) spoiled |= 1u << i;
          }
        }
        GRAPHOPT_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (spoiled >> i & 1) sums[two][2 * i] = __builtin_nanf("");
        }
      }
    }
    tile = next, next = after;
    stage ^= 1;
  }

  sync_block();
  float* const results = reinterpret_cast<float*>(memory.parts);
  GRAPHOPT_UNROLL
  for (int two = 0; two < 2; ++two) {
    float* const to = results + ((first_of_two + two) * kQueries + t) * kChannels + 64 * span + 8 * g;
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      Four four;
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int result = 4 * half + i;
        four.number[i] = (sums[two][2 * result] + sums[two][2 * result + 1]) * (1 / Pages::kUnit);
      }
      store_four(to + 4 * half, four);
    }
  }
  const float sum = sum_of_query(softmax.sum);
  if (g == 0) memory.largest[index * kQueries + t] = softmax.largest, memory.sums[index * kQueries + t] = sum;
  sync_block();
  GRAPHOPT_NO_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    const int query = index * kQueries + i;
    unit.write(i, results + query * kChannels, memory.largest[query], memory.sums[query]);
  }
}

}  // namespace

bool takes_wide(const CudaCall& call, int32_t tokens) {
  const Layout& layout = call.layout;
  const int64_t queries = tokens * static_cast<int64_t>(layout.group);
  const bool fits = layout.size == kWideChannels && layout.page % kTileTokens == 0;
  const bool has_kernel = layout.storage == Storage::kFloat16 || layout.storage == Storage::kInt8 ||
                          layout.storage == Storage::kInt4;
  return fits && has_kernel && !call.sink_query && queries > kTileQueries;
}

const char* start_wide(const AttendRun& run, void* stream) {
  if (run.call.layout.storage != Storage::kFloat16) return start_wide_codes(run, stream);
  const unsigned blocks = static_cast<unsigned>(run.plan.units);
  return launch_early(attend_wide, {blocks, 1, 1}, kWideThreads, WideMemory::kBytes, stream, run);
}

}  // namespace graphopt
