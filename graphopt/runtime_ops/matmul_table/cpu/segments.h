// The segments of a column: groups, or pieces of groups that are long.
#pragma once

#include "matmul_table/shared/weights.h"

namespace graphopt {
namespace {

struct Segment {
  size_t index, group;
  size_t row, unit, units;  // its first row, its first unit and its number of units
  bool begins_group;
};

// Those of a column in order. Divisions are made once: a segment of 32 rows takes little longer than a few of them.
class Segments {
 public:
  explicit Segments(const Weights& weights)
      : count(weights.segments()),
        groups(weights.groups()),
        rows_(weights.rows),
        group_(weights.group),
        is_group_(group_ <= Weights::kSegment && rows_ % group_ == 0) {}

  const size_t count, groups;

  Segment first() const { return from(0, 0, 0, true); }

  Segment after(const Segment& segment) const {
    if (is_group_) {
      return {segment.index + 1, segment.group + 1, segment.row + group_, segment.unit + segment.units, segment.units, true};
    }
    const size_t end = end_of(segment.row, segment.group);
    const bool ends_group = end == end_of_group(segment.group);
    return from(segment.index + 1, segment.group + ends_group, end, ends_group);
  }

 private:
  size_t end_of_group(size_t group) const { return (group + 1) * group_ < rows_ ? (group + 1) * group_ : rows_; }
  size_t end_of(size_t row, size_t group) const {
    const size_t end = end_of_group(group);
    return row + Weights::kSegment < end ? row + Weights::kSegment : end;
  }
  Segment from(size_t index, size_t group, size_t row, bool begins_group) const {
    return {index, group, row, row / 16, (end_of(row, group) - row + 15) / 16, begins_group};
  }

  const size_t rows_, group_;
  const bool is_group_;  // whether each segment is a whole group, so that all have the same sizes
};

template <typename WithSegment>
inline void for_each_segment(const Weights& weights, const WithSegment& with_segment) {
  const Segments segments(weights);
  for (Segment segment = segments.first(); segment.index < segments.count; segment = segments.after(segment)) {
    with_segment(segment);
  }
}

}  // namespace
}  // namespace graphopt
