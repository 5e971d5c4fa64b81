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

inline Segment segment_at(const Weights& weights, size_t index) {
  const size_t of_group = weights.segments_of_group(), group = index / of_group, piece = index % of_group;
  const size_t row = group * weights.group + piece * Weights::kSegment;
  const size_t end_of_group = (group + 1) * weights.group < weights.rows ? (group + 1) * weights.group : weights.rows;
  const size_t end = row + Weights::kSegment < end_of_group ? row + Weights::kSegment : end_of_group;
  return {index, group, row, row / 16, (end - row + 15) / 16, piece == 0};
}

template <typename WithSegment>
inline void for_each_segment(const Weights& weights, const WithSegment& with_segment) {
  for (size_t index = 0, count = weights.segments(); index < count; ++index) with_segment(segment_at(weights, index));
}

}  // namespace
}  // namespace graphopt
