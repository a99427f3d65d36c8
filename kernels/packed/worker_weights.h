// Weights of a worker (`specgen worker`), packed where llama.cpp's RPC puts them.
//
// The client of a worker determines the layout of its buffers: each tensor has the place and the
// size that it has in the model's file, and there is one type of buffer for everything. So the
// packed form of a matrix is outside the buffer, found by the matrix's address, and the pages of
// the matrix itself are given back to the system.
#pragma once

#include "ggml/ggml_internals.h"

// Let the CPU offer such buffers instead of llama.cpp's, in this process.
void serve_packed(ggml_backend_device *cpu);

// The packed form of a worker's matrix; null if these weights have none.
const char *packed_for_worker(const ggml_tensor *weights);

// End the process with a message if an operator reads the bytes of a matrix, which are gone.
void check_readable(const ggml_tensor *op);
