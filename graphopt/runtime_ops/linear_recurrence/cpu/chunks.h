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
#pragma once

#include "linear_recurrence/cpu/products.h"

namespace graphopt {
namespace {

class Chunks {
 public:
  Chunks(const Recurrence& call, size_t row, size_t head, float* scratch)
      : call_(call), row_(row), head_(head), key_head_(head / (call.heads / call.key_heads)), K_(call.channels),
        Kp_(in_lines(K_)), V_(call.width), Vp_(in_lines(V_)), longest_(longest_chunk(call)) {
    const auto take = [&](size_t numbers) {
      float* const first = scratch;
      scratch += numbers;
      return first;
    };
    numbers_ = take(2 * longest_ * Kp_), left_ = take(2 * longest_ * Kp_);
    suffixed_ = take(longest_ * Kp_), turned_ = take(longest_ * Kp_), factors_ = take(longest_ * Kp_);
    pairs_ = take(2 * longest_ * longest_);
    u_ = take(longest_ * Vp_), read_ = take(2 * longest_ * Vp_);
    whole_ = take(Kp_), line_ = take(2 * Kp_), betas_ = take(longest_), tokens_ = take(2 * longest_);
    const size_t of_head = (row * call.heads + head) * K_ * V_;
    before_ = call.before + of_head, state_ = new_state_ = call.state + of_head;
    const bool is_last = row + 1 == call.rows && head + 1 == call.heads;
    if (before_ != state_) ahead_ = {is_last ? before_ : before_ + K_ * V_, state_, K_ * V_ / kColumns};
    if (V_ == Vp_) return;
    state_ = scratch;
    for (size_t k = 0; k < K_; ++k) copy_lines(state_ + k * Vp_, before_ + k * V_, V_, 1);
    before_ = state_;
  }

  ~Chunks() {
    if (before_ != state_) __builtin_memmove(state_, before_, K_ * V_ * sizeof(float));  // all tokens are padding
    if (state_ == new_state_) return;
    for (size_t k = 0; k < K_; ++k) __builtin_memcpy(new_state_ + k * V_, state_ + k * Vp_, V_ * sizeof(float));
  }

  void run() {
    size_t count = 0;
    size_t* const tokens = reinterpret_cast<size_t*>(tokens_);
    for (size_t i = 0; i < call_.tokens; ++i) {
      const size_t token = row_ * call_.tokens + i;
      if (call_.mask && !call_.mask[token]) fill(call_.output + (token * call_.heads + head_) * V_, V_, 0);
      else tokens[count++] = token;
      if (count && (count == kChunk || i + 1 == call_.tokens)) {
        run_chunk(tokens, count);
        count = 0;
      }
    }
  }

 private:
  void run_chunk(const size_t* tokens, size_t count) {
    const size_t rows = (count + 7) / 8 * 8, lines = Vp_ / kColumns;
    pack(tokens, count);
    decay(tokens, count);
    // what keys and queries read of the state before the chunk, while memory brings states: the next head's, and where this
    // one's goes
    const size_t skipped = call_.delta ? 0 : count;
    float *const of_keys = read_, *const of_queries = read_ + count * Vp_;
    const float* const stacked = (call_.decays ? left_ : numbers_) + skipped * Kp_;
    multiply({stacked, Kp_, 1, before_, Vp_, read_ + skipped * Vp_, Vp_, 2 * count - skipped, lines, K_, nullptr, nullptr,
              false, false, &ahead_});
    relate(count);
    for (size_t i = 0; i < count; ++i) {
      const float* const value = call_.value + (tokens[i] * call_.heads + head_) * V_;
      for (size_t v = 0; v < Vp_; v += kColumns) {
        Floats line = load_some(value + v, V_ - v);
        if (call_.delta) line = line - load_line<Floats>(of_keys + i * Vp_ + v);
        store_line(u_ + i * Vp_ + v, line * betas_[i]);
      }
    }
    if (call_.delta) {
      fill(u_ + count * Vp_, (rows - count) * Vp_, 0);
      solve(pairs_, longest_, u_, Vp_, rows, lines);
    }
    const float* const of_pairs = pairs_ + longest_ * longest_;
    multiply({of_pairs, longest_, 1, u_, Vp_, of_queries, Vp_, count, lines, count, of_queries, nullptr, true, false});
    for (size_t i = 0; i < count; ++i) {
      float* const output = call_.output + (tokens[i] * call_.heads + head_) * V_;
      for (size_t v = 0; v < V_; v += kColumns) {
        store_some(output + v, load_line<Floats>(of_queries + i * Vp_ + v), V_ - v);
      }
    }
    const float* const suffixed = call_.decays ? suffixed_ : numbers_;
    const float* const whole = call_.decays ? whole_ : nullptr;
    multiply({suffixed, 1, Kp_, u_, Vp_, state_, Vp_, K_, lines, count, before_, whole, false, false});
    before_ = state_;
  }

