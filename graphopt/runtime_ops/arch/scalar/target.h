#pragma once

#include <cstddef>

#define GRAPHOPT_NEON 0

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 16;  // no registers: the compiler splits these as it has to

}  // namespace
}  // namespace graphopt
