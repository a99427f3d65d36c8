// Weights of a worker (`specgen worker`), packed where llama.cpp's RPC puts them.
//
// Who uses a worker lays out its buffers: each tensor has the place and the size that it has in the
// model's file, and there is one type of buffers for everything. So the packed form of a matrix lies
// beside the buffer, found by the matrix's address, and the pages of the matrix itself are given
// back to the system.
#pragma once

#include "ggml/ggml_internals.h"

// Let the CPU offer such buffers in place of llama.cpp's, in this process.
void serve_packed(ggml_backend_device *cpu);

// The packed form of a worker's matrix; null if these weights are none.
const char *packed_for_worker(const ggml_tensor *weights);

// End the process with a message if an operator reads the bytes of a matrix, which are gone.
void check_readable(const ggml_tensor *op);
