// A block reads a part of the pages for 4 queries, each of its warps every fourth page by itself, with an online softmax,
// without waiting for other warps: so loads of one warp overlap with the arithmetic of others. Then the warps' results
// are merged; those of a query whose pages are cut into parts are merged by another kernel.
#include "cuda/launch.h"
#include "kv_attention/cuda/attend.h"
#include "kv_attention/cuda/codes.h"
#include "kv_attention/cuda/halves.h"
#include "kv_attention/cuda/merge.h"
#include "kv_attention/cuda/queries.h"

namespace graphopt {
namespace {

constexpr unsigned kAttendThreads = kAttendWarps * kWarp;
static_assert(kAttendWarps == kQueries, "when it is done each warp writes one query");

GRAPHOPT_DEVICE size_t list_of(const AttendRun& run, const QueryTile& query_tile, const TileQueries& queries) {
  const int heads = run.plan.heads_of(static_cast<int>(query_tile.policy));
  return static_cast<size_t>(query_tile.row * heads + query_tile.of_policy) *
             static_cast<size_t>(run.plan.end - run.plan.first) +
         static_cast<size_t>(queries.first - run.call.past[query_tile.row] - run.plan.first);
}

GRAPHOPT_DEVICE Reading reading_of(const AttendRun& run, const QueryTile& query_tile, const TileQueries& queries) {
  const CudaCall& call = run.call;
  const size_t row = call.first_row + static_cast<size_t>(query_tile.row);
  const size_t head = row * call.layout.kv_heads + static_cast<size_t>(query_tile.head);
  const int32_t* list = nullptr;
  if (makes_lists(query_tile.policy)) {
    list = run.lists.entries + list_of(run, query_tile, queries) * static_cast<size_t>(run.lists.longest);
  }
  return {PageRange(call.layout, query_tile.policy, queries.first, queries.last), list, queries.first, queries.last,
          call.newest_page(query_tile.row), static_cast<uint32_t>(head), reads_all(query_tile.policy), false};
}

// Whether one of a block's pages may be in a slot: they are in order, but for those of a list.
GRAPHOPT_DEVICE bool has_slots(const Layout& layout, const Reading& reading, const Walk& walk) {
  const auto in_slot = [&](int index) {
    return layout.in_slot(reading.range.page(static_cast<size_t>(index)), reading.newest);
  };
  return reading.list || in_slot(walk.begin) || in_slot(walk.end - 1);
}

// The scores of tokens below `sinks` come from queries of their own, where there are any.
template <typename Pages>
GRAPHOPT_DEVICE void score_tile(Pages& pages, const CudaCall& call, const Tile& tile, float (&scores)[kLaneTokens]) {
  const int64_t base = tile.page * static_cast<int64_t>(call.layout.page) + tile.offset;
  const int64_t left = call.sink_query ? call.layout.sinks - base : 0;
  const int limit = left > tile.tokens ? tile.tokens : left > 0 ? static_cast<int>(left) : 0;
  const bool both = limit > 0 && limit < tile.tokens;
  float* const parked = pages.parking() + lane() * 4;
  GRAPHOPT_NO_UNROLL
  for (int left = both ? 1 : 0;; --left) {
    pages.score(tile, left > 0 || limit == tile.tokens, both && !left, scores);
    if (!left) break;
    sync_warp();  // all lanes have read what was there
    store_four(parked, {{scores[0], scores[1], scores[2], scores[3]}});
    store_four(parked + 4 * kWarp, {{scores[4], scores[5], scores[6], scores[7]}});
  }
  if (!both) return;
  GRAPHOPT_UNROLL
  for (int i = 0; i < kLaneTokens; ++i) {
    if (Pages::token(i) < limit) scores[i] = parked[i / 4 * (4 * kWarp) + i % 4];
  }
  sync_warp();
}

// Reads this warp's pages, and leaves the result of each query in its scratch. Copies are under way while the block loads
// its queries.
template <typename Pages, typename Load>
GRAPHOPT_DEVICE void read_pages(const CudaCall& call, const WarpScratch& buffers, Walk walk, const TileQueries& queries,
                                const Load& load_queries) {
  const Layout& layout = call.layout;
  const Reading& reading = *buffers.reading;
  Pages pages(layout, call.state, buffers);
  Tile tile = walk.take<Pages::kSlots>(layout, reading);
  pages.begin(tile);
  load_queries();
  sync_block();
  pages.prepare(call.sink_query != nullptr);
  Softmax softmax;
  float sums[Pages::kSums] = {};
  const int behind = queries.used ? static_cast<int>(queries.last - queries.position) : -1;
  GRAPHOPT_NO_UNROLL
  while (tile.there) {
    const Tile next = walk.take<Pages::kSlots>(layout, reading);
    pages.open(tile, next);
    look_at(layout, reading, behind, tile);
    float scores[kLaneTokens];
    score_tile(pages, call, tile, scores);
    pages.close_keys();
    uint32_t read = 0;  // bits of this lane's tokens, of which always four are neighbours
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; i += 4) {
      read |= static_cast<uint32_t>(tile.seen >> Pages::token(i) & 15) << i;
    }
    const float factor = softmax.weigh(layout, read, Pages::kFinite, scores);
    pages.add(tile, factor, scores, sums);
    tile = next;
  }
  pages.finish();
  const float sum = sum_of_query(softmax.sum);
  sync_warp();  // all lanes are done with the memory where the results lie from now on
  const int g = lane() / 4, t = lane() % 4;
  GRAPHOPT_UNROLL
  for (int i = 0; i < Pages::kResults; ++i) {
    const int c = Pages::channel(i);
    if (c < static_cast<int>(layout.size)) buffers.values()[t * static_cast<int>(layout.size) + c] = pages.result(sums, i);
  }
  if (g == 0) buffers.largest[t] = softmax.largest, buffers.sums[t] = sum;
}

// The shared memory of a block.
template <typename Pages>
struct Shared {
  size_t of_queries, of_warp;

