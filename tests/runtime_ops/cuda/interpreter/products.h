// What the interpreter's products on sm_90a ask of its threads and shared memory, and the other way.
#pragma once

#include <cstdint>

namespace graphopt {
namespace host {

// A number below `below`, from the seed.
uint64_t draw(uint64_t below);
// Ends the launch where a copy brought these 16 bytes and did not show them to products.
void check_shown(const void* address);
// No products are under way when a block begins.
void forget_products();

}  // namespace host
}  // namespace graphopt
