// Many queries of one head, of new tokens or a prompt, over pages of codes: a block reads each page once for 16 of them,
// its warps together. For heads of 128 channels and pages of 64 or 128 tokens.
//
// A warp has 4 queries, of which it makes integers and weights as codes.h says, and 32 channels of keys and of values,
// which it multiplies for all queries: integers and sums go through shared memory. Each warp copies its own codes. Slots
// come last: of those each warp reads all for its own queries.
#include "cuda/launch.h"
#include "kv_attention/cuda/codes.h"
#include "kv_attention/cuda/wide.h"

namespace graphopt {
namespace {

constexpr int kChannels = kWideChannels;
constexpr int kStages = 2, kScaleStages = 3;  // of codes and of scales, which are wanted earlier
static_assert(kWideTiles * 32 == kChannels, "each warp has 32 channels");

// The shared memory of a block.
template <unsigned Bits>
struct WideMemory {
  using Pages = CodePages<Bits, 2>;
  static constexpr int kCodes = 2 * Pages::kLoads * kWarp;  // Word4 of a warp, of keys or values
  static constexpr int kScales = 2 * kChannels + 2 * kTileTokens, kStride = kChannels + 4;
  static constexpr int kParts = kWideTiles * kWideTiles * 2 * kWarp;

  float* queries;   // [query][stride]
  Word4* parts;     // of scores: [tile][warp][2][lane]; in the end results
  Word4* codes;     // [stage][warp][keys, values][...]
  Word2* products;  // of queries: [tile][step][lane]
  uint32_t* columns;  // of weights: [query][high, low][four tokens]
  Half* scales;               // [stage][...]
  float *factors, *units;     // of each query

  static constexpr size_t kBytes = (kWideQueries * kStride + 2 * kWideQueries) * sizeof(float) +
                                   kScaleStages * kScales * sizeof(Half) +
                                   (kParts + kStages * kWideTiles * 2 * kCodes) * sizeof(Word4) +
                                   kWideTiles * Pages::kSteps * kWarp * sizeof(Word2) +
                                   2 * kWideQueries * Pages::kColumn * sizeof(uint32_t);

  GRAPHOPT_DEVICE explicit WideMemory(char* memory) {
    queries = reinterpret_cast<float*>(memory);
    parts = reinterpret_cast<Word4*>(queries + kWideQueries * kStride), codes = parts + kParts;
    products = reinterpret_cast<Word2*>(codes + kStages * kWideTiles * 2 * kCodes);
    columns = reinterpret_cast<uint32_t*>(products + kWideTiles * Pages::kSteps * kWarp);
    scales = reinterpret_cast<Half*>(columns + 2 * kWideQueries * Pages::kColumn);
    factors = reinterpret_cast<float*>(scales + kScaleStages * kScales), units = factors + kWideQueries;
  }
  GRAPHOPT_DEVICE Word4* keys(int stage) const { return codes + (stage * kWideTiles + warp()) * 2 * kCodes; }
  GRAPHOPT_DEVICE Word4* values(int stage) const { return keys(stage) + kCodes; }
};

template <unsigned Bits>
GRAPHOPT_KERNEL(kWideThreads, 2)
void attend_wide_codes(AttendRun run) {
  using Memory = WideMemory<Bits>;
  using Pages = CodePages<Bits, 2>;
  constexpr int kLoads = Pages::kLoads, kLines = Pages::kLines, kSteps = Pages::kSteps;
  constexpr int kCodesOfLine = Pages::kNarrow ? 8 : 4;
  let_next_begin();
  const CudaCall& call = run.call;
  const Layout& layout = call.layout;
  const State& state = call.state;
  const WideUnit unit(run, static_cast<int32_t>(block_index().x));
  const Reading& reading = unit.reading;
  const int index = warp(), g = lane() / 4, t = lane() % 4;
  const Memory memory(shared_memory());
  WideWalk<true> walk = {unit.begin, unit.end};

  // what the code of a single warp needs
  const SharedQueries own_queries(reinterpret_cast<char*>(memory.queries + index * kQueries * Memory::kStride), layout);
  WarpScratch scratch(own_queries, reinterpret_cast<char*>(memory.parts));
  Pages own(layout, state, scratch);

  const auto copy_scales = [&](const Tile& tile, int stage) {
    const int i = static_cast<int>(thread_index().x) * 8;
    if (tile.there && i < Memory::kScales) {
      const Half* const from = state.scales + place_of(layout, reading.head, tile.page) * layout.scales();
      const int of_values = i - 2 * kChannels;
      const int token = of_values / kTileTokens * static_cast<int>(layout.page) + tile.offset + of_values % kTileTokens;
      const int at = of_values < 0 ? i : 2 * kChannels + token;
      copy_async16(memory.scales + stage * Memory::kScales + i, from + at, true);
    }
    commit_copies();
  };
  const auto copy_codes = [&](const Tile& tile, int stage) {
    if (tile.there) {
      const size_t of_page = place_of(layout, reading.head, tile.page);
      constexpr int kWords = kChannels / kCodesOfLine;
      const int words = static_cast<int>(layout.page) / kCodesOfLine;
      const char* const keys = state.keys + of_page * layout.key_bytes() + tile.offset / 16 * kWords * 64;
      const char* const values = state.values + of_page * layout.value_bytes() + tile.offset / kCodesOfLine * 64;
      const auto there = [](int, int) { return true; };
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const char *const of_keys = keys + (2 * half * kWords + index * kLines) * 64,
                   *const of_values = values + (2 * index * words + half * kLines) * 64;
        own.copy_codes(memory.keys(stage) + half * kLoads * kWarp, of_keys, kWords * 64, there);
        own.copy_codes(memory.values(stage) + half * kLoads * kWarp, of_values, static_cast<size_t>(words) * 64, there);
      }
    }
    commit_copies();
  };
  float unit_of_keys = 0, lows = 0, base = 0;
  const auto fold = [&](int stage) {
    uint32_t column[kSteps][2];
    own.key_scales = memory.scales + stage * Memory::kScales;
    unit_of_keys = own.fold(false, column, lows);
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      store8(memory.products + (index * kSteps + step) * kWarp + lane(), {{column[step][0], column[step][1]}});
    }
  };

