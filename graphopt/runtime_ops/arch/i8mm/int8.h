#pragma once

#include "arch/dotprod/int8.h"
