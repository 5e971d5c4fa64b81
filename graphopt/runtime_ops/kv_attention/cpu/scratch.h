// The memory of a task that attends, and keys as it wants them.
#pragma once

#include "kv_attention/cpu/integers.h"
#include "kv_attention/cpu/kernels.h"

namespace graphopt {
namespace {

// The keys of a slot, [page, size], as [page / 16, size, 16].
inline void transpose_keys(const float* keys, size_t size, size_t lines, float* to) {
  for (size_t i = 0; i < lines; ++i) {
    for (size_t c = 0; c < size; c += kColumns) {
      const float* const from = keys + i * kColumns * size + c;
      float* const block = to + (i * size + c) * kColumns;
#if defined(__AVX512F__)
      __m512 row[kColumns], next[kColumns];
#pragma GCC unroll 16
      for (size_t t = 0; t < 16; ++t) row[t] = _mm512_loadu_ps(from + t * size);
      // rows that are 8, 4, 2 and 1 apart change halves
      const auto halves = [&](__m512* out, const __m512* in, size_t distance, __m512i low, __m512i high)
          __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (size_t t = 0; t < 16; ++t) {
          if (t & distance) continue;
          out[t] = _mm512_permutex2var_ps(in[t], low, in[t + distance]);
          out[t + distance] = _mm512_permutex2var_ps(in[t], high, in[t + distance]);
        }
      };
      const auto index = [](int distance, bool upper) __attribute__((always_inline)) {
        alignas(64) int lanes[16];
        for (int j = 0; j < 16; ++j) {
          const int from_second = j & distance, lane = upper ? j | distance : j & ~distance;
          lanes[j] = (from_second ? 16 : 0) + (upper ? lane : from_second ? j & ~distance : j);
        }
        return _mm512_load_si512(lanes);
      };
      halves(next, row, 8, index(8, false), index(8, true));
      halves(row, next, 4, index(4, false), index(4, true));
      halves(next, row, 2, index(2, false), index(2, true));
      halves(row, next, 1, index(1, false), index(1, true));
#pragma GCC unroll 16
      for (size_t t = 0; t < 16; ++t) _mm512_store_ps(block + t * kColumns, row[t]);
#else
      for (size_t k = 0; k < kColumns; ++k) {
        for (size_t t = 0; t < kColumns; ++t) block[k * kColumns + t] = from[t * size + k];
      }
#endif
    }
  }
}

// The memory of a task.
struct AttendScratch {
  float *queries, *sink_queries, *scores, *sink_scores, *factors, *keys, *values;
  Visible* seen;

  // With `memory` null, only computes the size.
  size_t lay_out(const Layout& layout, size_t rows, char* memory) {
    size_t bytes = 0;
    const auto take = [&](auto** part, size_t count) {
      *part = reinterpret_cast<std::remove_reference_t<decltype(**part)>*>(memory + bytes);
      bytes += (count * sizeof(**part) + kLine - 1) / kLine * kLine;
    };
    take(&queries, rows * layout.size), take(&sink_queries, rows * layout.size);
    take(&scores, rows * layout.page), take(&sink_scores, rows * layout.page);
    take(&factors, rows), take(&seen, rows);
    const size_t decoded = layout.page * layout.size;
    take(&keys, layout.integers() || layout.scales_tokens() ? decoded : 0);
    take(&values, (layout.integers() && !kMultiplyCodes) || layout.scales_tokens() ? decoded : 0);
    return bytes;
  }
};

size_t attend_scratch(const Layout& layout, size_t rows) {
  AttendScratch buffers;
  return buffers.lay_out(layout, rows, reinterpret_cast<char*>(kLine));
}

}  // namespace
}  // namespace graphopt
