// How a call is cut into tasks: by rows, heads, columns and runs of pages, never by the number of threads.
#pragma once

#include <atomic>

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/shared/select.h"

namespace graphopt {

// Queries in one block read pages together, so that a page serves many of them while it is in a cache.
constexpr size_t kBlockRows = 64;

// A run of pages of a block of queries.
struct Run {
  size_t queries, first, end;
};

// Where the pages of a block are cut into runs, whose partial results are merged: at the same tokens of the sequence
// for every query, whatever queries come with it, so that its result has the same bits alone and among others. The
// pages of a list are cut by their number. What reaches over few tokens is not cut.
class Cuts {
 public:
  // Where `queries` read a list and have none yet, their runs are the most that there can be.
  Cuts(const Attention& call, const Queries& queries);
  size_t count() const { return count_; }
  // The pages `*first` up to `*end` of those that the queries read; none where a list has fewer.
  void run(size_t index, size_t* first, size_t* end) const;

 private:
  size_t place_of(int64_t page) const;  // of the first page from `page` on, among those that are read

  const Queries& queries_;
  bool listed_;
  int64_t length_;                // pages of the sequence that a run spans, or pages of a list
  int64_t of_sinks_ = 0;          // runs that begin with the first page
  int64_t begin_ = 0;             // the run of the sequence in which the other pages begin
  size_t count_;
};

struct Plan {
  size_t queries = 0;
  size_t most_runs = 0;     // of one block of them, at most
  size_t runs = 0;          // of all together, at most
  size_t heads = 1;         // of blocks that requests share, which a task reads in turns
  bool lists = false;       // some of them read lists
  bool split = false;       // queries are so few that their runs are shared out
  double cycles = 0;        // or so, of one thread

  explicit Plan(const Attention& call);
  // Calls visit(queries) for all of them, first those of groups, by head; of those
  // that read a list, `pages` is the most that they may read.
  template <typename Visit>
  static void each(const Attention& call, const Visit& visit);
};

// The queries of a head that read pages together, from a column on; of a list they have only the most pages.
Queries queries_from(const Attention& call, size_t row, size_t head, size_t column);

// The pages of which there are scores for the list of some queries, and the floats that scores and listing take.
Candidates scored_pages(const Attention& call, const Queries& queries);
size_t list_floats(const Attention& call, const Queries& queries);

template <typename Visit>
void Plan::each(const Attention& call, const Visit& visit) {
  const Layout& layout = call.layout;
  for (size_t i = 0; i < call.group_count * layout.kv_heads; ++i) {
    const Group& group = call.groups[i / layout.kv_heads];
    Queries queries = {};
    queries.members = group.members, queries.row = group.members[0].row, queries.end_column = group.count;
    queries.head = i % layout.kv_heads, queries.whole = true;
    queries.begin = group.begin, queries.pages = static_cast<size_t>(group.end - group.begin);
    visit(queries);
  }
  for (size_t row = 0; row < call.rows; ++row) {
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      for (size_t column = call.first_column(row); column < call.end_column(row);) {
        const Queries queries = queries_from(call, row, head, column);
        column = queries.end_column;
        visit(queries);
      }
    }
  }
}

}  // namespace graphopt
