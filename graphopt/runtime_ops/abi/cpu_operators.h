// The operators of libgraphopt_ops. The library for GPUs registers them along with its own, since onnxruntime
// takes a domain from one library only.
#pragma once

#include "abi/register.h"

extern "C" __attribute__((visibility("default"))) const graphopt::Operators* graphopt_cpu_operators();
