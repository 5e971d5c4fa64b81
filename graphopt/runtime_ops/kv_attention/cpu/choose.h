// The pages that retrieval chooses: those of the highest scores.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/mass.h"
#include "kv_attention/cpu/numbers.h"
#include "kv_attention/shared/select.h"

namespace graphopt {
namespace {

constexpr int32_t kLowest = INT32_MIN;

// Integers in the order of the floats in `scores`, which has no NaN and is padded to whole lines.
class Ranks {
 public:
  // Takes the place of the scores, up to the end of a line.
  Ranks(float* scores, size_t count) : lines_((count + kColumns - 1) / kColumns), ranks_(scores) {
    for (size_t i = count; i < lines_ * kColumns; ++i) scores[i] = kNothing;
    for (size_t i = 0; i < lines_; ++i) {
      const Floats line = load_line<Floats>(scores + i * kColumns) + all_lanes(0.f);  // -0 becomes 0
      store_line(scores + i * kColumns, by_parts<Integers>([&](size_t part) {
        const auto bits = reinterpret_cast<Integers::Part>(line.part[part]);
        return bits ^ (bits >> 31 & 0x7fffffff);
      }));
    }
    // what only fills the last line up is less than any score
    for (size_t i = count; i < lines_ * kColumns; ++i) __builtin_memcpy(scores + i, &kLowest, sizeof kLowest);
  }

  size_t lines() const { return lines_; }
  Integers line(size_t i) const { return load_line<Integers>(ranks_ + i * kColumns); }

  // How many are `least` or more.
  size_t count(int32_t least) const {
    Integers counts = all_lanes(0);
    for (size_t i = 0; i < lines_; ++i) {
      const Integers ranks = line(i);
      counts = by_parts<Integers>([&](size_t part) { return counts.part[part] - (ranks.part[part] >= least); });
    }
    int32_t lanes[kColumns], sum = 0;
    store_line(lanes, counts);
    for (int32_t lane : lanes) sum += lane;
    return static_cast<size_t>(sum);
  }

  // The highest number that `wanted` are equal to or above, or any on the way to it of which exactly so many are:
  // found by halving what is left between the lowest and the highest.
  int32_t threshold(size_t wanted) const {
    Integers least = all_lanes(INT32_MAX), most = all_lanes(kLowest);
    for (size_t i = 0; i < lines_; ++i) {
      const Integers ranks = line(i);
      most = by_parts<Integers>([&](size_t part) {
        return ranks.part[part] > most.part[part] ? ranks.part[part] : most.part[part];
      });
      // padding of the last line has no rank
      least = by_parts<Integers>([&](size_t part) {
        const auto lower = ranks.part[part] < least.part[part] ? ranks.part[part] : least.part[part];
        return ranks.part[part] == kLowest ? least.part[part] : lower;
      });
    }
    int32_t lanes[2][kColumns];
    store_line(lanes[0], least), store_line(lanes[1], most);
    int64_t low = INT32_MAX, high = kLowest;
    for (size_t i = 0; i < kColumns; ++i) {
      low = lanes[0][i] < low ? lanes[0][i] : low;
      high = lanes[1][i] > high ? lanes[1][i] : high;
    }
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      const size_t found = count(static_cast<int32_t>(middle));
      if (found == wanted) return static_cast<int32_t>(middle);
      if (found > wanted) low = middle;
      else high = middle - 1;
    }
    return static_cast<int32_t>(low);
  }

 private:
  size_t lines_;
  const float* ranks_;
};

// Lists the pages that the query at `position` reads, in their order: those of the sinks, of the recent tokens, and of
// the candidates the `budget` with the highest scores, or as many of them as have `mass`; of equal scores the lower
// page. Returns how many there are. Scores are overwritten; their memory is that of list_floats.
inline size_t list_pages(const Layout& layout, int64_t position, float* scores, PageEntry* list) {
  const int64_t all = layout.page_of(position) + 1;
  const int64_t fixed = layout.fixed_pages() < all ? layout.fixed_pages() : all;
  const int64_t from = position - layout.recent + 1, recent = from > 0 ? layout.page_of(from) : 0;
  const Candidates candidates(layout, position);
  const size_t count = static_cast<size_t>(candidates.end - candidates.first);
  size_t budget = layout.budget < candidates.end - candidates.first ? static_cast<size_t>(layout.budget) : count;
  if (layout.mass > 0 && budget) {
    const size_t needed = pages_with_mass(layout, scores, count, scores + score_floats(count));
    if (needed < budget) budget = needed;
  }
  size_t listed = 0;
  // of the pages from `page` up to `end`, those that are always read
  const auto list_others = [&](int64_t page, int64_t end) {
    for (; page < end && page < fixed; ++page) list[listed++] = 2 * page;
    for (page = page > recent ? page : recent; page < end; ++page) list[listed++] = 2 * page;
  };
  int64_t next = 0;
  if (budget) {
    const Ranks ranks(scores, count);
    const int32_t least = ranks.threshold(budget);
    size_t equal = budget - ranks.count(least + 1);  // how many of those that are equal to it are chosen
    for (size_t line = 0; line < ranks.lines(); ++line) {
      const Integers of_line = ranks.line(line);
      uint32_t bits = lanes_at_least(of_line, least);
      if (!bits) continue;
      int32_t lanes[kColumns];
      store_line(lanes, of_line);
      if (count - line * kColumns < kColumns) bits &= (1u << (count - line * kColumns)) - 1;
      for (; bits; bits &= bits - 1) {
        const auto i = static_cast<size_t>(__builtin_ctz(bits));
        if (lanes[i] == least && !equal) continue;
        equal -= lanes[i] == least;
        const int64_t page = candidates.first + static_cast<int64_t>(line * kColumns + i);
        list_others(next, page);
        list[listed++] = 2 * page + 1;
        next = page + 1;
      }
    }
  }
  list_others(next, all);
  return listed;
}

}  // namespace
}  // namespace graphopt
