// CausalConv's kernel: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// A call; everything is float32 and dense, in the order of the definition.
struct Convolution {
  const float *x, *weight, *bias, *state;  // bias is null where there is none
  const int64_t* mask;                     // null where no token is padding
  float *y, *new_state;
  size_t rows, tokens, channels, taps;
  bool silu;
};

// Channels that a task works on: their taps and the tail of the tokens stay in the first cache.
constexpr size_t kConvolutionChannels = 128;

struct ConvolutionKernels {
  // The channels from `first` of a row, at most kConvolutionChannels.
  void (*run)(const Convolution&, size_t row, size_t first, float* scratch);
};

extern const ConvolutionKernels kConvolutionScalar, kConvolutionAvx2, kConvolutionAvx512, kConvolutionNeon;

// Bytes of a task's scratch: taps and state, channel by channel, and where each token's numbers are.
inline size_t convolution_scratch(const Convolution& call) {
  return 2 * call.taps * kConvolutionChannels * sizeof(float) + (call.taps + call.tokens) * sizeof(const float*);
}

}  // namespace graphopt
