// What kernels do with lines: load, convert, multiply. Each set of instructions has its own, in arch/<set>/:
//
//     floats.h   load_halves      16 numbers in float16 as floats
//                multiply_add     a * b + c, rounded once, so that all sets give the same bits
//                dot_float        sum + a line times one number
//                settle           ends a sum here: compilers put additions off until many products wait in memory
//     int8.h     dot<Small>       sum + the products of the 4 numbers of each lane of `bytes`, less kByteBias, and the
//                                 4 signed ones of `word`, none of them -128; exact. `Small` promises bytes of 128 at
//                                 most. With a bias the bytes are given as signed ones
//                kByteBias        what is taken off the bytes: ARM multiplies signed bytes, x86 unsigned ones
//                kSumsBytes       whether products of bytes are summed up in 32 bits at once
//                kByPairs         whether they are made by way of numbers of 16 bits: `dot` of bytes up to 128 is
//                                 cheap, as two products of them fit 16 bits, and anything else is better done by
//                                 `dot_pairs`, which only such a set has: sum + the products of the 2 signed numbers
//                                 of 16 bits of each lane of `pairs` and the 2 of `word`; exact
#pragma once

#include "arch/line.h"
#include GRAPHOPT_FAMILY_HEADER(arch, floats.h)
#include GRAPHOPT_ARCH_HEADER(arch, int8.h)