  // Keys and behind them queries times the scale, in whole lines; and betas.
  void pack(const size_t* tokens, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const size_t of_key = (tokens[i] * call_.key_heads + key_head_) * K_;
      copy_lines(numbers_ + i * Kp_, call_.key + of_key, K_, 1);
      copy_lines(numbers_ + (count + i) * Kp_, call_.query + of_key, K_, call_.scale);
      betas_[i] = call_.beta ? call_.beta[tokens[i] * call_.heads + head_] : 1;
    }
  }

  // factors_: a_i, of whole lines for each token. left_: keys and queries times P_i. suffixed_: keys times a_{i+1} .. a_t.
  // whole_: P_t.
  void decay(const size_t* tokens, size_t count) {
    if (!call_.decays) return;
    for (size_t i = 0; i < count; ++i) {
      const float* const decay = call_.decay + (tokens[i] * call_.heads + head_) * call_.decays;
      const Floats same = factor_of(all_lanes(decay[0]));
      for (size_t k = 0; k < Kp_; k += kColumns) {
        const Floats line = call_.decays == 1 ? same : factor_of(load_some(decay + k, K_ - k));
        store_line(factors_ + i * Kp_ + k, line);
      }
    }
    const size_t of_queries = count * Kp_;
    for (size_t k = 0; k < Kp_; k += kColumns) {
      Floats product = all_lanes(1.f);
      for (size_t i = 0; i < count; ++i) {
        const size_t at = i * Kp_ + k;
        product = product * load_line<Floats>(factors_ + at);
        store_line(left_ + at, load_line<Floats>(numbers_ + at) * product);
        store_line(left_ + of_queries + at, load_line<Floats>(numbers_ + of_queries + at) * product);
      }
      store_line(whole_ + k, product);
      product = all_lanes(1.f);
      for (size_t i = count; i-- > 0;) {
        const size_t at = i * Kp_ + k;
        store_line(suffixed_ + at, load_line<Floats>(numbers_ + at) * product);
        product = product * load_line<Floats>(factors_ + at);
      }
    }
  }

  // pairs_: -b_i A_ij below the diagonal, and behind it B_ij up to the diagonal; the rest of what is read is 0.
  void relate(size_t count) {
    float* const of_queries = pairs_ + longest_ * longest_;
    if (call_.decays > 1) relate_channels(count);
    else relate_tokens(count);
    for (size_t i = 0; i < in_lines(count); ++i) {
      const float beta = i < count ? -betas_[i] : 0;
      for (size_t j = 0; j < in_lines(count); j += kColumns) {
        float *const a = pairs_ + i * longest_ + j, *const b = of_queries + i * longest_ + j;
        const int row = static_cast<int>(i), column = static_cast<int>(j), end = i < count ? row : 0;
        if (call_.delta) {
          store_line(a, choose(lanes_between(column, 0, end), load_line<Floats>(a) * beta, all_lanes(0.f)));
        }
        store_line(b, choose(lanes_between(column, 0, row + 1), load_line<Floats>(b), all_lanes(0.f)));
      }
    }
  }

  // Where all channels of a token decay alike: products of keys and queries with keys, times the factors between them.
  void relate_tokens(size_t count) {
    const size_t lines = in_lines(count) / kColumns, of_queries = longest_ * longest_;
    turn(count);
    const auto relate = [&](const float* of, float* pairs) {
      multiply({of, Kp_, 1, turned_, longest_, pairs, longest_, count, lines, K_, nullptr, nullptr, false, true});
    };
    if (call_.delta) relate(numbers_, pairs_);
    relate(numbers_ + count * Kp_, pairs_ + of_queries);
    if (!call_.decays) return;
    // the factors from token j to token i are those to the token before i, times a_i; 1 for j = i
    float products[kChunk];
    for (size_t i = 0; i < count; ++i) {
      const float factor = factors_[i * Kp_];
      for (size_t j = 0; j < i; j += kColumns) store_line(products + j, load_line<Floats>(products + j) * factor);
      if (i % kColumns == 0) fill(products + i, kColumns, 0);
      products[i] = 1;
      for (size_t j = 0; j <= i; j += kColumns) {
        float* const pair = pairs_ + i * longest_ + j;
        const Floats product = load_line<Floats>(products + j);
        if (call_.delta) store_line(pair, load_line<Floats>(pair) * product);
        store_line(pair + of_queries, load_line<Floats>(pair + of_queries) * product);
      }
    }
  }

