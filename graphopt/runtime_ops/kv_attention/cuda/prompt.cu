// Prompts on sm_90a, over pages of float16: a block reads each page once for 128 queries of a KV head, which are those of
// all its query heads. For heads of 128 channels, pages of 64 or 128 tokens and queries of float16.
//
// Two groups of four warps have 64 queries each, in registers. Of a tile of 128 tokens they multiply the queries by the
// keys, turn scores into weights with an online softmax (M. Milakov and N. Gimelshein, "Online normalizer calculation for
// softmax", 2018), and multiply these, as float16, by the values; the products with values of a tile run while the scores of
// the next one are weighed (J. Shah et al., "FlashAttention-3", 2024, section 3.2). Four more warps copy: two keys of 64
// tokens each, two values of 64 channels each, two tiles ahead.
//
// Keys and values lie as products want them once pieces of 16 bytes are put in place: of keys 16 tokens lie together, of
// values channels, which are the columns of a transposed operand.
#include "cuda/launch.h"
#include "cuda/wgmma.h"
#include "kv_attention/cuda/merge.h"
#include "kv_attention/cuda/tile_queries.h"
#include "kv_attention/cuda/reader.h"

namespace graphopt {
namespace {

constexpr int kChannels = 128, kHalf = kTileTokens;  // of a head, and tokens of half a tile
constexpr unsigned kGroupThreads = 128, kMultiplierWarps = 2 * kGroupThreads / kWarp;
constexpr unsigned kThreadsOfPrompt = 3 * kGroupThreads;
constexpr int kBlockQueries = kPromptTiles * kQueries, kWarpQueries = 16;
constexpr unsigned kStages = 8, kStageBytes = kHalf * kChannels * sizeof(Half);  // [turn][keys 2, values 2]
static_assert(kStageBytes == kTransposedHalf, "two stages are one operand");
static_assert(kBlockQueries == kMultiplierWarps * kWarpQueries, "a warp has 16 rows of the products");
constexpr int kSteps = 8;                  // products of 16 channels or tokens in those of a tile
constexpr uint64_t kStep = 16 * 128 / 16;  // from operand to operand
// A weight of 1 is 2^15, so that small ones keep their digits in float16.
constexpr int kWeightBits = 15;
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits);
#if defined(__CUDA_ARCH__)
constexpr bool kHasProducts = GRAPHOPT_WGMMA;  // where not, nothing starts the kernel, and it would spill
#else
constexpr bool kHasProducts = true;
#endif
constexpr int kResultStride = kChannels + 4;  // the 4 spread rows over banks

// Up to 64 tokens of a tile.
struct HalfTile {
  int64_t page;    // of the sequence, -1 where there is nothing
  size_t token;    // the first one, among those of all heads
  int32_t offset;  // where that is in the page
  int32_t all;     // whether every query of the block reads every token
};

// What a block reads, and for which queries.
struct PromptUnit {
  const AttendRun& run;
  const Segment& segment;
  int32_t part, head, first_tile;
  QueryTile query_tile;
  int64_t first, last;  // positions of the queries
  PageRange range;
  int begin, halves;  // the first page, and how many half tiles there are

  // Units that read most begin first.
  GRAPHOPT_DEVICE PromptUnit(const AttendRun& run, int32_t unit)
      : run(run), segment(run.plan.segment[run.plan.segment_of(&Segment::first_unit, unit)]),
        part(segment.parts - 1 - (unit - segment.first_unit) / units_of_part()),
        head((unit - segment.first_unit) % heads()),
        first_tile((units_of_head() - 1 - (unit - segment.first_unit) % units_of_part() / heads()) * kPromptTiles),
        query_tile(run.plan, segment, (head * segment.tiles + first_tile) * segment.parts + part),
        first(query(0).first), last(last_position()), range(run.call.layout, query_tile.policy, first, last) {
    const int64_t pages = static_cast<int64_t>(range.pages), end = static_cast<int64_t>(part + 1) * run.plan.share;
    begin = part * run.plan.share;
    const int64_t count = (part + 1 == segment.parts || end > pages ? pages : end) - begin;
    halves = count > 0 ? static_cast<int>(count) * halves_of_page() : 0;
  }

