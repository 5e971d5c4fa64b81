// Lines of 64 bytes, one cache line: whole registers of the set of instructions, side by side.
//
// A line holds one value for each of the 16 columns of a tile. No function of the standard library is called: the
// linker could keep the copy that was compiled for wide vectors for a machine that has none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/convert.h"
#include "arch/arch.h"
#include GRAPHOPT_FAMILY_HEADER(arch, target.h)

// Small steps of a loop that would be calls where a file has very many such loops. With checks in them, a file of them
// takes minutes to compile: there they may be calls.
#if defined(__SANITIZE_ADDRESS__)
#define GRAPHOPT_FORCE_INLINE inline
#else
#define GRAPHOPT_FORCE_INLINE inline __attribute__((always_inline))
#endif

namespace graphopt {
namespace {

constexpr size_t kLine = 64, kColumns = 16, kParts = kLine / kVectorBytes;

template <typename T>
struct Line {
  typedef T Part __attribute__((vector_size(kVectorBytes)));
  Part part[kParts];
};
using Bytes = Line<uint8_t>;
using Integers = Line<int32_t>;
using Floats = Line<float>;

// The result of an operation on each part.
template <typename L, typename Operation>
GRAPHOPT_FORCE_INLINE L by_parts(const Operation& operation) {
  L result;
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) result.part[i] = operation(i);
  return result;
}

// Part by part: a copy of the whole would use smaller pieces, and loads that span them stall.
template <typename L>
GRAPHOPT_FORCE_INLINE L load_line(const void* from) {
  return by_parts<L>([&](size_t i) {
    typename L::Part part;
    __builtin_memcpy(&part, static_cast<const char*>(from) + i * kVectorBytes, sizeof part);
    return part;
  });
}

template <typename L>
GRAPHOPT_FORCE_INLINE void store_line(void* to, const L& line) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) {
    __builtin_memcpy(static_cast<char*>(to) + i * kVectorBytes, &line.part[i], kVectorBytes);
  }
}

template <typename T>
inline Line<T> all_lanes(T value) {
  // taking off 0 leaves every number as it is, which adding 0 does not do to -0: the compiler has nothing to compute
  return by_parts<Line<T>>([&](size_t) { return value - typename Line<T>::Part{}; });
}

inline Floats operator+(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] + b.part[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] - b.part[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] * b.part[i]; });
}
inline Floats operator*(const Floats& a, float b) { return a * all_lanes(b); }

inline Floats to_floats(const Floats& a) { return a; }
GRAPHOPT_FORCE_INLINE Floats to_floats(const Integers& a) {
  return by_parts<Floats>([&](size_t i) { return __builtin_convertvector(a.part[i], Floats::Part); });
}

}  // namespace
}  // namespace graphopt
