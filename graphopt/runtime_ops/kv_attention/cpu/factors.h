// Queries and weights as integers of 16 bits, for products with codes.
#pragma once

#include "kv_attention/cpu/numbers.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, factors.h)

namespace graphopt {
namespace {

// The largest factor, 256 * upper + lower; so sums of 256 products with codes of 8 bits stay below 2^31.
constexpr float kLargestFactor = 32639;

// Factors of codes, rounded to 16 bits for each row. Rows go side by side: each waits for its largest.
template <size_t Rows>
struct Factors {
  alignas(kLine) float exact[Rows][kMostFactors];
  FactorRow rounded[Rows];
  float steps[Rows], offsets[Rows];

  // exact = of(row, i) times the steps, offsets = the sum of of(row, i) times the lows; take(i, &low, &step) reads
  // both.
  template <typename Of, typename Take>
  inline __attribute__((always_inline)) void round(size_t count, const Of& of, const Take& take) {
    Floats offset[Rows];
    Integers most[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) offset[r] = all_lanes(0.f), most[r] = Integers{};
    for (size_t i = 0; i < count; i += kColumns) {
      Floats low, step;
      take(i, &low, &step);
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const Floats x = of(r, i), scaled = x * step;
        offset[r] = fused(x, low, offset[r]);
        store_line(exact[r] + i, scaled);
        // The bits of magnitudes are in their order, and those of NaN come last, so a NaN is never lost.
        most[r] = by_parts<Integers>([&](size_t part) {
          const auto bits = reinterpret_cast<Integers::Part>(scaled.part[part]) & 0x7fffffff;
          return bits > most[r].part[part] ? bits : most[r].part[part];
        });
      }
    }
    float inverse[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const float largest = bits_of<float>(largest_of(most[r]));
      const bool none = largest < 1e-30f;
      inverse[r] = none ? 0 : kLargestFactor / largest;
      steps[r] = none ? 0 : largest / kLargestFactor;
      offsets[r] = sum_of(offset[r]);
    }
    for (size_t i = 0; i < count; i += kColumns) {
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) rounded[r].put(i, load_line<Floats>(exact[r] + i) * inverse[r]);
    }
  }
};

}  // namespace
}  // namespace graphopt
