// Retrieval: a query reads the pages of the highest scores besides, made of it and of the pages' summaries.
#pragma once

#include "kv_attention/shared/policies/policy.h"

namespace graphopt {

struct Retrieval : AnyPolicy {
  static constexpr bool kLists = true;
  struct Parameters {
    int64_t budget = 0;
    int64_t channels = 0;  // of the queries, that scores of pages use; all for 0
    float mass = 0;        // of the pages that are chosen; 0 where their number alone counts
    bool mean = false;     // summaries are means, not bounds
  };
  template <typename Reader>
  static auto read(Parameters* parameters, const Reader& reader) {
    auto failure = reader.choice("summary", &parameters->mean, "bounds", "mean");
    if (!failure) failure = reader.count("budget", &parameters->budget);
    if (!failure) failure = reader.optional_count("channels", &parameters->channels);
    return failure ? failure : reader.share("mass", &parameters->mass);
  }
  template <typename Layout>
  static GRAPHOPT_INLINE void complete(Layout* layout) {
    if (layout->mass > 0 && !layout->budget) layout->budget = int64_t{1} << 62;  // no limit
    if (layout->mass >= 1) layout->mass = 0;                                     // of all, their number alone counts
    if (layout->channels >= static_cast<int64_t>(layout->size)) layout->channels = 0;
  }
  template <typename Layout>
  static GRAPHOPT_INLINE size_t summary_floats(const Layout& layout) {
    return (layout.mean ? 1 : 2) * layout.size;
  }
  template <typename Layout>
  static GRAPHOPT_INLINE int64_t most_listed(const Layout& layout) {
    return layout.budget;
  }
};

}  // namespace graphopt
