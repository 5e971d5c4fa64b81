// What sampled queries attend to in full: of each page the largest score, the sum of the exponentials of what is
// less by, and the part of it that a query reads only if the page is not left out.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"
#include "kv_attention/cpu/softmax.h"
#include "kv_attention/shared/select.h"

namespace graphopt {
namespace {

// [largest, all, others][rows][pages], pages in whole lines.
class SampledScores {
 public:
  SampledScores(float* scores, size_t rows, size_t pages, int64_t first)
      : scores_(scores), rows_(rows), pages_(pages), stride_(score_floats(pages)), first_(first) {}
  size_t floats() const { return 3 * rows_ * stride_; }
  // With a window some pages are seen by none of the sampled queries.
  void clear(int64_t first, int64_t end) const {
    for (size_t row = 0; row < rows_; ++row) {
      for (int64_t page = first; page < end; ++page) {
        float* const at = scores_ + row * stride_ + (page - first_);
        at[0] = kNothing, at[rows_ * stride_] = 0, at[2 * rows_ * stride_] = 0;
      }
    }
  }

  // Scores of the first 16 * `lines` tokens of a page for one row, which sees `seen` of them and reads all but `others`
  // in any case.
  void add(const Layout& layout, int64_t logical, size_t row, const Visible& seen, const Visible& others, size_t lines,
           float* scores) const {
    const size_t index = row * stride_ + static_cast<size_t>(logical - first_), part = rows_ * stride_;
    Floats most = all_lanes(kNothing);
    for (size_t i = 0; i < lines; ++i) {
      Floats line = spoil(load_line<Floats>(scores + i * kColumns));
      if (layout.softcap != 0) line = hyperbolic_tangent(line / all_lanes(layout.softcap)) * layout.softcap;
      line = choose(visible_lanes(seen, i * kColumns), line, all_lanes(kNothing));
      store_line(scores + i * kColumns, line);
      most = larger(line, most);
    }
    const float largest = largest_of(most);
    Floats sum = all_lanes(0.f), of_others = sum;
    for (size_t i = 0; i < lines && largest > kNothing; ++i) {
      const Floats weight = exponential(load_line<Floats>(scores + i * kColumns) - all_lanes(largest));
      sum = sum + choose(visible_lanes(seen, i * kColumns), weight, all_lanes(0.f));
      of_others = of_others + choose(visible_lanes(others, i * kColumns), weight, all_lanes(0.f));
    }
    scores_[index] = largest, scores_[index + part] = sum_of(sum), scores_[index + 2 * part] = sum_of(of_others);
  }

  // Adds the share of each page, of the part that is not read in any case, to `weights`; `logit` of a sink, or null.
  void add_shares(size_t row, const float* logit, float* weights) const {
    const size_t part = rows_ * stride_;
    float* const of_row = scores_ + row * stride_;
    for (size_t i = pages_; i < stride_; ++i) of_row[i] = kNothing, of_row[i + part] = 0, of_row[i + 2 * part] = 0;
    Floats most = all_lanes(logit ? *logit : kNothing);
    for (size_t i = 0; i < pages_; i += kColumns) most = larger(load_line<Floats>(of_row + i), most);
    const float highest = largest_of(most);
    const Floats top = all_lanes(highest);
    Floats total = all_lanes(0.f);
    for (size_t i = 0; i < pages_; i += kColumns) {
      const Floats factor = exponential(load_line<Floats>(of_row + i) - top);
      total = fused(load_line<Floats>(of_row + i + part), factor, total);
      store_line(of_row + i, factor);
    }
    const float sum = sum_of(total) + (logit ? exponential(*logit - highest) : 0);
    for (size_t i = 0; i < pages_; i += kColumns) {
      const Floats others = load_line<Floats>(of_row + i + 2 * part) * load_line<Floats>(of_row + i);
      store_line(weights + i, load_line<Floats>(weights + i) + others / all_lanes(sum));
    }
  }

 private:
  float* scores_;
  size_t rows_, pages_, stride_;
  int64_t first_;
};

// The tokens of a page that the query at `position` sees and does not read in any case.
inline Visible seen_besides(const Layout& layout, int64_t position, int64_t logical) {
  const int64_t page = static_cast<int64_t>(layout.page), base = logical * page;
  int64_t begin = layout.sinks;
  if (layout.first_seen(position) > begin) begin = layout.first_seen(position);
  const auto offset = [&](int64_t token) {
    return static_cast<int>(token < base ? 0 : token > base + page ? page : token - base);
  };
  Visible others;
  others.first[0] = offset(begin), others.end[0] = offset(position - layout.recent + 1);
  return others;
}

}  // namespace
}  // namespace graphopt
