#include "kv_attention/select.h"

#include <cstring>

namespace graphopt {
namespace {

// Unsigned integers in the order of the floats, of which none is no number.
uint32_t ordered(float score) {
  score += 0.f;  // -0 is no less than 0
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The `count`-th highest number, found by its digits from the highest on, and how many of those equal to it are among the
// highest `count`.
struct Threshold {
  uint32_t value = 0;
  size_t equal;

  Threshold(const float* scores, size_t all, size_t count) : equal(count) {
    constexpr int kDigit = 11;
    uint32_t known = 0;
    for (int shift = 32 - kDigit; ; shift = shift > kDigit ? shift - kDigit : 0) {
      size_t counts[1 << kDigit] = {};
      for (size_t i = 0; i < all; ++i) {
        const uint32_t number = ordered(scores[i]);
        if ((number & known) == value) ++counts[number >> shift & ((1u << kDigit) - 1)];
      }
      // digits may overlap: what is known already is the same in all that were counted
      uint32_t digit = (1u << kDigit) - 1;
      while (counts[digit] < equal) equal -= counts[digit--];
      value |= digit << shift;
      known |= ((1u << kDigit) - 1) << shift;
      if (!shift) return;
    }
  }
};

}  // namespace

Candidates::Candidates(const Layout& layout, int64_t position) {
  int64_t begin = layout.sinks, last = position - layout.recent;
  if (layout.window && position - layout.window + 1 > begin) begin = position - layout.window + 1;
  if (begin > last) return;
  first = layout.page_of(begin), end = layout.page_of(last) + 1;
}

size_t longest_list(const Layout& layout, int64_t position) {
  const int64_t all = layout.page_of(position) + 1;
  const auto least = [&](int64_t pages) { return pages < all ? pages : all; };
  const int64_t page = static_cast<int64_t>(layout.page);
  const int64_t fixed = least(layout.fixed_pages()), recent = least((layout.recent - 1) / page + 2);
  return static_cast<size_t>(least(fixed + recent + least(layout.budget)));
}

size_t list_pages(const Layout& layout, int64_t position, const float* scores, PageEntry* list) {
  const int64_t all = layout.page_of(position) + 1;
  const int64_t fixed = layout.fixed_pages() < all ? layout.fixed_pages() : all;
  const int64_t from = position - layout.recent + 1, recent = from > 0 ? layout.page_of(from) : 0;
  const Candidates candidates(layout, position);
  const size_t count = static_cast<size_t>(candidates.end - candidates.first);
  const size_t budget = layout.budget < candidates.end - candidates.first ? static_cast<size_t>(layout.budget) : count;
  size_t listed = 0;
  // of the pages from `page` up to `end`, those that are read in any case
  const auto list_others = [&](int64_t page, int64_t end) {
    for (; page < end && page < fixed; ++page) list[listed++] = 2 * page;
    for (page = page > recent ? page : recent; page < end; ++page) list[listed++] = 2 * page;
  };
  int64_t next = 0;
  if (budget) {
    Threshold threshold(scores, count, budget);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t number = ordered(scores[i]);
      const bool equal = number == threshold.value && threshold.equal;
      if (number <= threshold.value && !equal) continue;
      if (equal) --threshold.equal;
      const int64_t page = candidates.first + static_cast<int64_t>(i);
      list_others(next, page);
      list[listed++] = 2 * page + 1;
      next = page + 1;
    }
  }
  list_others(next, all);
  return listed;
}

}  // namespace graphopt
