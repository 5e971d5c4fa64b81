// What kernels share whose blocks read pages once for several tiles of queries of a head, a tile for each warp.
#pragma once

#include "kv_attention/cuda/merge.h"
#include "kv_attention/cuda/queries.h"

namespace graphopt {

constexpr unsigned kWideThreads = kWideTiles * kWarp;
constexpr int kWideChannels = 128, kWideQueries = kWideTiles * kQueries;

// A block's part of the pages, and this warp's queries.
struct WideUnit {
  const AttendRun& run;
  const Segment& segment;
  int32_t part, head, first_tile;
  QueryTile query_tile;  // of this warp's tile, which need not be there
  Reading reading;
  int begin, end;  // of its pages
  int behind;      // how far this lane's query is from the last of the block, -1 where it has none

  GRAPHOPT_DEVICE WideUnit(const AttendRun& run, int32_t unit)
      : run(run), segment(run.plan.segment[run.plan.segment_of(&Segment::first_unit, unit)]),
        part(segment.parts - 1 - (unit - segment.first_unit) / units_of_part()),
        head((unit - segment.first_unit) % units_of_part() / units_of_head()),
        first_tile((unit - segment.first_unit) % units_of_head() * kWideTiles),
        query_tile(run.plan, segment, (head * segment.tiles + first_tile) * segment.parts + part),
        reading(reading_of_block()) {
    query_tile.tile = first_tile + warp();
    const TileQueries queries(run, query_tile, lane() % kQueries);
    behind = queries.used ? static_cast<int>(reading.last - queries.position) : -1;
    const int64_t pages = static_cast<int64_t>(reading.range.pages), last = static_cast<int64_t>(part + 1) * run.plan.share;
    begin = part * run.plan.share;
    end = static_cast<int>(part + 1 == segment.parts || last > pages ? pages : last);
  }

  GRAPHOPT_DEVICE int32_t units_of_head() const { return (segment.tiles + kWideTiles - 1) / kWideTiles; }
  GRAPHOPT_DEVICE int32_t units_of_part() const { return units_of_head() * run.plan.heads_of(segment.policy); }
  GRAPHOPT_DEVICE Reading reading_of_block() const {
    const CudaCall& call = run.call;
    QueryTile last = query_tile;
    last.tile = first_tile + kWideTiles < segment.tiles ? first_tile + kWideTiles - 1 : segment.tiles - 1;
    const int64_t from = TileQueries(run, query_tile, 0).first, to = TileQueries(run, last, 0).last;
    const size_t row = call.first_row + static_cast<size_t>(query_tile.row);
    const size_t of_rows = row * call.layout.kv_heads + static_cast<size_t>(query_tile.head);
    return {PageRange(call.layout, query_tile.policy, from, to), nullptr, from, to, call.newest_page(query_tile.row),
            static_cast<uint32_t>(of_rows), reads_all(query_tile.policy), false};
  }

  // Writes a query of this warp's tile, or its part: values are [channel]. All lanes.
  GRAPHOPT_DEVICE void write(int index, const float* from, float largest, float sum) const {
    const TileQueries one(run, query_tile, index);
    if (!one.used) return;
    float values[kLaneChannels] = {};
    GRAPHOPT_UNROLL
    for (int k = 0; k < kWideChannels / kWarp; ++k) values[k] = from[lane() + k * kWarp];
    if (segment.parts == 1) {
      return write_row(run.call, query_tile.row, query_tile.head, one.position, one.head, largest * kLn2, sum, values);
    }
    const int32_t which = (head * segment.tiles + query_tile.tile) * segment.parts + part;
    const PartialResult result(run.partials, run.call.layout, static_cast<size_t>(segment.first_partial + which));
    GRAPHOPT_UNROLL
    for (int k = 0; k < kWideChannels / kWarp; ++k) result.values[index * kWideChannels + lane() + k * kWarp] = values[k];
    if (lane() == 0) result.largest[index] = largest, result.sums[index] = sum;
  }
};

// Goes through the tiles of a block, but for those in slots, where the storage has some.
template <bool Slots>
struct WideWalk {
  int index, end, offset = 0;

  GRAPHOPT_DEVICE Tile take(const Layout& layout, const Reading& reading) {
    Tile tile = {};
    GRAPHOPT_NO_UNROLL
    for (; index < end; ++index) {
      tile.page = reading.range.page(static_cast<size_t>(index));
      if (!Slots || !layout.in_slot(tile.page, reading.newest)) break;
    }
    if (index >= end) return tile;
    tile.there = true, tile.whole = reading.whole, tile.offset = offset, tile.tokens = kTileTokens;
    offset += kTileTokens;
    if (offset >= static_cast<int>(layout.page)) offset = 0, ++index;
    return tile;
  }
};

// Bits of the tokens of a tile that this lane has and its query reads.
template <typename Places>
GRAPHOPT_DEVICE uint32_t tokens_read(const Tile& tile) {
  uint32_t read = 0;
  GRAPHOPT_UNROLL
  for (int i = 0; i < kLaneTokens; i += 4) {  // always four are neighbours
    read |= static_cast<uint32_t>(tile.seen >> Places::token(i) & 15) << i;
  }
  return read;
}

}  // namespace graphopt
