// Shared by the drivers of ggml.
#pragma once

#include <string.h>

#include "ggml.h"

static enum ggml_type type_called(const char *name) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        if (ggml_type_name(type) != NULL && strcmp(ggml_type_name(type), name) == 0) {
            return type;
        }
    }
    return GGML_TYPE_COUNT;
}

// ggml logs a line for every weight that it rearranges.
static void say_nothing(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}
