// Products of numbers as integers of 11 bits, two of a sum side by side. Raw pointers in, raw pointers out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

constexpr size_t kIntegerPanel = 64;        // vectors whose numbers lie together
constexpr size_t kIntegerSegment = 1024;    // pairs that are summed up in 32 bits: 2048 x 1023 x 1023 < 2^31
constexpr float kLargestInteger = 1023.0f;

// Vectors of floats become integers, the largest of each 1023 or -1023. A NaN or an infinity makes the scale NaN.
struct IntegersWork {
  const float* x;     // number j of vector i lies at i x vector_stride + j x number_stride; one of them is 1
  size_t vectors, length, vector_stride, number_stride;
  int16_t* integers;  // [panels of 64 vectors, pairs, 64, 2], zeros where there is nothing
  float* scales;      // [vectors], what an integer means
  uint64_t* squares;  // [vectors], the sum of the integers' squares
};

// The products of each vector of one array with each of another. Sums are exact, then multiplied by both scales in
// double precision.
struct IntegerProductsWork {
  const int16_t *left, *right;  // whole panels
  const float *left_scales, *right_scales;
  size_t rows, columns, pairs;
  double* sums;     // [rows, stride], is added to; or null
  float* products;  // [rows, stride], is written; or null
  size_t stride;
  uint8_t half;     // only panels on and above the diagonal
};

using IntegersKernel = void (*)(const IntegersWork&);
extern const IntegersKernel kIntegersScalar, kIntegersAvx2, kIntegersAvx512, kIntegersNeon;

using IntegerProductsKernel = void (*)(const IntegerProductsWork&);
extern const IntegerProductsKernel kIntegerProductsScalar, kIntegerProductsAvx2, kIntegerProductsAvx512,
    kIntegerProductsNeon;

}  // namespace graphopt
