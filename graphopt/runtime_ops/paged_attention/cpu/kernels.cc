#include "paged_attention/cpu/kernels.h"

#include "abi/instructions.h"
#include "abi/onnxruntime.h"
#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

inline Floats load_numbers(const float* from) { return load_line<Floats>(from); }
inline Floats load_numbers(const Half* from) { return load_halves(from); }

// What a task keeps: the running softmax of each row, and the page at hand as floats.
struct Scratch {
  float *sums_of_values, *scores, *largest, *sums, *keys, *values, *spoiled;

  Scratch(const Requests& call, size_t rows, float* memory) {
    sums_of_values = memory;
    keys = sums_of_values + rows * call.size;
    values = keys + call.page * call.size;
    scores = values + call.page * call.size;
    largest = scores + rows * call.padded_page();
    sums = largest + rows;
    spoiled = sums + rows;
  }
};

// Widens what a head has stored in a block: its slots lie kv_heads x size apart.
template <typename Stored>
void widen_page(const Requests& call, const void* pool, int32_t block, size_t head, size_t first, size_t end,
                float* to) {
  const size_t stride = call.kv_heads * call.size;
  const Stored* const from =
      static_cast<const Stored*>(pool) + static_cast<size_t>(block) * call.page * stride + head * call.size;
  for (size_t slot = first; slot < end; ++slot) {
    for (size_t i = 0; i < call.size; i += kColumns) {
      store_line(to + slot * call.size + i, load_numbers(from + slot * stride + i));
    }
  }
}

// The sum of 16 numbers; sum_of goes through memory where there is no AVX-512.
inline float total(const Floats& a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256 eight = a.part[0] + a.part[1];
  __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  four = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(four) + _mm_cvtss_f32(_mm_shuffle_ps(four, four, 1));
#else
  return sum_of(a);
#endif
}

// For each slot 0, or NaN where its key is not finite.
void find_spoiled(const Requests& call, const float* keys, size_t first, size_t end, float* spoiled) {
  for (size_t slot = first; slot < end; ++slot) {
    Floats zero = all_lanes(0.f);
    for (size_t i = 0; i < call.size; i += kColumns) {
      const Floats key = load_line<Floats>(keys + slot * call.size + i);
      zero = zero + (key - key);
    }
    spoiled[slot] = total(zero);
  }
}

// Scores of the slots a..b of the page at hand, for one row; a key that is not finite makes its score NaN.
template <size_t Lines>
void score_row(const Requests& call, const float* query, const float* keys, const float* spoiled, size_t a, size_t b,
               float* scores) {
  const size_t lines = Lines ? Lines : call.size / kColumns;
  for (size_t slot = a; slot < b; ++slot) {
    Floats sum = all_lanes(0.f);
    for (size_t i = 0; i < lines; ++i) {
      const Floats key = load_line<Floats>(keys + slot * call.size + i * kColumns);
      sum = fused(load_line<Floats>(query + i * kColumns), key, sum);
    }
    scores[slot] = total(sum) * call.scale + spoiled[slot];
  }
}

// Adds the values of the slots a..b, weighted; what was summed up before is scaled by `factor`.
template <size_t Lines>
void add_values(const Requests& call, const float* weights, const float* values, size_t a, size_t b, float factor,
                float* sums) {
  const size_t lines = Lines ? Lines : call.size / kColumns;
  constexpr size_t kMost = Lines ? Lines : 16;
  Floats total[kMost];
  for (size_t i = 0; i < lines; ++i) total[i] = load_line<Floats>(sums + i * kColumns) * factor;
  for (size_t slot = a; slot < b; ++slot) {
    const Floats weight = all_lanes(weights[slot]);
    for (size_t i = 0; i < lines; ++i) {
      total[i] = fused(weight, load_line<Floats>(values + slot * call.size + i * kColumns), total[i]);
    }
  }
  for (size_t i = 0; i < lines; ++i) store_line(sums + i * kColumns, total[i]);
}

// Turns the scores of the slots a..b of a row into weights; returns the factor of earlier pages.
float weigh_row(const Requests& call, size_t a, size_t b, float* scores, float* largest, float* sum) {
  const size_t end = (b + kColumns - 1) / kColumns * kColumns, begin = a / kColumns * kColumns;
  Floats most = all_lanes(kNothing), added = all_lanes(0.f);
  const auto seen = [&](size_t i) {
    return lanes_between(static_cast<int>(i), static_cast<int>(a), static_cast<int>(b));
  };
  for (size_t i = begin; i < end; i += kColumns) {
    Floats line = load_line<Floats>(scores + i);
    if (call.softcap != 0) line = hyperbolic_tangent(line / all_lanes(call.softcap)) * call.softcap;
    line = choose(seen(i), line, all_lanes(kNothing));
    store_line(scores + i, line);
    most = larger(line, most);
  }
  const float before = *largest, found = largest_of(most);
  *largest = found > before ? found : before;
  const float factor = *largest == before ? 1 : exponential(before - *largest);
  for (size_t i = begin; i < end; i += kColumns) {
    Floats weight = exponential(load_line<Floats>(scores + i) - all_lanes(*largest));
    weight = choose(seen(i), weight, all_lanes(0.f));
    store_line(scores + i, weight);
    added = added + weight;
  }
  *sum = *sum * factor + sum_of(added);
  return factor;
}

