#pragma once

#include <cstddef>

#include <arm_neon.h>

#define GRAPHOPT_NEON 1

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 16;  // of a register

}  // namespace
}  // namespace graphopt