  GRAPHOPT_DEVICE int32_t heads() const { return run.plan.heads_of(segment.policy); }
  GRAPHOPT_DEVICE int32_t units_of_head() const { return (segment.tiles + kPromptTiles - 1) / kPromptTiles; }
  GRAPHOPT_DEVICE int32_t units_of_part() const { return units_of_head() * heads(); }
  GRAPHOPT_DEVICE int64_t last_position() const {
    const int32_t left = segment.tiles - first_tile;
    return query((left < kPromptTiles ? left - 1 : kPromptTiles - 1) * kQueries).last;
  }
  GRAPHOPT_DEVICE int halves_of_page() const { return static_cast<int>(run.call.layout.page) / kHalf; }
  GRAPHOPT_DEVICE int tiles() const { return (halves + 1) / 2; }
  // Tokens that a query reads, a bit for each.
  GRAPHOPT_DEVICE uint64_t seen_by(int64_t position, const HalfTile& half) const {
    return bits_of(visible(run.call.layout, position, half.page, reads_all(query_tile.policy)), half.offset, kHalf);
  }
  GRAPHOPT_DEVICE HalfTile half_tile(int index) const {
    if (index >= halves) return {-1, 0, 0, 0};
    const Layout& layout = run.call.layout;
    const int page = index / halves_of_page(), offset = index % halves_of_page() * kHalf;
    HalfTile half = {range.page(static_cast<size_t>(begin + page)), 0, offset, 1};
    half.token = place_of(layout, head_of_rows(), half.page) * layout.page + static_cast<size_t>(offset);
    const int64_t end = half.page * static_cast<int64_t>(layout.page) + offset + kHalf;
    if (!reads_all(query_tile.policy) || layout.window || end > first + 1) {
      // if the first and the last query read all of it, all between them do
      half.all = seen_by(first, half) == ~uint64_t{0} && seen_by(last, half) == ~uint64_t{0};
    }
    return half;
  }
  GRAPHOPT_DEVICE uint32_t head_of_rows() const {
    const CudaCall& call = run.call;
    const size_t row = call.first_row + static_cast<size_t>(query_tile.row);
    return static_cast<uint32_t>(row * call.layout.kv_heads + static_cast<size_t>(query_tile.head));
  }
  GRAPHOPT_DEVICE TileQueries query(int index) const {
    QueryTile of_query = query_tile;
    of_query.tile = first_tile + index / kQueries;
    return TileQueries(run, of_query, index % kQueries);
  }
  // Writes a query, or its part, by all lanes: values are [channel].
  GRAPHOPT_DEVICE void write(int query, const float* from, float largest, float sum) const {
    const TileQueries one = this->query(query);
    if (!one.used) return;
    float values[kLaneChannels] = {};
    GRAPHOPT_UNROLL
    for (int k = 0; k < kChannels / kWarp; ++k) values[k] = from[lane() + k * kWarp] * kWeightUnit;
    if (segment.parts == 1) {
      return write_row(run.call, query_tile.row, query_tile.head, one.position, one.head, largest * kLn2, sum, values);
    }
    const int index = query % kQueries, tile = first_tile + query / kQueries;
    const int32_t which = (head * segment.tiles + tile) * segment.parts + part;
    const PartialResult result(run.partials, run.call.layout, static_cast<size_t>(segment.first_partial + which));
    GRAPHOPT_UNROLL
    for (int k = 0; k < kChannels / kWarp; ++k) result.values[index * kChannels + lane() + k * kWarp] = values[k];
    if (lane() == 0) result.largest[index] = largest, result.sums[index] = sum;
  }
};

// The shared memory of a block.
struct PromptMemory {
  uint64_t *full, *empty, *done;  // of each stage: its copies are there, its products are done; and no stage is needed
  uint32_t* bad;           // [turn][half of the channels]: some values were not finite, and are 0 here
  int32_t* unit;           // which one it is: so that nothing of it need stay in registers
  HalfTile* halves;        // [tile % 4][half]: they stay until the values of a tile are done, see tile_of()
  uint64_t* seen;          // [tile % 4][half][query]: which tokens it reads, where not all read all
  float *largest, *sums;   // of each query
  char* stages;

  static constexpr unsigned kKept = 4;  // tiles
  static constexpr size_t kOfQuery = 2 * kKept * sizeof(uint64_t) + 2 * sizeof(float);
  static constexpr size_t kSmall = 256 + 2 * kKept * sizeof(HalfTile) + kBlockQueries * kOfQuery;
  static constexpr size_t kBytes = kSmall + 1024 + kStages * kStageBytes;

