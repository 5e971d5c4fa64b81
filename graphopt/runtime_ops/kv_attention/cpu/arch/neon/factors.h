#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

constexpr size_t kCodeRows = 2;  // of factors that go together

// Rounded factors of one row as the instructions take them, 16 at a time.
struct FactorRow {
  // of each four the first and third, then the second and fourth, as bytes are taken apart
  alignas(kLine) int16_t pairs[kMostFactors];

  void put(size_t i, const Floats& numbers) {
    for (size_t part = 0; part < kParts; ++part, i += 4) {
      const int32x4_t x = vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(numbers.part[part]));
      const int16x4_t four = vmovn_s32(vcombine_s32(vuzp1_s32(vget_low_s32(x), vget_high_s32(x)),
                                                    vuzp2_s32(vget_low_s32(x), vget_high_s32(x))));
      vst1_s16(pairs + i, four);
    }
  }
};

inline int32_t largest_of(const Integers& a) {
  const auto part = [&](size_t i) { return reinterpret_cast<int32x4_t>(a.part[i]); };
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(part(0), part(1)), vmaxq_s32(part(2), part(3))));
}

}  // namespace
}  // namespace graphopt
