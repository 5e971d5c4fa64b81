// Compiled once for each set of instructions.
#include "cpu/moments.h"

#include <cmath>

#include "abi/instructions.h"

namespace graphopt {
namespace {

constexpr size_t kGroup = 32;
constexpr float kCodes = 16;

// Adds a group of numbers, place by place: x^4, and the squared error of 16 codes.
void add_group(const float* x, double* fourth, double* coarse) {
  float lows[kGroup], highs[kGroup];
  for (size_t i = 0; i < kGroup; ++i) {
    lows[i] = x[i] < 0.0f ? x[i] : 0.0f;
    highs[i] = x[i] > 0.0f ? x[i] : 0.0f;
  }
  for (size_t width = kGroup / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) {
      lows[i] = lows[i + width] < lows[i] ? lows[i + width] : lows[i];
      highs[i] = highs[i + width] > highs[i] ? highs[i + width] : highs[i];
    }
  }
  float step = (highs[0] - lows[0]) / (kCodes - 1);
  step = step == 0 ? 1.0f : step;
  const float zero = std::nearbyint(-lows[0] / step), least = -zero, most = kCodes - 1 - zero;
  for (size_t i = 0; i < kGroup; ++i) {
    const float code = std::nearbyint(x[i] / step);
    const float raised = code < least ? least : code, bounded = raised > most ? most : raised;
    const double error = static_cast<double>(bounded * step - x[i]);
    const double number = static_cast<double>(x[i]), square = number * number;
    coarse[i] += error * error;
    fourth[i] += square * square;
  }
}

void add_moments(const MomentsWork& work) {
  const size_t whole = work.rows / kGroup * kGroup;
  for (size_t token = 0; token < work.tokens; ++token) {
    const float* x = work.x + token * work.rows;
    for (size_t row = 0; row < work.rows; ++row) {
      const float size = std::fabs(x[row]);
      work.total[row] += static_cast<double>(x[row]);
      work.largest[row] = size > work.largest[row] ? size : work.largest[row];
    }
    for (size_t row = 0; row < whole; row += kGroup) add_group(x + row, work.fourth, work.coarse);
    if (whole == work.rows) continue;
    float rest[kGroup] = {};
    for (size_t row = whole; row < work.rows; ++row) rest[row - whole] = x[row];
    add_group(rest, work.fourth, work.coarse);
  }
}

}  // namespace

extern const MomentsKernel GRAPHOPT_NAME(kMoments);
const MomentsKernel GRAPHOPT_NAME(kMoments) = add_moments;

}  // namespace graphopt
