// Finds what differs between sets of instructions: it lies in folders arch/<set>/, and these macros are the only way
// there. The build names the set that it compiles for, GRAPHOPT_ARCH, so kernels hold no #if of their own. It also
// names the set whose registers that one has, GRAPHOPT_FAMILY: AVX-VNNI is AVX2 with another product of bytes.
//
//     #include GRAPHOPT_ARCH_HEADER(matmul_table/cpu/arch, kernels.h)
//     #include GRAPHOPT_FAMILY_HEADER(matmul_table/cpu/arch, lookup.h)
#pragma once

#define GRAPHOPT_HEADER_STRING(path) #path
#define GRAPHOPT_HEADER(path) GRAPHOPT_HEADER_STRING(path)
#define GRAPHOPT_ARCH_HEADER(folder, file) GRAPHOPT_HEADER(folder/GRAPHOPT_ARCH/file)
#define GRAPHOPT_FAMILY_HEADER(folder, file) GRAPHOPT_HEADER(folder/GRAPHOPT_FAMILY/file)
