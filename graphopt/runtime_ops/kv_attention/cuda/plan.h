// How a call is cut for blocks: by rows, heads, queries and pages, never by what GPU it is.
#pragma once

#include "kv_attention/cuda/call.h"

namespace graphopt {

constexpr int kTileQueries = 4;  // that a block reads for
constexpr int kAttendWarps = 4;  // of a block, which share its pages
constexpr int kWideTiles = 4, kPromptTiles = 32;  // of blocks that read for several tiles, see attend.h
constexpr int kMostSegments = kMostRows * kPolicies;

// All heads of one policy in one row. Their queries are cut into tiles of 4, and the pages of a tile into parts; each
// part is a unit, which one block has.
struct Segment {
  int32_t first_unit, first_partial, first_tile;  // how many there are before; the last two count where parts > 1
  int32_t tiles, parts;                           // of a head
  uint8_t row, policy;
};

// The query of a tile that lane group `index` has: of a new token, and of a head in its group.
struct TileQuery {
  int token, head;
  bool used;

  GRAPHOPT_BOTH TileQuery(const Layout& layout, Policy policy, int32_t tokens, int tile, int index) {
    const int group = static_cast<int>(layout.group);
    if (makes_lists(policy)) {  // the queries of a token choose their pages together
      const int tiles = (group + kTileQueries - 1) / kTileQueries;
      token = tile / tiles, head = tile % tiles * kTileQueries + index;
      used = token < tokens && head < group;
      return;
    }
    const uint32_t query = static_cast<uint32_t>(tile) * kTileQueries + static_cast<uint32_t>(index);  // below 2^32
    token = static_cast<int>(query / static_cast<uint32_t>(group));
    head = static_cast<int>(query % static_cast<uint32_t>(group));
    used = token < tokens;
  }
  static GRAPHOPT_BOTH int64_t tiles(const Layout& layout, Policy policy, int32_t tokens) {
    const int64_t group = static_cast<int64_t>(layout.group);
    const auto of = [](int64_t queries) { return (queries + kTileQueries - 1) / kTileQueries; };
    return makes_lists(policy) ? tokens * of(group) : of(tokens * group);
  }
};

struct CudaPlan {
  int32_t first = 0, end = 0;  // the new tokens of each row whose queries take part
  int32_t units = 0, partials = 0, tiles = 0;
  int32_t share = 0;  // pages of a part; the last one has what is left
  int32_t wide = 1;   // tiles of a unit
  int32_t segments = 0;
  Segment segment[kMostSegments] = {};
  uint8_t heads[kMostHeads] = {};                       // by their policies
  int16_t first_head[kPolicies + 1] = {};               // of each policy in `heads`

  // New tokens `first` up to `end` of each row, of heads of the policies that `takes` says; null, or why it cannot be.
  const char* make(const CudaCall& call, int32_t first, int32_t end, const bool (&takes)[kPolicies], int32_t wide = 1);

  GRAPHOPT_BOTH int32_t tokens(const CudaCall& call, int row) const {
    const int32_t last = call.fresh[row] < end ? call.fresh[row] : end;
    return last > first ? last - first : 0;
  }
  GRAPHOPT_BOTH int heads_of(int policy) const { return first_head[policy + 1] - first_head[policy]; }
  // The last segment whose `first_...` is not above `index`.
  GRAPHOPT_BOTH int segment_of(int32_t Segment::*counted, int32_t index) const {
    int low = 0, high = segments;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (segment[middle].*counted <= index) low = middle;
      else high = middle;
    }
    return low;
  }
  static GRAPHOPT_BOTH size_t partial_floats(const Layout& layout) { return kTileQueries * (layout.size + 2); }
};

// Tiles of a unit of heads that make no lists; `tokens` are the most new ones of a row.
int32_t tiles_of_unit(const CudaCall& call, int32_t tokens);

}  // namespace graphopt
