// Many tokens of a head as products of matrices (the WY form of Yang et al. 2024, and its duals for other rules).
//
// Let a_i be a token's factors of the state, one for each channel, P_i = a_1 a_2 .. a_i, and t the tokens of a chunk that
// begins with the state S. Written out, the recurrence is
//
//     u_i = b_i (v_i - S^T (P_i k_i) - sum_{j < i} A_ij u_j)        A_ij = sum_c k_ic k_jc a_{j+1,c} .. a_ic      (delta)
//     u_i = b_i v_i                                                                                                (sums)
//     y_i = S^T (P_i q_i) + sum_{j <= i} B_ij u_j                   B_ij the same of q_i and k_j
//     S  := diag(P_t) S + sum_j (a_{j+1} .. a_t k_j) u_j^T
//
// All factors between two tokens are products of factors, never quotients: nothing overflows where decays are below 0.
// Columns of S, u and y have nothing to do with one another: they go panel by panel, kTileLines lines each.
#pragma once

#include "linear_recurrence/cpu/products.h"

namespace graphopt {
namespace {

class Chunks {
 public:
  // The heads from `first`.
  Chunks(const Recurrence& call, size_t row, size_t first, size_t heads, float* scratch)
      : call_(call), row_(row), first_head_(first), end_head_(first + heads), K_(call.channels), Kp_(in_lines(K_)),
        V_(call.width), Vp_(in_lines(V_)), by_channel_(call.decays > 1) {
    const auto take = [&](size_t numbers) {
      float* const first = scratch;
      scratch += numbers;
      return first;
    };
    pairs_ = take(2 * kChunk * kChunk), products_ = take(2 * kChunk * kChunk), between_ = take(kChunk * kChunk);
    u_ = take(kChunk * kTileLines * kColumns), written_u_ = take(kChunk * Vp_);
    values_ = take(kChunk * Vp_), read_ = take(kTurned * Vp_);
    betas_ = take(kChunk), prefixes_ = take(kChunk), suffixes_ = take(kChunk);
    whole_ = take(Kp_), turned_ = written_ = take(kTurned * Kp_);
    numbers_ = left_ = take(kTurned * Kp_);
    if (by_channel_) {
      left_ = take(kTurned * Kp_), written_ = take(kTurned * Kp_);
      suffixed_ = take(kChunk * Kp_), factors_ = take(kChunk * Kp_), line_ = take(2 * Kp_);
    }
    all_panels_ = scratch;
  }

  void run() {
    size_t remaining_tokens = 0;
    for (size_t i = 0; i < call_.tokens; ++i) remaining_tokens += is_read(i);
    const size_t heads = end_head_ - first_head_, at = (row_ * call_.heads + first_head_) * K_ * V_;
    const float* const before = call_.before + at;
    float* const state = call_.state + at;
    if (!remaining_tokens && before != state) __builtin_memmove(state, before, heads * K_ * V_ * sizeof(float));
    is_first_ = true;
    for (size_t i = 0; i < call_.tokens; ++i) {
      const size_t token = row_ * call_.tokens + i;
      if (!is_read(i)) {
        fill(call_.output + (token * call_.heads + first_head_) * V_, heads * V_, 0);
        continue;
      }
      tokens_[count_++] = token;
      if (count_ < kChunk && count_ < remaining_tokens) continue;
      is_last_ = count_ == remaining_tokens;
      for (size_t head = first_head_; head < end_head_; ++head) run_chunk(head);
      remaining_tokens -= count_, count_ = 0, is_first_ = false;
    }
  }

 private:
  static constexpr size_t kTurned = 2 * kChunk;  // keys and queries of a channel

  bool is_read(size_t token) const { return !call_.mask || call_.mask[row_ * call_.tokens + token]; }

