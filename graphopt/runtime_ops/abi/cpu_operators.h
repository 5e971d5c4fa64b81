// The operators of libgraphopt_ops, which the library for GPUs hands to onnxruntime along with its own: onnxruntime
// takes a domain from one library only.
#pragma once

#include "abi/register.h"

extern "C" __attribute__((visibility("default"))) const graphopt::Operators* graphopt_cpu_operators(size_t* lists);