  GRAPHOPT_DEVICE PromptMemory() {
    char* const memory = shared_memory();
    full = reinterpret_cast<uint64_t*>(memory), empty = full + kStages, done = empty + kStages;
    bad = reinterpret_cast<uint32_t*>(done + 1), unit = reinterpret_cast<int32_t*>(bad + 4);
    halves = reinterpret_cast<HalfTile*>(memory + 256);
    seen = reinterpret_cast<uint64_t*>(halves + 2 * kKept);
    largest = reinterpret_cast<float*>(seen + 2 * kKept * kBlockQueries), sums = largest + kBlockQueries;
    stages = memory + kSmall;
    stages += (1024 - address_in_shared(stages) % 1024) % 1024;
  }
  GRAPHOPT_DEVICE void begin() const {
    if (thread_index().x >= kStages) return;
    make_barrier(full + thread_index().x, kWarp);
    make_barrier(empty + thread_index().x, kMultiplierWarps);
    if (thread_index().x == 0) make_barrier(done, kMultiplierWarps), *unit = static_cast<int32_t>(block_index().x);
  }
  // The first half of what is known of a tile. Keys come two tiles ahead, so what was known of the tile four before, whose
  // values were still multiplied by when the keys two before were done, is not needed any more.
  GRAPHOPT_DEVICE HalfTile* tile_of(int tile) const { return halves + static_cast<unsigned>(tile) % kKept * 2; }
  // What a query reads of a tile: of the second half kBlockQueries further.
  GRAPHOPT_DEVICE uint64_t* seen_of(int tile, int query) const {
    return seen + (static_cast<unsigned>(tile) % kKept * 2 * kBlockQueries + static_cast<unsigned>(query));
  }
  GRAPHOPT_DEVICE char* stage(unsigned index) const { return stages + index * kStageBytes; }
  GRAPHOPT_DEVICE float* result(int query) const {
    return reinterpret_cast<float*>(stages) + query * kResultStride;
  }
};
static_assert(kBlockQueries * kResultStride * sizeof(float) <= kStages * kStageBytes, "results lie there in the end");

// A warp that copies: keys of half of the tokens, or values of half of the channels, of each tile.
struct PromptCopies {
  const PromptUnit& unit;
  const PromptMemory& memory;

  static constexpr int kCopies = kStageBytes / 16 / kWarp;  // of a lane

