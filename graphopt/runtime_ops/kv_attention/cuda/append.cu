// A page that leaves its slot is rounded before a new token takes its place: by a launch of its own, as tokens of one
// call may fill a slot many times over. All other pages are written side by side.
#include "kv_attention/cuda/append.h"

#include "cuda/launch.h"
#include "kv_attention/cpu/float8.h"

namespace graphopt {
namespace {

constexpr unsigned kAppendThreads = 128, kRoundThreads = 256;

// The pages that new tokens of a row go to.
struct Touched {
  int64_t first = 0, end = 0;

  GRAPHOPT_BOTH Touched(const CudaCall& call, int row) {
    if (!call.fresh[row]) return;
    first = call.layout.page_of(call.past[row]), end = call.layout.page_of(call.end(row) - 1) + 1;
  }
};

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
// number that is not finite, else 0.
struct Steps {
  float low, step, inverse;

  GRAPHOPT_DEVICE Steps(float least, float most, float spoiled, float levels) {
    const float span = (most - least) + spoiled, nan = span - span;
    const bool used = span >= 1e-30f && nan == 0;
    low = nan == 0 ? least : nan;
    step = used ? span / levels : 0;
    inverse = used ? levels / span : 0;
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

GRAPHOPT_DEVICE size_t slot_of(const Layout& layout, int64_t page) { return layout.slot(page) * layout.slot_floats(); }

// Rounds one page that leaves, each block: x counts these pages, y is the head, z the row.
GRAPHOPT_KERNEL(kRoundThreads, 4)
void round_page(CudaCall call) {
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const Leaving leaving(call, row);
  const int64_t page = leaving.first + static_cast<int64_t>(block_index().x);
  if (page >= leaving.end) return;
  const size_t size = layout.size, tokens = layout.page, thread = thread_index().x;
  const bool narrow = layout.storage == Storage::kInt4;
  const float levels = narrow ? 15.0f : 255.0f;
  const HeadState state = call.head_state(row, head);
  const size_t physical = layout.physical(page), bytes = layout.page_bytes();
  const float* const slot = state.recent + slot_of(layout, page);
  const int64_t base = page * static_cast<int64_t>(tokens);
  const PageTokens keys{call, slot, call.key, row, head, base};
  const PageTokens values{call, slot + tokens * size, call.value, row, head, base};

  float* const scales = state.scales + physical * layout.scales();
  float *const key_low = reinterpret_cast<float*>(shared_memory()), *const key_inverse = key_low + size;
  float *const value_low = key_inverse + size, *const value_inverse = value_low + tokens;
  for (size_t c = thread; c < size; c += kRoundThreads) {
    Extent extent;
    for (size_t t = 0; t < tokens; ++t) extent.add(keys.at(t, c));
    const Steps steps(extent.least, extent.most, extent.spoiled, levels);
    scales[c] = key_low[c] = steps.low, scales[size + c] = steps.step, key_inverse[c] = steps.inverse;
  }
  for (size_t t = thread / kWarp; t < tokens; t += kRoundThreads / kWarp) {
    Extent extent;
    for (size_t c = static_cast<size_t>(lane()); c < size; c += kWarp) extent.add(values.at(t, c));
    const Steps steps(-reduce_max(-extent.least), reduce_max(extent.most), reduce_sum(extent.spoiled), levels);
    if (lane() == 0) {
      scales[2 * size + t] = value_low[t] = steps.low, scales[2 * size + tokens + t] = steps.step;
      value_inverse[t] = steps.inverse;
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

GRAPHOPT_DEVICE void put(float x, float* to) { *to = x; }
GRAPHOPT_DEVICE void put(float x, Half* to) { *to = half_of(x); }
GRAPHOPT_DEVICE void put(float x, BFloat16* to) { *to = bfloat16_of(x); }
GRAPHOPT_DEVICE void put(float x, Float8* to) { *to = to_float8(x); }

// New tokens of one page, of one head.
struct NewTokens {
  const CudaCall& call;
  const HeadState& state;
  int row, head;
  int64_t page;
  size_t first, end;  // their offsets

  GRAPHOPT_DEVICE size_t at(size_t offset) const {
    return call.token_at(row, head, page * static_cast<int64_t>(call.layout.page) + static_cast<int64_t>(offset));
  }
  GRAPHOPT_DEVICE float key(size_t offset, size_t c) const {
    return load_number(call.key, call.type, at(offset) + c);
  }
  GRAPHOPT_DEVICE float value(size_t offset, size_t c) const {
    return load_number(call.value, call.type, at(offset) + c);
  }

  template <typename Stored>
  GRAPHOPT_DEVICE void store() const {
    const size_t size = call.layout.size, count = end - first;
    const size_t place = call.layout.physical(page) * call.layout.page * size;
    Stored* const keys = reinterpret_cast<Stored*>(state.keys) + place;
    Stored* const values = reinterpret_cast<Stored*>(state.values) + place;
    for (size_t i = thread_index().x; i < count * size; i += kAppendThreads) {
      // neighbouring threads write neighbouring tokens of a channel: that is where they lie
      const size_t t = first + i % count, c = i / count;
      put(key(t, c), keys + (t / 16 * size + c) * 16 + t % 16);
    }
    for (size_t i = thread_index().x; i < count * size; i += kAppendThreads) {
      const size_t t = first + i / size, c = i % size;
      put(value(t, c), values + t * size + c);
    }
  }

  // Floats of the newest page of a slot; what a later token of this call overwrites is left to that.
  GRAPHOPT_DEVICE void store_in_slot() const {
    const Layout& layout = call.layout;
    float* const slot = state.recent + slot_of(layout, page);
    const int64_t tokens = static_cast<int64_t>(layout.page), next = page + layout.recent_pages + 1;
    const int64_t left = call.end(row) - next * tokens;  // tokens of the page that takes the slot
    const int64_t taken = page < layout.sink_pages || left <= 0 ? 0 : left < tokens ? left : tokens;
    const size_t kept = static_cast<size_t>(taken);
    const size_t from = kept > first ? kept : first;
    for (size_t i = thread_index().x + from * layout.size; i < end * layout.size; i += kAppendThreads) {
      const size_t t = i / layout.size, c = i % layout.size;
      slot[i] = key(t, c), slot[layout.page * layout.size + i] = value(t, c);
    }
  }

  // Each token after the other, as running means and bounds are defined.
  GRAPHOPT_DEVICE void summarize() const {
    const Layout& layout = call.layout;
    float* const summary = state.summaries + layout.physical(page) * layout.summary;
    for (size_t c = thread_index().x; c < layout.size; c += kAppendThreads) {
      float low = first ? summary[c] : 0, high = first && !layout.mean ? summary[layout.size + c] : 0;
      for (size_t t = first; t < end; ++t) {
        const float k = key(t, c);
        if (!t) {
          low = high = k;
        } else if (layout.mean) {
          low = low + (k - low) / static_cast<float>(t + 1);
        } else {  // NaN propagates
          low = k != k || k < low ? k : low, high = k != k || k > high ? k : high;
        }
      }
      summary[c] = low;
      if (!layout.mean) summary[layout.size + c] = high;
    }
  }

  GRAPHOPT_DEVICE float* mean_of(int64_t logical) const {
    return state.summaries + call.layout.physical(logical) * call.layout.summary + call.layout.known;
  }

  // The mean of all tokens from the sinks on, up to this page: m += (sum - n m) / count for n tokens at once. Of a page
  // whose predecessor is of this call too only the sum, which chain_means makes a mean.
  GRAPHOPT_DEVICE void follow(bool is_first) const {
    const Layout& layout = call.layout;
    const int64_t base = page * static_cast<int64_t>(layout.page), begin = base + static_cast<int64_t>(first);
    const int64_t from = begin > layout.sinks ? begin : layout.sinks, to = base + static_cast<int64_t>(end);
    if (from >= to) return;
    const double before = static_cast<double>(from - layout.sinks), added = static_cast<double>(to - from);
    const size_t size = layout.size;
    float* const mean = mean_of(page);
    const float* const known = from == layout.sinks ? nullptr : from == base ? mean_of(page - 1) : mean;
    for (size_t i = thread_index().x; i < 2 * size; i += kAppendThreads) {
      double sum = 0;
      for (int64_t position = from; position < to; ++position) {
        const size_t offset = static_cast<size_t>(position - base);
        sum += static_cast<double>(i < size ? key(offset, i) : value(offset, i - size));
      }
      if (is_first || !known) {
        const double last = known ? static_cast<double>(known[i]) : 0;
        sum = last + (sum - added * last) / (before + added);
      }
      mean[i] = static_cast<float>(sum);
    }
  }
};

// Writes the new tokens of one page, each block: x counts the pages of a row, y is the head, z the row.
GRAPHOPT_KERNEL(kAppendThreads, 4)
void append_page(CudaCall call) {
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const Touched touched(call, row);
  const int64_t page = touched.first + static_cast<int64_t>(block_index().x);
  if (page >= touched.end) return;
  const int64_t base = page * static_cast<int64_t>(layout.page), left = call.end(row) - base;
  const HeadState state = call.head_state(row, head);
  const NewTokens tokens{call, state, row, head, page,
                         call.past[row] > base ? static_cast<size_t>(call.past[row] - base) : 0,
                         left < static_cast<int64_t>(layout.page) ? static_cast<size_t>(left) : layout.page};
  if (layout.known) tokens.summarize();
  if (layout.compensate) tokens.follow(page == touched.first);
  switch (layout.storage) {
    case Storage::kFloat32: return tokens.store<float>();
    case Storage::kFloat16: return tokens.store<Half>();
    case Storage::kBFloat16: return tokens.store<BFloat16>();
    case Storage::kFloat8: return tokens.store<Float8>();
    default: return tokens.store_in_slot();
  }
}

// Sums of pages behind the first one of a row become means, page after page: y is the head, z the row.
GRAPHOPT_KERNEL(kAppendThreads, 8)
void chain_means(CudaCall call) {
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const HeadState state = call.head_state(row, head);
  const Touched touched(call, row);
  const int64_t tokens = static_cast<int64_t>(layout.page);
  int64_t page = layout.page_of(layout.sinks) + 1;  // the first whose mean goes on from that of another
  if (page <= touched.first) page = touched.first + 1;
  const auto mean_of = [&](int64_t logical) {
    return state.summaries + layout.physical(logical) * layout.summary + layout.known;
  };
  for (; page < touched.end; ++page) {
    const int64_t base = page * tokens, end = base + tokens < call.end(row) ? base + tokens : call.end(row);
    const double added = static_cast<double>(end - base), count = static_cast<double>(end - layout.sinks);
    for (size_t i = thread_index().x; i < 2 * layout.size; i += kAppendThreads) {
      const double last = static_cast<double>(mean_of(page - 1)[i]), sum = static_cast<double>(mean_of(page)[i]);
      mean_of(page)[i] = static_cast<float>(last + (sum - added * last) / count);
    }
  }
}

}  // namespace

const char* append_tokens(const CudaCall& call, void* stream) {
  const Layout& layout = call.layout;
  int64_t leaving = 0, touched = 0;
  for (int row = 0; row < call.rows; ++row) {
    const Leaving leaves(call, row);
    const Touched pages(call, row);
    leaving = leaves.end - leaves.first > leaving ? leaves.end - leaves.first : leaving;
    touched = pages.end - pages.first > touched ? pages.end - pages.first : touched;
  }
  const auto grid = [&](int64_t pages) {
    return Index3{static_cast<unsigned>(pages), static_cast<unsigned>(layout.kv_heads),
                  static_cast<unsigned>(call.rows)};
  };
  const char* failure = nullptr;
  if (leaving) {
    const size_t bytes = 2 * (layout.size + layout.page) * sizeof(float);
    failure = launch(round_page, grid(leaving), kRoundThreads, bytes, stream, call);
  }
  if (!failure && touched) failure = launch(append_page, grid(touched), kAppendThreads, 0, stream, call);
  if (!failure && layout.compensate && touched > 1) {
    failure = launch(chain_means, grid(1), kAppendThreads, 0, stream, call);
  }
  return failure;
}

}  // namespace graphopt
