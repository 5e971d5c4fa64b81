// A convolution of some channels of a row; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
//
// Channels lie side by side, so a line is 16 of them. What differs from token to token is only where the numbers of its
// taps are: in the state, or in x.
#include "causal_conv/cpu/kernels.h"

#include "abi/instructions.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// y sigmoid(y).
inline Floats silu(const Floats& y) {
  const Floats power = exponential(smaller(all_lanes(88.f), y * -1.f));
  return y / (all_lanes(1.f) + power);
}

// Sums of `Lines` lines for a token, whose taps' numbers are at rows[0] .. rows[taps - 1], from column `at`.
template <size_t Lines>
void convolve(const Convolution& call, const float* const* rows, size_t at, const float* weight, const float* bias,
              float* y) {
  Floats sums[Lines];
#pragma GCC unroll 4
  for (size_t i = 0; i < Lines; ++i) sums[i] = load_line<Floats>(bias + i * kColumns);
  for (size_t tap = 0; tap < call.taps; ++tap) {
    const float *const numbers = rows[tap] + at, *const factors = weight + tap * kConvolutionChannels;
#pragma GCC unroll 4
    for (size_t i = 0; i < Lines; ++i) {
      sums[i] = fused(load_line<Floats>(numbers + i * kColumns), load_line<Floats>(factors + i * kColumns), sums[i]);
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < Lines; ++i) store_line(y + i * kColumns, call.silu ? silu(sums[i]) : sums[i]);
}

// The same for fewer channels than a line has.
void convolve_some(const Convolution& call, const float* const* rows, size_t at, size_t count, const float* weight,
                   const float* bias, float* y) {
  float lanes[kColumns];
  for (size_t c = 0; c < kColumns; ++c) lanes[c] = c < count ? bias[c] : 0;
  for (size_t tap = 0; tap < call.taps; ++tap) {
    for (size_t c = 0; c < count; ++c) {
      lanes[c] = __builtin_fmaf(rows[tap][at + c], weight[tap * kConvolutionChannels + c], lanes[c]);
    }
  }
  if (call.silu) store_line(lanes, silu(load_line<Floats>(lanes)));
  for (size_t c = 0; c < count; ++c) y[c] = lanes[c];
}

void run(const Convolution& call, size_t row, size_t first, float* scratch) {
  const size_t remaining_channels = call.channels - first, taps = call.taps;
  const size_t count = remaining_channels < kConvolutionChannels ? remaining_channels : kConvolutionChannels;
  float *const weight = scratch, *const bias = weight + taps * kConvolutionChannels, *const tail = bias + kConvolutionChannels;
  const auto** const rows = reinterpret_cast<const float**>(scratch + 2 * taps * kConvolutionChannels);
  const float* const state = call.state + (row * call.channels + first) * (taps - 1);
  for (size_t c = 0; c < count; ++c) {
    for (size_t tap = 0; tap < taps; ++tap) weight[tap * kConvolutionChannels + c] = call.weight[(first + c) * taps + tap];
    for (size_t tap = 0; tap + 1 < taps; ++tap) tail[tap * kConvolutionChannels + c] = state[c * (taps - 1) + tap];
    bias[c] = call.bias ? call.bias[first + c] : 0;
  }
  // a row of the state begins at its first column, as one of x does
  size_t row_count = 0;
  for (; row_count + 1 < taps; ++row_count) rows[row_count] = tail + row_count * kConvolutionChannels;
  for (size_t t = 0; t < call.tokens; ++t) {
    const size_t token = row * call.tokens + t;
    float* const y = call.y + token * call.channels + first;
    if (call.mask && !call.mask[token]) {
      for (size_t c = 0; c < count; ++c) y[c] = 0;
      continue;
    }
    rows[row_count++] = call.x + token * call.channels + first;
    const float* const* const window = rows + row_count - taps;
    size_t c = 0;
    for (; c + 4 * kColumns <= count; c += 4 * kColumns) convolve<4>(call, window, c, weight + c, bias + c, y + c);
    for (; c + kColumns <= count; c += kColumns) convolve<1>(call, window, c, weight + c, bias + c, y + c);
    if (c < count) convolve_some(call, window, c, count - c, weight + c, bias + c, y + c);
  }
  float* const new_state = call.new_state + (row * call.channels + first) * (taps - 1);
  const float* const* const last = rows + row_count - (taps - 1);
  for (size_t c = 0; c < count; ++c) {
    for (size_t tap = 0; tap + 1 < taps; ++tap) new_state[c * (taps - 1) + tap] = last[tap][c];
  }
}

}  // namespace

const ConvolutionKernels GRAPHOPT_NAME(kConvolution) = {run};

}  // namespace graphopt
