#pragma once

#include <cstddef>

#include <arm_neon.h>

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 16;  // of a register

}  // namespace
}  // namespace graphopt