  GRAPHOPT_BOTH explicit Shared(const CudaCall& call) {
    const bool sinks = call.sink_query != nullptr;
    of_queries = SharedQueries::bytes(call.layout, sinks);
    of_warp = WarpScratch::kBytes + Pages::bytes(call.layout, sinks);
  }
  GRAPHOPT_BOTH size_t bytes() const { return of_queries + kAttendWarps * of_warp; }
  GRAPHOPT_DEVICE WarpScratch buffers(const SharedQueries& queries, int warp) const {
    return WarpScratch(queries, shared_memory() + of_queries + static_cast<size_t>(warp) * of_warp);
  }
};

template <typename Pages>
GRAPHOPT_KERNEL(kAttendThreads, Pages::kBlocks)
void attend(AttendRun run) {
  let_next_begin();
  const CudaCall& call = run.call;
  const CudaPlan& plan = run.plan;
  const Layout& layout = call.layout;
  const int32_t unit = static_cast<int32_t>(block_index().x);
  const Segment& segment = plan.segment[plan.segment_of(&Segment::first_unit, unit)];
  // the last parts first, as the newest pages of storages of codes take longer
  const int32_t tiles = segment.tiles * plan.heads_of(segment.policy), of_segment = unit - segment.first_unit;
  const int32_t part = segment.parts - 1 - of_segment / tiles, which = of_segment % tiles * segment.parts + part;
  const QueryTile query_tile(plan, segment, which);
  const Shared<Pages> shared(call);
  const SharedQueries all(shared_memory(), layout);
  const int index = warp(), size = static_cast<int>(layout.size);
  const TileQueries one(run, query_tile, index);  // that this warp loads, and in the end writes
  const TileQueries queries(run, query_tile, lane() % kQueries);
  const WarpScratch buffers = shared.buffers(all, warp());
  if (lane() == 0) *buffers.reading = reading_of(run, query_tile, queries);
  sync_warp();
  wait_for_previous();  // that appends tokens, or makes lists
  const int64_t pages = makes_lists(query_tile.policy) ? run.lists.counts[list_of(run, query_tile, queries)]
                                                           : static_cast<int64_t>(buffers.reading->range.pages);
  const int64_t end = static_cast<int64_t>(part + 1) * plan.share;
  Walk walk;
  walk.begin = part * plan.share, walk.index = walk.begin + warp();
  walk.end = static_cast<int32_t>(part + 1 == segment.parts || end > pages ? pages : end);
  if (Pages::kSlots && lane() == 0 && walk.begin < walk.end) buffers.reading->slots = has_slots(layout, *buffers.reading, walk);
  sync_warp();
  read_pages<Pages>(call, buffers, walk, queries, [&] {
    take_query(call, one, call.query, all.query(false, index));
    if (call.sink_query) take_query(call, one, call.sink_query, all.query(true, index));
  });
  sync_block();

  // each warp merges what all of them have of a query
  if (!one.used) return;
  float weights[kAttendWarps], largest = kNothing, sum = 0, values[kLaneChannels] = {};
  GRAPHOPT_UNROLL
  for (int i = 0; i < kAttendWarps; ++i) {
    weights[i] = shared.buffers(all, i).largest[index];
    largest = weights[i] > largest ? weights[i] : largest;
  }
  GRAPHOPT_UNROLL
  for (int i = 0; i < kAttendWarps; ++i) {
    const WarpScratch other = shared.buffers(all, i);
    const float weight = weights[i] == largest ? 1.0f : exp2_of(weights[i] - largest);
    sum = multiply_add(other.sums[index], weight, sum);
    GRAPHOPT_UNROLL
    for (int k = 0; k < kLaneChannels; ++k) {
      const int c = lane() + k * kWarp;
      if (c < size) values[k] = multiply_add(other.values()[index * size + c], weight, values[k]);
    }
  }
  if (segment.parts == 1) {
    return write_row(call, query_tile.row, query_tile.head, one.position, one.head, largest * kLn2, sum, values);
  }
  const PartialResult result(run.partials, layout, static_cast<size_t>(segment.first_partial + which));
  GRAPHOPT_UNROLL
  for (int k = 0; k < kLaneChannels; ++k) {
    const int c = lane() + k * kWarp;
    if (c < size) result.values[index * size + c] = values[k];
  }
  if (lane() == 0) result.largest[index] = largest, result.sums[index] = sum;
}

// How pages of a storage are read.
template <typename Holds, int Spans>
struct PagesOf;
template <typename T, int Spans>
struct PagesOf<Numbers<T>, Spans> {
  using Pages = FloatPages<T, Spans>;
};
template <int Spans>
struct PagesOf<Numbers<Half>, Spans> {
  using Pages = HalfPages<Spans>;
};
template <unsigned Bits, int Spans>
struct PagesOf<Codes<Bits>, Spans> {
  using Pages = CodePages<Bits, Spans>;
};

// Long contexts read more at a time: of 131072 tokens that takes nine tenths of the time; of 8192 it takes longer, as fewer
// blocks share a processor.
using LongPages = HalfPages<2, 8, 128>;
bool is_long(const AttendRun& run) {
  const Layout& layout = run.call.layout;
  return layout.storage == Storage::kFloat16 && layout.size == 128 && layout.page >= kTileTokens &&
         run.plan.share > kAttendWarps;
}

template <typename Pages>
const char* start(const AttendRun& run, void* stream) {
  const unsigned blocks = static_cast<unsigned>(run.plan.units);
  return launch_early(attend<Pages>, {blocks, 1, 1}, kAttendThreads, Shared<Pages>(run.call).bytes(), stream, run);
}

}  // namespace

const char* attend_and_merge(const AttendRun& run, void* stream) {
  if (!run.plan.units) return nullptr;
  if (run.plan.wide > 1) {
    const char* const failure = run.plan.wide == kPromptTiles ? start_prompt(run, stream) : start_wide(run, stream);
    return failure ? failure : merge_parts(run, stream);
  }
  const char* const failure = is_long(run) ? start<LongPages>(run, stream)
                                           : with_storage(run.call.layout.storage, [&](auto holds) {
    // fewer sums leave registers for more warps
    return run.call.layout.size <= 128 ? start<typename PagesOf<decltype(holds), 2>::Pages>(run, stream)
                                       : start<typename PagesOf<decltype(holds), 4>::Pages>(run, stream);
  });
  return failure ? failure : merge_parts(run, stream);
}

}  // namespace graphopt