  void run_chunk(size_t head) {
    const size_t of_head = (row_ * call_.heads + head) * K_ * V_, per_key = call_.heads / call_.key_heads;
    head_ = head, key_head_ = head / per_key;
    before_ = call_.before + of_head, state_ = call_.state + of_head, panels_ = all_panels_ + (head - first_head_) * Vp_ * K_;
    const bool is_new_key = head == first_head_ || head % per_key == 0;
    pack(is_new_key);
    if (by_channel_) {
      decay_channels();
      turn(left_, 2 * count_, turned_), turn(suffixed_, count_, written_);
      relate_channels();
    } else {
      decay_tokens();
      if (is_new_key) turn(numbers_, 2 * count_, turned_), multiply_keys();
      relate_tokens();
    }
    // tokens that fill up the last rows of the solution
    fill(u_, kChunk * kTileLines * kColumns, 0), fill(betas_ + count_, kChunk - count_, 0);
    fill(pairs_ + count_ * kChunk, (kChunk - count_) * kChunk, 0);
    if (is_first_ && is_last_ && V_ == Vp_) {
      read_state();
      by_panels([&](auto lines, size_t v) { run_panel<decltype(lines)::value, true>(v); });
      write_state();
    } else {
      by_panels([&](auto lines, size_t v) { run_panel<decltype(lines)::value, false>(v); });
    }
    for (size_t i = 0; i < count_; ++i) {
      float* const output = call_.output + (tokens_[i] * call_.heads + head_) * V_;
      for (size_t v = 0; v < V_; v += kColumns) store_some(output + v, load_line<Floats>(values_ + i * Vp_ + v), V_ - v);
    }
  }

  // Keys and behind them queries times the scale, in whole lines; values, whose place outputs take; and betas.
  void pack(bool is_new_key) {
    for (size_t i = 0; i < count_; ++i) {
      const size_t of_key = (tokens_[i] * call_.key_heads + key_head_) * K_;
      if (is_new_key) {
        copy_lines(numbers_ + i * Kp_, call_.key + of_key, K_, 1);
        copy_lines(numbers_ + (count_ + i) * Kp_, call_.query + of_key, K_, call_.scale);
      }
      copy_lines(values_ + i * Vp_, call_.value + (tokens_[i] * call_.heads + head_) * V_, V_, 1);
      betas_[i] = call_.beta ? call_.beta[tokens_[i] * call_.heads + head_] : 1;
    }
  }

  const float* decay_of(size_t i) const { return call_.decay + (tokens_[i] * call_.heads + head_) * call_.decays; }

  // prefixes_: P_i. between_: the factors from token j to token i, 1 for j = i. suffixes_: a_{i+1} .. a_t. whole_: P_t.
  void decay_tokens() {
    float factors[kChunk] = {};
    for (size_t i = 0; i < count_ && call_.decays; ++i) factors[i] = decay_of(i)[0];
    store_line(factors, factor_of(load_line<Floats>(factors)));
    float prefix = 1;
    Floats products = all_lanes(0.f);
    for (size_t i = 0; i < count_; ++i) {
      const int lane = static_cast<int>(i);
      prefixes_[i] = prefix *= factors[i];
      products = choose(lanes_between(0, lane, lane + 1), all_lanes(1.f), products * factors[i]);
      store_line(between_ + i * kChunk, products);
    }
    store_line(suffixes_, products);
    fill(whole_, Kp_, prefix);
  }

  // The same where each channel decays by itself: left_ are keys and queries times P_i, suffixed_ keys times
  // a_{i+1} .. a_t, so that nothing is left to do for tokens.
  void decay_channels() {
    for (size_t i = 0; i < count_; ++i) {
      for (size_t k = 0; k < Kp_; k += kColumns) {
        store_line(factors_ + i * Kp_ + k, factor_of(load_some(decay_of(i) + k, K_ - k)));
      }
    }
    const size_t of_queries = count_ * Kp_;
    for (size_t k = 0; k < Kp_; k += kColumns) {
      Floats product = all_lanes(1.f);
      for (size_t i = 0; i < count_; ++i) {
        const size_t at = i * Kp_ + k;
        product = product * load_line<Floats>(factors_ + at);
        store_line(left_ + at, load_line<Floats>(numbers_ + at) * product);
        store_line(left_ + of_queries + at, load_line<Floats>(numbers_ + of_queries + at) * product);
      }
      store_line(whole_ + k, product);
      product = all_lanes(1.f);
      for (size_t i = count_; i-- > 0;) {
        const size_t at = i * Kp_ + k;
        store_line(suffixed_ + at, load_line<Floats>(numbers_ + at) * product);
        product = product * load_line<Floats>(factors_ + at);
      }
    }
    fill(prefixes_, kChunk, 1), fill(suffixes_, kChunk, 1);
  }

