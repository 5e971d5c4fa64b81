// Copies between host and device, for a kernel's constants.
#pragma once

#include <cstddef>

namespace graphopt {

// In the order of the stream; the host's memory may be freed at once. Returns null or an error.
const char* copy_to_device(void* device, const void* host, size_t bytes, void* stream);
// Waits until the copy is done.
const char* copy_to_host(void* host, const void* device, size_t bytes, void* stream);
// Source and destination must not overlap; runs in the order of the stream.
const char* copy_on_device(void* to, const void* from, size_t bytes, void* stream);
// Waits for all work of the stream.
const char* wait_for(void* stream);

}  // namespace graphopt