  // Where channels decay apart: blocks of a line of tokens. Inside a block pair by pair; between two of them keys and
  // queries times what comes before them in their block, keys times what comes behind them in theirs.
  void relate_channels(size_t count) {
    const size_t blocks = in_lines(count) / kColumns, of_queries = longest_ * longest_;
    for (size_t block = 0; block < blocks; ++block) {
      const size_t first = block * kColumns, end = first + kColumns < count ? first + kColumns : count;
      relate_inside(first, end, count);
      // rows of keys and queries, times the factors from the beginning of this block
      float *const keys = left_, *const queries = left_ + count * Kp_;
      for (size_t k = 0; k < Kp_; k += kColumns) {
        Floats product = all_lanes(1.f);
        for (size_t i = first; i < end; ++i) {
          const size_t at = i * Kp_ + k;
          product = product * load_line<Floats>(factors_ + at);
          store_line(keys + at, load_line<Floats>(numbers_ + at) * product);
          store_line(queries + at, load_line<Floats>(numbers_ + count * Kp_ + at) * product);
        }
      }
      for (size_t other = block; other-- > 0;) {
        const auto relate = [&](const float* of, float* pairs) {
          const size_t at = other * kColumns;
          multiply({of + first * Kp_, Kp_, 1, turned_ + at, longest_, pairs + first * longest_ + at, longest_, end - first,
                    1, K_, nullptr, nullptr, false, false});
        };
        if (call_.delta) relate(keys, pairs_);
        relate(queries, pairs_ + of_queries);
        if (!other) break;
        // the block that was passed lies between now
        for (size_t k = 0; k < Kp_; k += kColumns) {
          const Floats between = product_of(other, k);
          for (size_t i = first; i < end; ++i) {
            const size_t at = i * Kp_ + k;
            store_line(keys + at, load_line<Floats>(keys + at) * between);
            store_line(queries + at, load_line<Floats>(queries + at) * between);
          }
        }
      }
      turn_block(first, end);
    }
  }

  // The product of all factors of a block, for the channels from k.
  Floats product_of(size_t block, size_t k) const {
    Floats product = all_lanes(1.f);
    for (size_t i = 0; i < kColumns; ++i) {
      product = product * load_line<Floats>(factors_ + (block * kColumns + i) * Kp_ + k);
    }
    return product;
  }

  // Pairs of tokens of a block.
  void relate_inside(size_t first, size_t end, size_t count) {
    for (size_t i = first; i < end; ++i) {
      const float *const key = numbers_ + i * Kp_, *const query = key + count * Kp_;
      float *const now = line_, *const of_query = line_ + Kp_;  // key and query, times the factors from token j on
      for (size_t k = 0; k < Kp_; k += kColumns) {
        store_line(now + k, load_line<Floats>(key + k)), store_line(of_query + k, load_line<Floats>(query + k));
      }
      for (size_t j = i + 1; j-- > first;) {
        Floats a = all_lanes(0.f), b = a;
        for (size_t k = 0; k < Kp_; k += kColumns) {
          const Floats other = load_line<Floats>(numbers_ + j * Kp_ + k), factor = load_line<Floats>(factors_ + j * Kp_ + k);
          const Floats of_a = load_line<Floats>(now + k), of_b = load_line<Floats>(of_query + k);
          a = fused(of_a, other, a), b = fused(of_b, other, b);
          store_line(now + k, of_a * factor), store_line(of_query + k, of_b * factor);
        }
        pairs_[i * longest_ + j] = sum_of(a), pairs_[(longest_ + i) * longest_ + j] = sum_of(b);
      }
    }
  }

  // Keys of a block, times the factors behind them in it, channel by channel.
  void turn_block(size_t first, size_t end) {
    float* const keys = numbers_ + first * Kp_;
    for (size_t k = 0; k < Kp_; k += kColumns) {
      alignas(64) float rows[kColumns * kColumns];
      fill(rows, kColumns * kColumns, 0);
      Floats product = all_lanes(1.f);
      for (size_t i = end - first; i-- > 0;) {
        store_line(rows + i * kColumns, load_line<Floats>(keys + i * Kp_ + k) * product);
        product = product * load_line<Floats>(factors_ + (first + i) * Kp_ + k);
      }
      store_turned(rows, kColumns, k, first);
    }
  }

  // Keys channel by channel.
  void turn(size_t count) {
    for (size_t first = 0; first < count; first += kColumns) {
      for (size_t k = 0; k < Kp_; k += kColumns) store_turned(numbers_ + first * Kp_ + k, Kp_, k, first);
    }
  }

  void store_turned(const float* from, size_t row, size_t k, size_t first) {
    alignas(64) float block[kColumns * kColumns];
    transpose_block(from, row, block);
    for (size_t c = 0; c < kColumns; ++c) {
      store_line(turned_ + (k + c) * longest_ + first, load_line<Floats>(block + c * kColumns));
    }
  }

  const Recurrence& call_;
  const size_t row_, head_, key_head_, K_, Kp_, V_, Vp_, longest_;
  float *numbers_, *left_, *suffixed_, *turned_, *factors_, *pairs_, *u_, *read_, *whole_, *line_, *betas_, *tokens_;
  Ahead ahead_;
  const float* before_;         // the state before the chunk
  float *state_, *new_state_;  // the state after it, in whole lines; where it has to be at last
};

}  // namespace
}  // namespace graphopt
