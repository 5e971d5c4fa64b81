// What graphopt/quantization/statistics/moments.py and integers.py call. Functions return 0 where GRAPHOPT_OPS_ISA is
// unknown or not of this machine.
#include "abi/instructions.h"
#include "cpu/integers.h"
#include "cpu/moments.h"

extern "C" __attribute__((visibility("default"))) int graphopt_add_moments(const float* x, size_t tokens, size_t rows,
                                                                           double* total, float* largest,
                                                                           double* fourth, double* coarse) {
  graphopt::Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  GRAPHOPT_OF(instructions, graphopt::kMoments)({x, tokens, rows, total, largest, fourth, coarse});
  return 1;
}

extern "C" __attribute__((visibility("default"))) int graphopt_to_integers(const graphopt::IntegersWork* work) {
  graphopt::Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  GRAPHOPT_OF(instructions, graphopt::kIntegers)(*work);
  return 1;
}

extern "C" __attribute__((visibility("default"))) int graphopt_multiply_integers(
    const graphopt::IntegerProductsWork* work) {
  graphopt::Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  GRAPHOPT_OF(instructions, graphopt::kIntegerProducts)(*work);
  return 1;
}
