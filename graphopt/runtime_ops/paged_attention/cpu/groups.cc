#include "paged_attention/cpu/groups.h"

#include <algorithm>
#include <cstring>

namespace graphopt {
namespace {

// Pages that are worth reading together: the results of a group have to be merged. Requests with more new tokens than
// this read a page for many queries anyhow.
constexpr int64_t kLeastPages = 4, kMostTokens = 4;

}  // namespace

// A request that may share, the pages that all its new tokens see in whole, and its first new token among the members.
struct Groups::Row {
  const int32_t* table;
  int64_t pages;
  size_t index, tokens, first_member;
};

Groups::Groups(Pool& pool, const Attention& call) : call_(call), loan_(pool, bytes(call)) {
  char* at = loan_.memory;
  const auto take = [&](auto** part, size_t count) {
    *part = reinterpret_cast<std::remove_reference_t<decltype(**part)>*>(at);
    at += count * sizeof(**part);
  };
  if (!at) return;
  take(&rows_, call.rows), take(&grouped_, call.rows), take(&groups_, call.rows);
  take(&members_, call.rows * static_cast<size_t>(kMostTokens));
}

size_t Groups::bytes(const Attention& call) {
  return 1 + call.rows * (sizeof(Row) + sizeof(int64_t) + sizeof(Group) +
                          static_cast<size_t>(kMostTokens) * sizeof(Member));
}

void Groups::find(Attention* call) {
  const Layout& layout = call_.layout;
  if (layout.latent()) return;  // a row of keys that all query heads share is read once already
  size_t found = 0, members = 0;
  for (size_t row = 0; row < call_.rows; ++row) {
    const int64_t past = call_.past[row], fresh = call_.fresh[row];
    grouped_[row] = 0;
    if (fresh < 1 || fresh > kMostTokens || (layout.window && past + fresh > layout.window)) continue;
    const int64_t pages = past / static_cast<int64_t>(layout.page);
    if (pages < kLeastPages) continue;
    rows_[found++] = {call_.blocks.table + row * call_.blocks.columns, pages, row, static_cast<size_t>(fresh), 0};
  }
  if (found < 2) return;
  const size_t of_page = layout.page / call_.blocks.tokens;
  std::sort(rows_, rows_ + found, [&](const Row& a, const Row& b) {
    const int32_t *const a_end = a.table + static_cast<size_t>(a.pages) * of_page,
                  *const b_end = b.table + static_cast<size_t>(b.pages) * of_page;
    const auto [left, right] = std::mismatch(a.table, a_end, b.table, b_end);
    if (left != a_end && right != b_end) return *left < *right;
    return a.pages != b.pages ? a.pages < b.pages : a.index < b.index;
  });
  for (Row* row = rows_; row != rows_ + found; ++row) {
    row->first_member = members;
    for (size_t column = 0; column < row->tokens; ++column) {
      members_[members++] = {static_cast<uint32_t>(row->index), static_cast<uint32_t>(column)};
    }
  }
  split(0, found, 0, 0);
  if (!count_) return;
  call->groups = groups_, call->group_count = count_, call->grouped = grouped_;
}

int64_t Groups::common(const Row& a, const Row& b, int64_t from) const {
  const size_t of_page = call_.layout.page / call_.blocks.tokens;
  int64_t page = from;
  const auto same = [&](int64_t at) {
    const size_t block = static_cast<size_t>(at) * of_page;
    return !std::memcmp(a.table + block, b.table + block, of_page * sizeof *a.table);
  };
  while (page < a.pages && page < b.pages && same(page)) ++page;
  return page;
}

void Groups::split(size_t first, size_t end, int64_t page, size_t depth) {
  // rows are sorted: what the first and the last have in common all have
  const int64_t all = common(rows_[first], rows_[end - 1], page);
  if (all - page >= kLeastPages) {
    const Row& last = rows_[end - 1];
    const size_t members = last.first_member + last.tokens - rows_[first].first_member;
    groups_[count_++] = {members_ + rows_[first].first_member, members, page, all};
    for (size_t row = first; row < end; ++row) grouped_[rows_[row].index] = all;
    page = all, ++depth;
  }
  if (depth == kMostGroups) return;
  for (size_t row = first; row < end;) {
    size_t next = row + 1;
    while (next < end && common(rows_[row], rows_[next], all) > all) ++next;
    if (next - row > 1) split(row, next, page, depth);
    row = next;
  }
}

}  // namespace graphopt
