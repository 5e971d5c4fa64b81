// The storages of pages, one line each, in the order of their numbers in spec/storages. How a CPU and a GPU read what a
// page holds is in cpu/ and cuda/, for each type of number in a file of its own; nothing else tells storages apart.
#pragma once

#include "abi/half.h"
#include "kv_attention/shared/inline.h"

namespace graphopt {

struct BFloat16;
struct Float8;
template <unsigned Bits>
struct Scaled;  // codes of few bits, with a scale for each token

// What a page holds: floats of some type, or codes of some bits with scales beside them.
template <typename T>
struct Numbers {
  using Number = T;
};
template <unsigned Bits>
struct Codes {};

template <unsigned Bits>
constexpr unsigned bits_of(Codes<Bits>) {
  return Bits;
}
template <typename T>
constexpr bool is_codes(Numbers<T>) {
  return false;
}
template <unsigned Bits>
constexpr bool is_codes(Codes<Bits>) {
  return true;
}

// STORAGE(name in C++, name in a node, type of the tensors, bits of a number, largest code or 0, what a page holds)
#define GRAPHOPT_STORAGES(STORAGE)                                 \
  STORAGE(kFloat32, "float32", kFloat, 32, 0, Numbers<float>)      \
  STORAGE(kFloat16, "float16", kFloat16, 16, 0, Numbers<Half>)     \
  STORAGE(kBFloat16, "bfloat16", kBFloat16, 16, 0, Numbers<BFloat16>) \
  STORAGE(kFloat8, "float8", kFloat8, 8, 0, Numbers<Float8>)       \
  STORAGE(kInt8, "int8", kUint8, 8, 255, Codes<8>)                 \
  STORAGE(kInt4, "int4", kUint8, 4, 15, Codes<4>)

// Storages of pages that a CPU alone has kernels for.
#define GRAPHOPT_CPU_STORAGES(STORAGE)             \
  STORAGE(kInt6, "int6", kUint8, 6, 63, Codes<6>)  \
  STORAGE(kInt3, "int3", kUint8, 3, 7, Codes<3>)   \
  STORAGE(kInt2, "int2", kUint8, 2, 3, Codes<2>)   \
  STORAGE(kInt1, "int1", kUint8, 1, 1, Codes<1>)

// The storages of blocks alone, which requests share: each token has a scale of its own, so it is stored at once, and no
// token changes what another one has stored.
#define GRAPHOPT_TOKEN_STORAGES(STORAGE)                                  \
  STORAGE(kToken8, "int8", kUint8, 8, 0, Numbers<Scaled<8>>)              \
  STORAGE(kToken6, "int6", kUint8, 6, 0, Numbers<Scaled<6>>)              \
  STORAGE(kToken4, "int4", kUint8, 4, 0, Numbers<Scaled<4>>)

#define GRAPHOPT_STORAGE_NAME(id, name, type, bits, levels, holds) id,
enum class Storage : int {
  GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_NAME) GRAPHOPT_CPU_STORAGES(GRAPHOPT_STORAGE_NAME) kCount,
  GRAPHOPT_TOKEN_STORAGES(GRAPHOPT_STORAGE_NAME)
};
#undef GRAPHOPT_STORAGE_NAME

#define GRAPHOPT_STORAGE_CASE(id, name, type, bits, levels, holds) \
  case Storage::id: return visit(holds());
// Calls visit() with a Numbers or Codes: what pages of a storage that GPUs know hold. On the host.
template <typename Visit>
inline __attribute__((always_inline)) auto with_storage(Storage storage, const Visit& visit) {
  switch (storage) {
    GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_CASE)
    default: __builtin_unreachable();  // it was checked where the attributes were read
  }
}
// The same for blocks and for what a CPU alone knows.
template <typename Visit>
inline __attribute__((always_inline)) auto with_any_storage(Storage storage, const Visit& visit) {
  switch (storage) {
    GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_CASE)
    GRAPHOPT_CPU_STORAGES(GRAPHOPT_STORAGE_CASE)
    GRAPHOPT_TOKEN_STORAGES(GRAPHOPT_STORAGE_CASE)
    default: __builtin_unreachable();
  }
}
#undef GRAPHOPT_STORAGE_CASE

// Calls visit() with the Codes of a storage of codes.
template <typename Visit>
inline __attribute__((always_inline)) void with_codes(Storage storage, const Visit& visit) {
  with_any_storage(storage, [&](auto holds) __attribute__((always_inline)) {
    if constexpr (is_codes(holds)) visit(holds);
  });
}

// Whether GPUs have kernels for a storage of pages.
inline bool known_to_gpus(Storage storage) {
#define GRAPHOPT_STORAGE_KNOWN(id, name, type, bits, levels, holds) storage == Storage::id ||
  return GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_KNOWN) false;
#undef GRAPHOPT_STORAGE_KNOWN
}

// Bits of a number, and the largest code; 0 where a page holds floats.
inline __attribute__((always_inline)) unsigned bits_of_storage(Storage storage) {
#define GRAPHOPT_STORAGE_BITS(id, name, type, bits, levels, holds) bits,
  constexpr unsigned kBits[] = {GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_BITS) GRAPHOPT_CPU_STORAGES(GRAPHOPT_STORAGE_BITS) 0,
                                GRAPHOPT_TOKEN_STORAGES(GRAPHOPT_STORAGE_BITS)};
#undef GRAPHOPT_STORAGE_BITS
  return kBits[static_cast<int>(storage)];
}
inline __attribute__((always_inline)) unsigned levels_of_storage(Storage storage) {
#define GRAPHOPT_STORAGE_LEVELS(id, name, type, bits, levels, holds) levels,
  constexpr unsigned kLevels[] = {GRAPHOPT_STORAGES(GRAPHOPT_STORAGE_LEVELS) GRAPHOPT_CPU_STORAGES(GRAPHOPT_STORAGE_LEVELS) 0,
                                  GRAPHOPT_TOKEN_STORAGES(GRAPHOPT_STORAGE_LEVELS)};
#undef GRAPHOPT_STORAGE_LEVELS
  return kLevels[static_cast<int>(storage)];
}

// Neighbouring codes of so many bits that are packed together.
GRAPHOPT_INLINE size_t unit_of_bits(unsigned bits) {
  return bits == 3 || bits == 1 ? 32 : bits == 6 || bits == 2 ? 16 : bits == 4 ? 8 : 4;
}

}  // namespace graphopt
