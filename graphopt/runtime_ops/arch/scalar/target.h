#pragma once

#include <cstddef>

namespace graphopt {
namespace {

constexpr size_t kVectorBytes = 16;  // no registers: the compiler splits these as it has to

}  // namespace
}  // namespace graphopt
