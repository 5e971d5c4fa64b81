#include "kv_attention/select.h"

namespace graphopt {
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

}  // namespace graphopt