  // Rows, channel by channel.
  void turn(const float* rows, size_t count, float* columns) {
    for (size_t first = 0; first < count; first += kColumns) {
      for (size_t k = 0; k < Kp_; k += kColumns) {
        alignas(64) float block[kColumns * kColumns];
        transpose_block(rows + first * Kp_ + k, Kp_, block);
        for (size_t c = 0; c < kColumns; ++c) {
          store_line(columns + (k + c) * kTurned + first, load_line<Floats>(block + c * kColumns));
        }
      }
    }
  }

  // products_: of keys with keys, and behind them of queries with keys; heads that share a key share these.
  void multiply_keys() {
    const auto multiply = [&](size_t first_row, float* products) {
      by_tiles(count_, [&](auto size, size_t first) __attribute__((always_inline)) {
        Floats sums[size][1];
        for_lines(sums, first, [&](size_t i, size_t, size_t) __attribute__((always_inline)) {
          sums[i][0] = all_lanes(0.f);
        });
        add_product(turned_ + first_row + first, 1, kTurned, turned_, kTurned, K_, sums);
        for_lines(sums, first, [&](size_t i, size_t row, size_t) __attribute__((always_inline)) {
          store_line(products + row * kChunk, sums[i][0]);
        });
      });
    };
    if (call_.delta) multiply(0, products_);
    multiply(count_, products_ + kChunk * kChunk);
  }

  // pairs_: -b_i A_ij below the diagonal, and behind it B_ij up to the diagonal; the rest is 0. Here where all channels
  // of a token decay alike: products of keys and queries with keys, times the factors between them.
  void relate_tokens() {
    for (size_t i = 0; i < count_; ++i) {
      const Floats factors = load_line<Floats>(between_ + i * kChunk);
      const float *const of_keys = products_ + i * kChunk, *const of_queries = of_keys + kChunk * kChunk;
      if (call_.delta) store_pairs(pairs_, i, load_line<Floats>(of_keys) * factors, true);
      store_pairs(pairs_ + kChunk * kChunk, i, load_line<Floats>(of_queries) * factors, false);
    }
  }

  void store_pairs(float* pairs, size_t row, const Floats& line, bool is_key) const {
    const int end = static_cast<int>(is_key ? row : row + 1);
    const Floats signed_line = is_key ? line * -betas_[row] : line;
    store_line(pairs + row * kChunk, choose(lanes_between(0, 0, end), signed_line, all_lanes(0.f)));
  }

  // Where channels decay apart, pair by pair.
  void relate_channels() {
    for (size_t i = 0; i < count_; ++i) {
      const float *const key = numbers_ + i * Kp_, *const query = key + count_ * Kp_;
      float *const of_key = line_, *const of_query = line_ + Kp_;  // key and query, times the factors from token j on
      for (size_t k = 0; k < Kp_; k += kColumns) {
        store_line(of_key + k, load_line<Floats>(key + k)), store_line(of_query + k, load_line<Floats>(query + k));
      }
      float of_keys[kChunk] = {}, of_queries[kChunk] = {};
      for (size_t j = i + 1; j-- > 0;) {
        Floats a = all_lanes(0.f), b = a;
        for (size_t k = 0; k < Kp_; k += kColumns) {
          const Floats numbers = load_line<Floats>(numbers_ + j * Kp_ + k);
          const Floats factor = load_line<Floats>(factors_ + j * Kp_ + k);
          const Floats of_a = load_line<Floats>(of_key + k), of_b = load_line<Floats>(of_query + k);
          a = fused(of_a, numbers, a), b = fused(of_b, numbers, b);
          store_line(of_key + k, of_a * factor), store_line(of_query + k, of_b * factor);
        }
        of_keys[j] = sum_of(a), of_queries[j] = sum_of(b);
      }
      store_pairs(pairs_, i, load_line<Floats>(of_keys), true);
      store_pairs(pairs_ + kChunk * kChunk, i, load_line<Floats>(of_queries), false);
    }
  }

  // Calls run(lines as a type, first column) for each panel.
  template <typename Run>
  GRAPHOPT_FORCE_INLINE void by_panels(const Run& run) const {
    size_t v = 0;
    constexpr size_t kWidth = kTileLines * kColumns;
    for (; v + kWidth <= V_; v += kWidth) run(std::integral_constant<size_t, kTileLines>(), v);
    for (; v < V_; v += kColumns) run(std::integral_constant<size_t, 1>(), v);
  }

