// What a policy states; one that says nothing else reads what every query reads: the first `sinks` and the newest
// `recent` tokens that it sees.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_attention/shared/inline.h"

namespace graphopt {

struct AnyPolicy {
  static constexpr bool kReadsAll = false;  // a query reads all tokens that it sees
  // No query reads a token again that is neither among the first nor among the newest: another one may take its place.
  static constexpr bool kMayDrop = false;
  // A query reads pages of a list besides, which cpu/policies and cuda/policies make for each query.
  static constexpr bool kLists = false;
  // Whole blocks of queries read pages of a list, which cpu/policies makes for each block, and others what they see.
  static constexpr bool kBlocks = false;

  // Attributes of the node, which are fields of a Layout: no two policies have one of the same name.
  struct Parameters {};
  // Calls a method of `reader` for each of the parameters, and returns the first error.
  template <typename Layout, typename Reader>
  static auto read(Layout*, const Reader& reader) {
    return reader.none();
  }
  // What else follows from them, once the number of channels is known.
  template <typename Layout>
  static GRAPHOPT_INLINE void complete(Layout*) {}

  // Floats of a page's summary that pages are chosen by.
  template <typename Layout>
  static GRAPHOPT_INLINE size_t summary_floats(const Layout&) {
    return 0;
  }
  // The most pages of a list, besides those that every query reads.
  template <typename Layout>
  static GRAPHOPT_INLINE int64_t most_listed(const Layout&) {
    return 0;
  }
};

}  // namespace graphopt
