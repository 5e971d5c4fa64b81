#pragma once

#include "matmul_table/cpu/arch/generic/bit_plane.h"
