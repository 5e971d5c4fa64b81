// The memory of a task that attends, and keys as it wants them.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, codes.h)

namespace graphopt {
namespace {

// The keys of a slot, [page, size], as [page / 16, size, 16].
inline void transpose_keys(const float* keys, size_t size, size_t lines, float* to) {
  for (size_t i = 0; i < lines; ++i) {
    for (size_t c = 0; c < size; c += kColumns) {
      transpose_block(keys + i * kColumns * size + c, size, to + (i * size + c) * kColumns);
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
    take(&keys, layout.integers() || layout.scales_tokens() || layout.chooses ? decoded : 0);
    take(&values, (layout.integers() && !kMultiplyCodes) || layout.scales_tokens() || layout.latent() ? decoded : 0);
    return bytes;
  }
};

size_t attend_scratch(const Layout& layout, size_t rows) {
  AttendScratch buffers;
  return buffers.lay_out(layout, rows, reinterpret_cast<char*>(kLine));
}

}  // namespace
}  // namespace graphopt
