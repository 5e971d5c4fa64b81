// Numbers and shapes as messages of KVAttention say them, and the limits that they name.
#pragma once

#include <cstdio>

#include "kv_attention/shared/inputs.h"

namespace graphopt {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 62, kMostHeads = int64_t{1} << 20;

inline long long print(int64_t number) { return static_cast<long long>(number); }
inline long long print(size_t number) { return static_cast<long long>(number); }

// A shape as text for a message.
struct Text {
  char characters[128];
  explicit Text(const Given& tensor) {
    int length = std::snprintf(characters, sizeof characters, "[");
    for (size_t axis = 0; axis < tensor.rank && axis < 4; ++axis) {
      length += std::snprintf(characters + length, sizeof characters - static_cast<size_t>(length),
                              axis ? ", %lld" : "%lld", print(tensor.shape[axis]));
    }
    std::snprintf(characters + length, sizeof characters - static_cast<size_t>(length), "]");
  }
};

}  // namespace
}  // namespace graphopt