  // Two neighbouring lanes copy 16 tokens of a channel, so eight 128 bytes that lie together.
  GRAPHOPT_DEVICE void copy_keys(const HalfTile& half, char* stage) const {
    const bool there = half.page >= 0;
    const char* from = unit.run.call.state.keys;
    from += half.token * (kChannels * sizeof(Half)) + static_cast<unsigned>(lane()) * 16;
    const unsigned channel = static_cast<unsigned>(lane()) / 2, eight = static_cast<unsigned>(lane()) % 2;
    GRAPHOPT_UNROLL
    for (unsigned sixteen = 0; sixteen < kHalf / 16; ++sixteen) {
      char* const to = stage + channel * 128 + ((2 * sixteen + eight) ^ channel % 8) * 16;
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < kChannels / 16; ++i) {
        copy_async16(to + i * (16 * 128), from + (sixteen * (kChannels / 16) + i) * (kWarp * 16), there);
      }
    }
  }
  GRAPHOPT_DEVICE unsigned place_of_values(unsigned i) const {
    const unsigned token = 4 * i + static_cast<unsigned>(lane()) / 8;
    return token * 128 + (static_cast<unsigned>(lane()) % 8 ^ token % 8) * 16;
  }
  // Eight lanes copy 64 channels of a token.
  GRAPHOPT_DEVICE void copy_values(const HalfTile& half, unsigned first, unsigned channels, char* stage) const {
    const bool there = half.page >= 0;
    const char* from = unit.run.call.state.values;
    from += (half.token + static_cast<unsigned>(lane()) / 8) * (kChannels * sizeof(Half));
    from += channels * 128 + static_cast<unsigned>(lane()) % 8 * 16;
    GRAPHOPT_UNROLL
    for (unsigned i = 0; i < kCopies / 2; ++i) {
      copy_async16(stage + place_of_values(first + i), from + i * (4 * kChannels * sizeof(Half)), there);
    }
  }
  // Sets this lane's values to 0 that are not finite, as weights of 0 would not leave them out; whether there were any.
  GRAPHOPT_DEVICE bool clear_values(char* stage) const {
    uint32_t all = 0;
    GRAPHOPT_NO_UNROLL
    for (unsigned i = 0; i < kCopies; ++i) {
      Word4 word = load16(stage + place_of_values(i));
      uint32_t some = 0;
      GRAPHOPT_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t bad = ((word.words[k] & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
        word.words[k] &= ~((bad >> 15) * 0xffffu);
        some |= bad;
      }
      if (some) store16(stage + place_of_values(i), word);
      all |= some;
    }
    return all != 0;
  }
  // What each query reads of half a tile.
  GRAPHOPT_DEVICE void see(const HalfTile& half, uint64_t* seen) const {
    GRAPHOPT_NO_UNROLL
    for (int query = lane(); query < kBlockQueries; query += kWarp) {
      const TileQueries one = unit.query(query);
      seen[query] = one.used && half.page >= 0 ? unit.seen_by(one.position, half) : 0;
    }
  }
  GRAPHOPT_DEVICE void run() const {
    const unsigned which = static_cast<unsigned>(warp()) - kMultiplierWarps;
    GRAPHOPT_NO_UNROLL
    for (int tile = 0; tile < unit.tiles(); ++tile) {
      const unsigned turn = static_cast<unsigned>(tile) % 2, parity = static_cast<unsigned>(tile) / 2 % 2;
      const unsigned stage = turn * 4 + which;
      char* const to = memory.stage(stage);
      wait_barrier(memory.empty + stage, parity ^ 1);
      if (which < 2) {
        const HalfTile half = unit.half_tile(2 * tile + static_cast<int>(which));
        copy_keys(half, to);
        commit_copies();
        if (lane() == 0) memory.tile_of(tile)[which] = half;
        if (!half.all) see(half, memory.seen_of(tile, 0) + which * kBlockQueries);
        wait_copies<0>();
      } else {
        const HalfTile half = unit.half_tile(2 * tile), other = unit.half_tile(2 * tile + 1);
        copy_values(half, 0, which - 2, to);
        copy_values(other, kCopies / 2, which - 2, to);
        commit_copies();
        wait_copies<0>();
        const bool bad = !(half.all && other.all) && ballot(clear_values(to)) != 0;
        if (lane() == 0) memory.bad[turn * 2 + which - 2] = bad;
      }
      show_shared_to_products();
      arrive(memory.full + stage);
    }
  }
};

// A warp of those that multiply: lanes have queries g and g + 8 of its 16, and four lanes share them.
struct PromptQueries {
  const PromptUnit& unit;
  const PromptMemory& memory;
  int first;             // of this lane's queries, in the block
  float unit_of_scores;  // what makes them logarithms to base 2
  float largest[2] = {kNothing, kNothing}, total[2] = {};
  float factors[2];  // of what came before
  uint32_t queries[kSteps][4], weights[kSteps][4];
  float scores[64] = {}, sums[64] = {};