  wait_for_previous();
  Tile tile = walk.take(layout, reading), next = walk.take(layout, reading), after = walk.take(layout, reading);
  copy_scales(tile, 0), copy_codes(tile, 0), copy_scales(next, 1), copy_codes(next, 1), copy_scales(after, 2);
  for (int i = 0; i < kQueries; ++i) {
    take_query(call, TileQueries(run, unit.query_tile, i), call.query, own_queries.query(false, i));
  }
  wait_copies<4>();
  sync_block();
  if (tile.there) fold(0);
  sync_block();

  Softmax softmax;
  float sums[kWideTiles][4] = {};  // of each tile, this lane's query of it, and four channels
  int stage = 0, scale_stage = 0;
  GRAPHOPT_NO_UNROLL
  while (tile.there) {
    wait_copies<2>();  // all but the codes of the next tile, and the scales of the one after it
    sync_warp();
    {
      int32_t products[kWideTiles][4][4] = {};
      Word2 column[kWideTiles];
      GRAPHOPT_UNROLL
      for (int of = 0; of < kWideTiles; ++of) {
        column[of] = load8(memory.products + (of * kSteps + index) * kWarp + lane());
      }
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        Word4 loaded[kLoads];
        own.load(memory.keys(stage) + half * kLoads * kWarp, loaded);
        GRAPHOPT_UNROLL
        for (int row = 0; row < 2; ++row) {
          uint32_t a[4];
          codes_of_rows<Bits>(loaded, row, a);
          GRAPHOPT_UNROLL
          for (int of = 0; of < kWideTiles; ++of) multiply_u8s8(products[of][2 * half + row], a, column[of].words);
        }
      }
      GRAPHOPT_UNROLL
      for (int of = 0; of < kWideTiles; ++of) {
        GRAPHOPT_UNROLL
        for (int half = 0; half < 2; ++half) {
          Word4 four;
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int32_t(&sum)[4] = products[of][2 * half + i / 2];
            four.words[i] = static_cast<uint32_t>(sum[i % 2 * 2] * 256 + sum[i % 2 * 2 + 1]);
          }
          store16(memory.parts + ((of * kWideTiles + index) * 2 + half) * kWarp + lane(), four);
        }
      }
    }
    sync_block();
    float scores[kLaneTokens];
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t in_all[4] = {};
      GRAPHOPT_UNROLL
      for (int from = 0; from < kWideTiles; ++from) {
        const Word4 four = load16(memory.parts + ((index * kWideTiles + from) * 2 + half) * kWarp + lane());
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) in_all[i] += four.words[i];
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        scores[4 * half + i] = multiply_add(static_cast<float>(static_cast<int32_t>(in_all[i])), unit_of_keys, lows);
      }
    }
    look_at(layout, reading, unit.behind, tile);
    const float factor = softmax.weigh(layout, tokens_read<Pages>(tile), Pages::kFinite, scores);
    base *= factor;
    const Half* const value_scales = memory.scales + scale_stage * Memory::kScales + 2 * kChannels;
    uint32_t* const own_columns = memory.columns + index * 2 * kQueries * Pages::kColumn;
    const float unit_of_values = own.weigh_values(tile, value_scales, scores, base, own_columns);
    if (g == 0) memory.factors[index * kQueries + t] = factor, memory.units[index * kQueries + t] = unit_of_values;
    if (next.there) fold(scale_stage == 2 ? 0 : scale_stage + 1);
    sync_block();

    int32_t products[kWideTiles][2][4] = {};
    GRAPHOPT_UNROLL
    for (int half = 0; half < 2; ++half) {
      Word2 column[kWideTiles];
      GRAPHOPT_UNROLL
      for (int of = 0; of < kWideTiles; ++of) {
        column[of] = load8(memory.columns + (of * 2 * kQueries + g) * Pages::kColumn + 8 * half + 2 * t);
      }
      Word4 loaded[kLoads];
      own.load(memory.values(stage) + half * kLoads * kWarp, loaded);
      GRAPHOPT_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint32_t a[4];
        codes_of_rows<Bits>(loaded, row, a);
        GRAPHOPT_UNROLL
        for (int of = 0; of < kWideTiles; ++of) multiply_u8s8(products[of][row], a, column[of].words);
      }
    }
    GRAPHOPT_UNROLL
    for (int of = 0; of < kWideTiles; ++of) {
      const float before = memory.factors[of * kQueries + t], counted = memory.units[of * kQueries + t];
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int32_t(&product)[4] = products[of][i / 2];
        sums[of][i] = multiply_add(Bytes::sum_of(product[i % 2 * 2], product[i % 2 * 2 + 1]), counted, sums[of][i] * before);
      }
    }
    sync_warp();
    tile = next, next = after, after = walk.take(layout, reading);
    copy_codes(next, stage), copy_scales(after, scale_stage);
    stage ^= 1;
    scale_stage = scale_stage == 2 ? 0 : scale_stage + 1;
  }
  wait_copies<0>();

  // each warp gets the results of its queries, and goes on with what is in slots
  sync_block();
  float* const results = reinterpret_cast<float*>(memory.parts);
  GRAPHOPT_UNROLL
  for (int of = 0; of < kWideTiles; ++of) {
    const float(&sum)[4] = sums[of];
    store_four(results + (of * kQueries + t) * kChannels + 32 * index + 4 * g, {{sum[0], sum[1], sum[2], sum[3]}});
  }
  sync_block();
  base = sum_of_query(base);
  float own_sums[Pages::kSums];
  float* const own_results = results + (index * kQueries + t) * kChannels;
  GRAPHOPT_UNROLL
  for (int i = 0; i < Pages::kSums; i += 4) {
    const Four four = load_four(own_results + Pages::channel(i));
    GRAPHOPT_UNROLL
    for (int k = 0; k < 4; ++k) own_sums[i + k] = four.number[k] + base;
  }
  // where codes were
  const FloatWeights weights = {reinterpret_cast<float*>(reinterpret_cast<char*>(memory.codes) + index * FloatWeights::kBytes)};
  static_assert(FloatWeights::kBytes <= kStages * 2 * Memory::kCodes * sizeof(Word4), "there is room");
  GRAPHOPT_NO_UNROLL
  for (int i = unit.begin; i < unit.end; ++i) {
    Tile slot = {};
    slot.page = reading.range.page(static_cast<size_t>(i));
    if (!layout.in_slot(slot.page, reading.newest)) continue;
    slot.there = true, slot.whole = reading.whole, slot.tokens = kSlotTokens;
    GRAPHOPT_NO_UNROLL
    for (; slot.offset < static_cast<int>(layout.page); slot.offset += kSlotTokens) {
      const size_t of_slot = reading.head * layout.slots() + layout.slot(slot.page);
      const float* const from = state.recent + of_slot * layout.slot_floats() + slot.offset * kChannels;
      float scores[kLaneTokens];
      score_slot(from, scratch, false, kChannels, scores);
      look_at(layout, reading, unit.behind, slot);
      const float factor = softmax.weigh(layout, tokens_read<Pages>(slot), Pages::kFinite, scores);
      if (factor != 1) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < Pages::kSums; ++k) own_sums[k] *= factor;
      }
      weights.keep(Pages::token(0), scores), weights.keep(Pages::token(4), scores + 4);
      sync_warp();
      add_slot(from + layout.page * layout.size, weights.own(), kChannels, slot.seen, own_sums);
      sync_warp();
    }
  }
  GRAPHOPT_UNROLL
  for (int i = 0; i < Pages::kSums; i += 4) {
    store_four(own_results + Pages::channel(i), {{own_sums[i], own_sums[i + 1], own_sums[i + 2], own_sums[i + 3]}});
  }
  const float sum = sum_of_query(softmax.sum);
  sync_warp();
  GRAPHOPT_NO_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    const float largest = shuffle(softmax.largest, i), of_weights = shuffle(sum, i);
    unit.write(i, results + (index * kQueries + i) * kChannels, largest, of_weights);
  }
}

template <unsigned Bits>
const char* start_bits(const AttendRun& run, void* stream) {
  const unsigned blocks = static_cast<unsigned>(run.plan.units);
  return launch_early(attend_wide_codes<Bits>, {blocks, 1, 1}, kWideThreads, WideMemory<Bits>::kBytes, stream, run);
}

}  // namespace

const char* start_wide_codes(const AttendRun& run, void* stream) {
  return run.call.layout.storage == Storage::kInt8 ? start_bits<8>(run, stream) : start_bits<4>(run, stream);
}

}  // namespace graphopt
