#include "kv_attention/cuda/plan.h"

#include "kv_attention/cuda/attend.h"

namespace graphopt {
namespace {

// Units that keep a large GPU busy; with fewer tiles of queries than that their pages are shared out, but not in parts
// of fewer tokens than are worth a merge.
constexpr int64_t kUnits = 512, kLeastTokens = 256;
// Units of a prompt have a processor each: parts are there where units are fewer than those of a large GPU.
constexpr int64_t kPromptUnits = 128;
// The least queries of a KV head that are a prompt.
constexpr int64_t kPromptQueries = 64;
constexpr int64_t kMostUnits = int64_t{1} << 30;

}  // namespace

const char* CudaPlan::make(const CudaCall& call, int32_t from, int32_t to, const bool (&takes)[kPolicies],
                           int32_t tiles_of_unit) {
  const Layout& layout = call.layout;
  first = from, end = to, wide = tiles_of_unit;
  units = partials = tiles = segments = 0;
  int16_t placed = 0;
  for (int policy = 0; policy < kPolicies; ++policy) {
    first_head[policy] = placed;
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      if (static_cast<int>(call.policies[head]) == policy) heads[placed++] = static_cast<uint8_t>(head);
    }
  }
  first_head[kPolicies] = placed;

  const auto each = [&](const auto& visit) {
    for (int row = 0; row < call.rows; ++row) {
      const int32_t count = tokens(call, row);
      for (int policy = 0; count && policy < kPolicies; ++policy) {
        if (!takes[policy] || !heads_of(policy)) continue;
        const Policy of = static_cast<Policy>(policy);
        const int64_t queries = TileQuery::tiles(layout, of, count);
        const int64_t shared = (queries + wide - 1) / wide;
        // the unit of the last queries reads the most, or nearly
        const TileQuery earliest(layout, of, count, static_cast<int>((shared - 1) * wide), 0);
        const int64_t last = call.past[row] + first + count - 1;
        const int64_t pages = static_cast<int64_t>(
            makes_lists(of) ? longest_list(of, layout, last)
                                     : PageRange(layout, of, call.past[row] + first + earliest.token, last).pages);
        visit(row, policy, queries, shared, pages);
      }
    }
  };
  int64_t pages_in_all = 0, tiles_in_all = 0;
  each([&](int, int policy, int64_t queries, int64_t shared, int64_t pages) {
    // beyond 2^40 a share of the pages is all of them anyway
    const int64_t most = int64_t{1} << 40, of_head = pages < most / (shared + 1) ? pages * shared : most;
    pages_in_all += of_head * heads_of(policy), tiles_in_all += queries * heads_of(policy);
  });
  if (tiles_in_all > kMostUnits) return "a call has too many queries for one launch: give it fewer tokens at a time";
  const int64_t least = (kLeastTokens + static_cast<int64_t>(layout.page) - 1) / static_cast<int64_t>(layout.page);
  const int64_t most_units = wide == kPromptTiles ? kPromptUnits : kUnits;
  const int64_t wanted = (pages_in_all + most_units - 1) / most_units;
  const int64_t shared = wanted < least ? least : (wanted + kAttendWarps - 1) / kAttendWarps * kAttendWarps;
  share = static_cast<int32_t>(shared < INT32_MAX ? shared : INT32_MAX);
  each([&](int row, int policy, int64_t queries, int64_t of_head, int64_t pages) {
    const int64_t parts = pages > share ? (pages + share - 1) / share : 1, all = queries * heads_of(policy);
    segment[segments++] = {units, partials, tiles, static_cast<int32_t>(queries), static_cast<int32_t>(parts),
                           static_cast<uint8_t>(row), static_cast<uint8_t>(policy)};
    units += static_cast<int32_t>(of_head * heads_of(policy) * parts);
    if (parts > 1) partials += static_cast<int32_t>(all * parts), tiles += static_cast<int32_t>(all);
  });
  return nullptr;
}

int32_t tiles_of_unit(const CudaCall& call, int32_t tokens) {
  const int64_t queries = tokens * static_cast<int64_t>(call.layout.group);
  if (queries >= kPromptQueries && takes_prompt(call)) return kPromptTiles;
  return takes_wide(call, tokens) ? kWideTiles : 1;
}

}  // namespace graphopt