  GRAPHOPT_DEVICE PromptQueries(const PromptUnit& unit, const PromptMemory& memory) : unit(unit), memory(memory) {
    const CudaCall& call = unit.run.call;
    first = warp() * kWarpQueries + lane() / 4;
    unit_of_scores = call.layout.scale * kLog2E;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const TileQueries one = unit.query(first + 8 * i);
      const Half* const from = static_cast<const Half*>(call.query) + one.at + 2 * (lane() % 4);
      GRAPHOPT_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 2; ++k) {
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + 16 * step + 8 * k);
          queries[step][2 * k + i] = one.used ? pair : 0;
        }
      }
    }
  }

  GRAPHOPT_DEVICE void wait(unsigned first, int tile) const {
    const unsigned stage = static_cast<unsigned>(tile) % 2 * 4 + first, parity = static_cast<unsigned>(tile) / 2 % 2;
    wait_barrier(memory.full + stage, parity);
    wait_barrier(memory.full + stage + 1, parity);
  }
  GRAPHOPT_DEVICE void release(unsigned first, int tile) const {
    uint64_t* const empty = memory.empty + static_cast<unsigned>(tile) % 2 * 4 + first;
    sync_warp();
    if (lane() == 0) arrive(empty), arrive(empty + 1);
  }
  GRAPHOPT_DEVICE void multiply_keys(int tile) {
    wait(0, tile);
    const uint64_t keys = transposed_at(memory.stage(static_cast<unsigned>(tile) % 2 * 4));
    begin_products();
    multiply_64x128_transposed<false>(scores, queries[0], keys);
    GRAPHOPT_UNROLL
    for (unsigned step = 1; step < kSteps; ++step) {
      multiply_64x128_transposed<true>(scores, queries[step], keys + step * kStep);
    }
    commit_products();
  }
  GRAPHOPT_DEVICE void multiply_values(int tile) {
    wait(2, tile);
    const uint64_t values = transposed_at(memory.stage(static_cast<unsigned>(tile) % 2 * 4 + 2));
    begin_products();
    GRAPHOPT_UNROLL
    for (unsigned step = 0; step < kSteps; ++step) {
      multiply_64x128_transposed<true>(sums, weights[step], values + step * kStep);
    }
    commit_products();
  }
  // Turns scores into weights, those of tokens that are not read into 0.
  GRAPHOPT_DEVICE void weigh(int tile) {
    const HalfTile* const halves = memory.tile_of(tile);
    const bool all = halves[0].all && halves[1].all;
    if (!all) {
      GRAPHOPT_UNROLL
      for (int half = 0; half < 2; ++half) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint64_t seen = memory.seen_of(tile, first + 8 * i)[half * kBlockQueries];
          const uint64_t own = (halves[half].all ? ~uint64_t{0} : seen) >> 2 * (lane() % 4);
          GRAPHOPT_UNROLL
          for (int k = 0; k < kHalf / 4; ++k) {
            float& score = scores[32 * half + k / 2 * 4 + 2 * i + k % 2];
            // a score that is not finite makes the result so; where all are read, `check` does that
            score = own >> (k / 2 * 8 + k % 2) & 1 ? spoil(score) : kNothing;
          }
        }
      }
    }
    float check[2] = {}, most[2] = {largest[0], largest[1]};
    GRAPHOPT_UNROLL
    for (int k = 0; k < 64; ++k) {
      const float score = scores[k];
      most[k / 2 % 2] = larger(most[k / 2 % 2], score);
      check[k / 2 % 2] += score;
    }
    float shift[2];
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      most[i] = larger(most[i], shuffle_xor(most[i], 1));
      most[i] = larger(most[i], shuffle_xor(most[i], 2));
      factors[i] = largest[i] == most[i] ? 1.0f : exp2_of((largest[i] - most[i]) * unit_of_scores);
      largest[i] = most[i];
      // where nothing is read the difference would be NaN
      shift[i] = most[i] == kNothing ? 0.0f : multiply_add(-most[i], unit_of_scores, static_cast<float>(kWeightBits));
    }
    float added[2] = {};
    GRAPHOPT_UNROLL
    for (int k = 0; k < 64; ++k) {
      scores[k] = exp2_of(multiply_add(scores[k], unit_of_scores, shift[k / 2 % 2]));
      added[k / 2 % 2] += scores[k];
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (all) added[i] += check[i] - check[i];
      total[i] = multiply_add(total[i], factors[i], added[i]);
    }
  }
  // Behind weigh(), once the products with values are done.
  GRAPHOPT_DEVICE void take_weights() {
    GRAPHOPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      GRAPHOPT_UNROLL
      for (int k = 0; k < 4; ++k) weights[step][k] = half2_of(scores[8 * step + 2 * k], scores[8 * step + 2 * k + 1]);
    }
  }
  GRAPHOPT_DEVICE void scale_sums() {
    if (factors[0] == 1 && factors[1] == 1) return;
    GRAPHOPT_UNROLL
    for (int k = 0; k < 64; ++k) sums[k] *= factors[k / 2 % 2];
  }
  // Waits for products with values; one that is not finite reaches the queries that read it, and no others.
  GRAPHOPT_DEVICE void finish_values(int tile) {
    wait_products<0>(sums);
    const unsigned turn = static_cast<unsigned>(tile) % 2;
    if (memory.bad[2 * turn] || memory.bad[2 * turn + 1]) spoil_sums(tile);
    release(2, tile);
  }
  GRAPHOPT_DEVICE void spoil_sums(int tile) {
    GRAPHOPT_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      const HalfTile& of_half = memory.tile_of(tile)[half];
      if (of_half.page < 0) continue;
      uint64_t seen[2];
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) {
        seen[i] = of_half.all ? ~uint64_t{0} : memory.seen_of(tile, first + 8 * i)[half * kBlockQueries];
      }
      const Half* const values = reinterpret_cast<const Half*>(unit.run.call.state.values) +
                                 of_half.token * kChannels + 2 * (lane() % 4);
      GRAPHOPT_NO_UNROLL
      for (int token = 0; token < kHalf; ++token) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 64; ++k) {
          const bool is_read = seen[k / 2 % 2] >> token & 1;
          const Half value = values[token * kChannels + k / 4 * 8 + k % 2];
          if (is_read && (value.bits & 0x7c00) == 0x7c00) sums[k] = __builtin_nanf("");
        }
      }
    }
  }
  GRAPHOPT_DEVICE void run() {
    const int tiles = unit.tiles();
    if (tiles) {
      multiply_keys(0);
      wait_products<0>(scores);
      release(0, 0);
      weigh(0);
      take_weights();
      GRAPHOPT_NO_UNROLL
      for (int tile = 1; tile < tiles; ++tile) {
        multiply_keys(tile);
        multiply_values(tile - 1);
        wait_products<1>(scores);
        release(0, tile);
        weigh(tile);
        finish_values(tile - 1);
        scale_sums();
        take_weights();
      }
      multiply_values(tiles - 1);
      finish_values(tiles - 1);
    }
    write();
  }
  // Through shared memory, where stages were that no warp needs any more.
  GRAPHOPT_DEVICE void write() const {
    const int of_warp = warp() * kWarpQueries, t = lane() % 4;
    sync_warp();
    if (lane() == 0) arrive(memory.done);
    wait_barrier(memory.done, 0);
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int query = first + 8 * i;
      GRAPHOPT_UNROLL
      for (int k = 0; k < kChannels / 8; ++k) {
        const Word2 pair = {{bits_of_float(sums[4 * k + 2 * i]), bits_of_float(sums[4 * k + 2 * i + 1])}};
        store8(memory.result(query) + 8 * k + 2 * t, pair);
      }
      const float sum = reduce_sum<4>(total[i]);
      if (t == 0) memory.largest[query] = largest[i] * unit_of_scores, memory.sums[query] = sum * kWeightUnit;
    }
    sync_warp();
    const PromptUnit again(unit.run, *memory.unit);
    GRAPHOPT_NO_UNROLL
    for (int i = 0; i < kWarpQueries; ++i) {
      const int query = of_warp + i;
      again.write(query, memory.result(query), memory.largest[query], memory.sums[query]);
    }
  }
};

