// Pages that leave their slot, rounded to codes.
#include "cuda/launch.h"
#include "kv_attention/cuda/append.h"
#include "kv_attention/shared/half_scale.h"

namespace graphopt {
namespace {

constexpr unsigned kRoundThreads = 256;

// The pages of a row that leave their slot in this call: when the first token of the page that takes it arrives.
struct Leaving {
  int64_t first = 0, end = 0;

  GRAPHOPT_BOTH Leaving(const CudaCall& call, int row) {
    const Layout& layout = call.layout;
    if (!layout.integers() || !call.fresh[row]) return;
    const int64_t page = static_cast<int64_t>(layout.page), slots = layout.recent_pages + 1;
    const int64_t next = (call.past[row] + page - 1) / page - slots;
    first = next > layout.sink_pages ? next : layout.sink_pages;
    end = call.newest_page(row) - slots + 1;
    if (end < first) end = first;
  }
};

// low, step and inverse step of a set of numbers, from its least and its largest; `spoiled` is NaN where the set has a
// number that is not finite, else 0. Codes span the share `clip` of what the numbers span.
struct Steps {
  Half low, step;  // rounded down, and up
  float inverse;

  GRAPHOPT_DEVICE Steps(float least, float most, float spoiled, float levels, float clip) {
    const float whole = (most - least) + spoiled, nan = whole - whole, margin = whole * ((1 - clip) / 2);
    low = half_below(nan == 0 ? least + margin : nan);
    const float exact = ((most - margin) - to_float(low)) / levels;
    step = half_above(exact > 0 ? exact : 0);  // also for NaN
    const float rounded = to_float(step);
    inverse = rounded > 0 ? 1 / rounded : 0;
  }
  static GRAPHOPT_DEVICE uint32_t code(float x, float low, float inverse, float levels) {
    const float scaled = (x - low) * inverse;
    // comparisons with NaN are false: it becomes 0
    const float above = scaled > 0 ? scaled : 0;
    return static_cast<uint32_t>(round_to_int(above < levels ? above : levels));
  }
};

// The least and the largest of some numbers, and `spoiled`: 0 or NaN.
struct Extent {
  float least = __builtin_inff(), most = -__builtin_inff(), spoiled = 0;

  GRAPHOPT_DEVICE void add(float x) {
    least = x < least ? x : least, most = x > most ? x : most;
    spoiled = spoiled + (x - x);
  }
};

// Floats of a page: in its slot where they were there before the call, else in the call's own tensors.
struct PageTokens {
  const CudaCall& call;
  const float* slot;
  const void* fresh;
  int row, head;
  int64_t base;

  GRAPHOPT_DEVICE float at(size_t token, size_t channel) const {
    const int64_t position = base + static_cast<int64_t>(token);
    if (position < call.past[row]) return slot[token * call.layout.size + channel];
    return load_number(fresh, call.type, call.token_at(row, head, position) + channel);
  }
};

// Rounds one page that leaves, each block: x counts these pages, y is the head, z the row.
GRAPHOPT_KERNEL(kRoundThreads, 4)
void round_page(CudaCall call) {
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const Leaving leaving(call, row);
  const int64_t page = leaving.first + static_cast<int64_t>(block_index().x);
  if (page >= leaving.end) return;
  const size_t size = layout.size, tokens = layout.page, thread = thread_index().x;
  const bool narrow = layout.bits == 4;
  const float levels = static_cast<float>(layout.levels);
  const HeadState state = call.head_state(row, head);
  const size_t physical = layout.physical(page), bytes = layout.key_bytes();
  const float* const slot = state.recent + slot_of(layout, page);
  const int64_t base = page * static_cast<int64_t>(tokens);
  const PageTokens keys{call, slot, call.key, row, head, base};
  const PageTokens values{call, slot + tokens * size, call.value, row, head, base};

  Half* const scales = state.scales + physical * layout.scales();
  float *const key_low = reinterpret_cast<float*>(shared_memory()), *const key_inverse = key_low + size;
  float *const value_low = key_inverse + size, *const value_inverse = value_low + tokens;
  for (size_t c = thread; c < size; c += kRoundThreads) {
    Extent extent;
    for (size_t t = 0; t < tokens; ++t) extent.add(keys.at(t, c));
    const Steps steps(extent.least, extent.most, extent.spoiled, levels, layout.clip);
    scales[c] = steps.low, scales[size + c] = steps.step;
    key_low[c] = to_float(steps.low), key_inverse[c] = steps.inverse;
  }
  for (size_t t = thread / kWarp; t < tokens; t += kRoundThreads / kWarp) {
    Extent extent;
    for (size_t c = static_cast<size_t>(lane()); c < size; c += kWarp) extent.add(values.at(t, c));
    const float spoiled = reduce_sum(extent.spoiled);
    const Steps steps(-reduce_max(-extent.least), reduce_max(extent.most), spoiled, levels, layout.clip);
    if (lane() == 0) {
      scales[2 * size + t] = steps.low, scales[2 * size + tokens + t] = steps.step;
      value_low[t] = to_float(steps.low), value_inverse[t] = steps.inverse;
    }
  }
  sync_block();
  const auto key_code = [&](size_t t, size_t c) {
    return Steps::code(keys.at(t, c), key_low[c], key_inverse[c], levels);
  };
  const auto value_code = [&](size_t t, size_t c) {
    return Steps::code(values.at(t, c), value_low[t], value_inverse[t], levels);
  };
  // Words of four neighbours of a lane, and of the next four in their high halves: [lanes / 16][summed / 4 or 8][16].
  const auto write = [&](uint32_t* to, size_t lanes, size_t summed, const auto& code) {
    const size_t fours = summed / (narrow ? 8 : 4);
    for (size_t i = thread; i < lanes * fours; i += kRoundThreads) {
      const size_t lane = i / (16 * fours) * 16 + i % 16, four = i / 16 % fours;
      uint32_t word = 0;
      for (size_t k = 0; k < 4; ++k) {
        const size_t at = four * (narrow ? 8 : 4) + k;
        word |= code(lane, at) << 8 * k;
        if (narrow) word |= code(lane, at + 4) << (8 * k + 4);
      }
      to[i] = word;
    }
  };
  write(reinterpret_cast<uint32_t*>(state.keys + physical * bytes), tokens, size, key_code);
  write(reinterpret_cast<uint32_t*>(state.values + physical * bytes), size, tokens,
        [&](size_t c, size_t t) { return value_code(t, c); });
}

}  // namespace

const char* round_leaving_pages(const CudaCall& call, void* stream) {
  const Layout& layout = call.layout;
  int64_t leaving = 0;
  for (int row = 0; row < call.rows; ++row) {
    const Leaving leaves(call, row);
    leaving = leaves.end - leaves.first > leaving ? leaves.end - leaves.first : leaving;
  }
  if (!leaving) return nullptr;
  const Index3 grid{static_cast<unsigned>(leaving), static_cast<unsigned>(layout.kv_heads),
                    static_cast<unsigned>(call.rows)};
  const size_t bytes = 2 * (layout.size + layout.page) * sizeof(float);
  return launch(round_page, grid, kRoundThreads, bytes, stream, call);
}

}  // namespace graphopt
