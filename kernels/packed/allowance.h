// How much of the machine this process may use.
#pragma once

#include <cstddef>
#include <thread>

struct Allowance {
    // The number of threads that can run at once.
    unsigned n_threads = std::thread::hardware_concurrency();
    // The memory in bytes; 0 if it is all that the machine has.
    size_t memory_bytes = 0;
};

// Containers have less than the whole machine: specgen sets this before it loads models.
inline Allowance allowance;