  // Where a chunk is the whole call, its state is read and written once, row after row as memory brings it, and not packed.
  // read_: keys and queries times the state, made of some rows of it after the other.
  void read_state() {
    constexpr size_t kDepth = 32;
    const bool is_last = row_ + 1 == call_.rows && head_ + 1 == call_.heads;
    if (!is_last) ahead_ = {before_ + K_ * V_, state_ + K_ * V_, kColumns, K_ * V_ / kColumns};
    const size_t first_query = call_.delta ? 0 : count_;
    for (size_t k = 0; k < K_; k += kDepth) {
      by_panels([&](auto lines, size_t v) __attribute__((always_inline)) {
        by_tiles(2 * count_ - first_query, [&](auto size, size_t first) __attribute__((always_inline)) {
          ahead_.fetch();
          const auto sums_at = [&](size_t row, size_t j) __attribute__((always_inline)) {
            return read_ + (first_query + row) * V_ + v + j * kColumns;
          };
          Floats sums[decltype(size)::value][decltype(lines)::value];
          for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
            sums[i][j] = k ? load_line<Floats>(sums_at(row, j)) : all_lanes(0.f);
          });
          const size_t depth = K_ - k < kDepth ? K_ - k : kDepth;
          add_product(turned_ + k * kTurned + first_query + first, 1, kTurned, before_ + k * V_ + v, V_, depth, sums);
          for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
            store_line(sums_at(row, j), sums[i][j]);
          });
        });
      });
    }
  }

  void write_state() {
    by_tiles(K_, [&](auto size, size_t first) __attribute__((always_inline)) {
      by_panels([&](auto lines, size_t v) __attribute__((always_inline)) {
        ahead_.fetch();
        Floats sums[decltype(size)::value][decltype(lines)::value];
        for_lines(sums, first, [&](size_t i, size_t k, size_t j) __attribute__((always_inline)) {
          sums[i][j] = load_line<Floats>(before_ + k * V_ + v + j * kColumns) * whole_[k];
        });
        add_product(written_ + first * kTurned, kTurned, 1, written_u_ + v * kChunk, lines * kColumns, count_, sums);
        for_lines(sums, first, [&](size_t i, size_t k, size_t j) __attribute__((always_inline)) {
          store_line(state_ + k * V_ + v + j * kColumns, sums[i][j]);
        });
      });
    });
  }

  // All tokens of the chunk, for the columns from v.
  template <size_t Lines, bool IsOnly>
  void run_panel(size_t v) {
    constexpr size_t kRow = Lines * kColumns;
    float *const panel = panels_ + v * K_, *const new_values = written_u_ + (IsOnly ? v * kChunk : 0);
    const size_t width = V_ - v;
    const auto of_line = [&](size_t j) { return width - j * kColumns; };  // numbers that are left
    if (is_first_ && !IsOnly) {
      const size_t count = width < kRow ? width : kRow;
      for (size_t k = 0; k < K_; ++k) copy_lines(panel + k * kRow, before_ + k * V_ + v, count, 1);
    }
    Ahead keys, values;
    if (!IsOnly) look_ahead<Lines>(v, &keys, &values);
    const auto fetch = [&]() __attribute__((always_inline)) {
      keys.fetch(), values.fetch();
    };
    // rows of keys or of queries times the state, and what becomes of them
    const auto multiply_state = [&](size_t first_of_part, const auto& end) __attribute__((always_inline)) {
      by_tiles(count_, [&](auto size, size_t first) __attribute__((always_inline)) {
        fetch();
        Floats sums[size][Lines];
        for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
          sums[i][j] = IsOnly ? load_line<Floats>(read_ + (first_of_part + row) * V_ + v + j * kColumns) : all_lanes(0.f);
        });
        if (!IsOnly) add_product(turned_ + first_of_part + first, 1, kTurned, panel, kRow, K_, sums);
        for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
          sums[i][j] = sums[i][j] * prefixes_[row];
        });
        end(first, sums);
      });
    };
    const auto value = [&](size_t i, size_t j) __attribute__((always_inline)) {
      return values_ + i * Vp_ + v + j * kColumns;
    };
    const auto line_of = [&](float* lines, size_t i, size_t j) __attribute__((always_inline)) {
      return lines + i * kRow + j * kColumns;
    };
    const auto store_u = [&](size_t i, size_t j, const Floats& line) __attribute__((always_inline)) {
      store_line(line_of(u_, i, j), line), store_line(line_of(new_values, i, j), line * suffixes_[i]);
    };
    if (call_.delta) {
      multiply_state(0, [&](size_t first, auto& sums) __attribute__((always_inline)) {
        for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
          store_line(line_of(u_, row, j), (load_line<Floats>(value(row, j)) - sums[i][j]) * betas_[row]);
        });
      });
      solve<Lines>(pairs_, u_, (count_ + 7) / 8 * 8, store_u);
    } else {
      for (size_t i = 0; i < count_; ++i) {
        for (size_t j = 0; j < Lines; ++j) store_u(i, j, load_line<Floats>(value(i, j)) * betas_[i]);
      }
    }
    multiply_state(count_, [&](size_t first, auto& sums) __attribute__((always_inline)) {
      const size_t end = first + sizeof sums / sizeof sums[0];
      add_product(pairs_ + (kChunk + first) * kChunk, kChunk, 1, u_, kRow, end, sums);
      for_lines(sums, first, [&](size_t i, size_t row, size_t j) __attribute__((always_inline)) {
        store_line(value(row, j), sums[i][j]);
      });
    });
    if (IsOnly) return;
    const auto write = [&](const auto& begin, const auto& to) __attribute__((always_inline)) {
      by_tiles(K_, [&](auto size, size_t first) __attribute__((always_inline)) {
        begin();
        Floats sums[size][Lines];
        for_lines(sums, first, [&](size_t i, size_t k, size_t j) __attribute__((always_inline)) {
          sums[i][j] = load_line<Floats>(panel + k * kRow + j * kColumns) * whole_[k];
        });
        add_product(written_ + first * kTurned, kTurned, 1, new_values, kRow, count_, sums);
        for_lines(sums, first, [&](size_t i, size_t k, size_t j) __attribute__((always_inline)) {
          to(k, j, sums[i][j]);
        });
      });
    };
    if (is_last_) {
      write(fetch, [&](size_t k, size_t j, const Floats& line) __attribute__((always_inline)) {
        store_some(state_ + k * V_ + v + j * kColumns, line, of_line(j));
      });
    } else {
      write([] {}, [&](size_t k, size_t j, const Floats& line) __attribute__((always_inline)) {
        store_line(panel + k * kRow + j * kColumns, line);
      });
    }
  }

  // What memory may bring while a panel is computed: the same part of the tokens of the next head, those of the first head
  // in the next chunk, or of the states of the head behind these.
  template <size_t Lines>
  void look_ahead(size_t v, Ahead* keys, Ahead* values) const {
    const bool has_next = head_ + 1 < end_head_;
    if (is_last_ && !has_next) {
      if (row_ + 1 == call_.rows && head_ + 1 == call_.heads) return;
      const size_t at = K_ * V_ + v * K_;
      *keys = {before_ + at, state_ + at, kColumns, Lines * K_};
      return;
    }
    const size_t token = has_next ? tokens_[0] : tokens_[count_ - 1] + 1, last = row_ * call_.tokens + call_.tokens;
    const size_t count = last - token < kChunk ? last - token : kChunk;
    const size_t head = has_next ? head_ + 1 : first_head_, key_head = head / (call_.heads / call_.key_heads);
    const size_t of_key = (token * call_.key_heads + key_head) * K_ + v;
    const size_t of_value = (token * call_.heads + head) * V_ + v;
    if (v < K_) *keys = {call_.key + of_key, call_.query + of_key, call_.key_heads * K_, count};
    *values = {call_.value + of_value, call_.output + of_value, call_.heads * V_, count};
  }

  const Recurrence& call_;
  const size_t row_, first_head_, end_head_, K_, Kp_, V_, Vp_;
  const bool by_channel_;
  size_t head_, key_head_;  // of the heads, the one that is computed
  float *pairs_, *products_, *between_, *u_, *written_u_, *values_, *betas_, *prefixes_, *suffixes_, *whole_;
  float *numbers_, *left_, *suffixed_, *factors_, *line_;  // token by token
  float *turned_, *written_;                               // left_ and suffixed_, channel by channel
  float *all_panels_, *panels_;                            // the states between chunks, and that of the head
  float* read_;                                            // what one chunk alone reads of it
  Ahead ahead_;                                            // of one chunk alone
  const float* before_;                                    // the state before the call
  float* state_;                                           // where it has to be after it
  size_t tokens_[kChunk], count_ = 0;                      // of the chunk
  bool is_first_, is_last_;
};

}  // namespace
}  // namespace graphopt
