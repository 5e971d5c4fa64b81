#pragma once

#include "kv_attention/cpu/decode_codes.h"
