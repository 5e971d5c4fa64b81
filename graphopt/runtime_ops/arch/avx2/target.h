#pragma once

#include <cstddef>

#include <immintrin.h>

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 32;  // of a register

}  // namespace
}  // namespace graphopt