GRAPHOPT_KERNEL(kThreadsOfPrompt, 1)
void attend_prompt(AttendRun run) {
  if constexpr (!kHasProducts) return;
  let_next_begin();
  const PromptMemory memory;
  memory.begin();
  sync_block();
  wait_for_previous();
  const int32_t index = static_cast<int32_t>(block_index().x);
  if (thread_index().x >= kMultiplierWarps * kWarp) {
    give_registers<56>();
    const PromptUnit unit(run, index);
    PromptCopies{unit, memory}.run();
  } else {
    take_registers<224>();
    const PromptUnit unit(run, index);
    PromptQueries(unit, memory).run();
  }
}

}  // namespace

bool takes_prompt(const CudaCall& call) {
  const Layout& layout = call.layout;
  const bool fits = layout.size == kChannels && layout.page % kHalf == 0 && layout.storage == Storage::kFloat16;
  // of a scale below 0 the largest product is not the largest score
  const bool is_plain = !call.sink_query && layout.softcap == 0 && layout.scale > 0 && call.type == GRAPHOPT_FLOAT16;
  return fits && is_plain && runs_sm90a();
}

const char* start_prompt(const AttendRun& run, void* stream) {
  const unsigned blocks = static_cast<unsigned>(run.plan.units);
  return launch_early(attend_prompt, {blocks, 1, 1}, kThreadsOfPrompt, PromptMemory::kBytes, stream, run);
}

}  // namespace graphopt
