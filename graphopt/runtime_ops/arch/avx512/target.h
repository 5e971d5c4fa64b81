#pragma once

#include <cstddef>

#include <immintrin.h>

#define GRAPHOPT_NEON 0

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 64;  // of a register

}  // namespace
}  // namespace graphopt