// Divides by the sum of all weights, that of the sink among them; what is not finite becomes NaN.
void finish_row(const Requests& call, size_t head, float largest, float sum, const float* values, float* y) {
  float factor = 1;
  if (call.sink_logits) {
    const float sink = call.sink_logits[head], most = sink > largest ? sink : largest;
    factor = exponential(largest - most);
    sum = sum * factor + exponential(sink - most);
  }
  const Floats scale = all_lanes(factor / sum);
  for (size_t i = 0; i < call.size; i += kColumns) {
    const Floats mean = load_line<Floats>(values + i) * scale;
    store_line(y + i, mean + (mean - mean));
  }
}

template <typename Stored, size_t Lines>
void attend_as(const Requests& call, const Asked& asked, float* memory) {
  const size_t start = static_cast<size_t>(call.starts[asked.request]);
  const size_t rows = (asked.end - asked.first) * call.group, width = call.heads() * call.size;
  const Scratch scratch(call, rows, memory);
  const int64_t past = call.past[asked.request], newest = past + static_cast<int64_t>(asked.end) - 1;
  const auto page = static_cast<int64_t>(call.page);
  const auto first_seen = [&](int64_t position) {
    return call.window && position >= call.window ? position - call.window + 1 : 0;
  };
  for (size_t row = 0; row < rows; ++row) scratch.largest[row] = kNothing, scratch.sums[row] = 0;
  for (size_t i = 0; i < rows * call.size; ++i) scratch.sums_of_values[i] = 0;
  const int64_t oldest = first_seen(past + static_cast<int64_t>(asked.first));
  for (int64_t number = oldest / page; number * page <= newest; ++number) {
    const int64_t begin = number * page;
    const int32_t block = call.table[asked.request * call.columns + static_cast<size_t>(number)];
    const auto least = static_cast<size_t>(oldest > begin ? oldest - begin : 0);
    const auto most = static_cast<size_t>(newest - begin < page ? newest - begin + 1 : page);
    widen_page<Stored>(call, call.keys, block, asked.head, least, most, scratch.keys);
    find_spoiled(call, scratch.keys, least, most, scratch.spoiled);
    widen_page<Stored>(call, call.values, block, asked.head, least, most, scratch.values);
    for (size_t row = 0; row < rows; ++row) {
      const size_t token = asked.first + row / call.group, head = asked.head * call.group + row % call.group;
      const int64_t position = past + static_cast<int64_t>(token), first = first_seen(position);
      if (first >= begin + page || position < begin) continue;
      const auto a = static_cast<size_t>(first > begin ? first - begin : 0);
      const auto b = static_cast<size_t>(position - begin < page ? position - begin + 1 : page);
      float* const scores = scratch.scores + row * call.padded_page();
      const float* const query = call.query + (start + token) * width + head * call.size;
      score_row<Lines>(call, query, scratch.keys, scratch.spoiled, a, b, scores);
      const float factor = weigh_row(call, a, b, scores, scratch.largest + row, scratch.sums + row);
      add_values<Lines>(call, scores, scratch.values, a, b, factor, scratch.sums_of_values + row * call.size);
    }
  }
  for (size_t row = 0; row < rows; ++row) {
    const size_t token = asked.first + row / call.group, head = asked.head * call.group + row % call.group;
    finish_row(call, head, scratch.largest[row], scratch.sums[row], scratch.sums_of_values + row * call.size,
               call.y + (start + token) * width + head * call.size);
  }
}

template <typename Stored>
void attend_stored(const Requests& call, const Asked& asked, float* memory) {
  if (call.size == 64) return attend_as<Stored, 4>(call, asked, memory);
  if (call.size == 128) return attend_as<Stored, 8>(call, asked, memory);
  attend_as<Stored, 0>(call, asked, memory);
}

void attend(const Requests& call, const Asked& asked, float* memory) {
  if (call.stored == kFloat) return attend_stored<float>(call, asked, memory);
  if (call.stored == kFloat16) return attend_stored<Half>(call, asked, memory);
  attend_stored<BFloat16>(call, asked, memory);
}

}  // namespace

const PagedAttentionKernels GRAPHOPT_NAME(kPagedAttention) = {attend};

}  // namespace graphopt
