// Copies between host and device, for what a kernel is made of.
#pragma once

#include <cstddef>

namespace graphopt {

// In the order of the stream; the host's memory may be given up at once. Null, or what went wrong.
const char* copy_to_device(void* device, const void* host, size_t bytes, void* stream);
// Waits until it is done.
const char* copy_to_host(void* host, const void* device, size_t bytes, void* stream);
// Of memory that does not overlap; it is done in the order of the stream.
const char* copy_on_device(void* to, const void* from, size_t bytes, void* stream);
// Waits for all that the stream was given.
const char* wait_for(void* stream);

}  // namespace graphopt
