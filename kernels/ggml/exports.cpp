// The functions that the library exports: one for ggml, and those that specgen calls
// (specgen/llama/kernels/attached.py).
#include <cstdint>

#include "ggml/attach.h"
#include "ggml/ggml_internals.h"
#include "ggml/operators.h"
#include "instruction_sets/choose_kernels.h"
#include "packed/allowance.h"
#include "packed/packed_file.h"
#include "packed/packed_weights.h"
#include "packed/worker_weights.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// --- attaching ---

// Called by ggml_backend_load(). Returns a backend without devices, or null if the library does not
// fit.
EXPORTED ggml_backend_reg *ggml_backend_init() {
    static ggml_backend_reg registration;
    if (!attach()) return nullptr;
    registration.api_version = backend_api_version;
    registration.iface.get_name = [](ggml_backend_reg *) { return "specgen"; };
    registration.iface.get_device_count = [](ggml_backend_reg *) { return size_t{0}; };
    registration.iface.get_device = [](ggml_backend_reg *, size_t) {
        return static_cast<ggml_backend_device *>(nullptr);
    };
    registration.iface.get_proc_address = [](ggml_backend_reg *, const char *) {
        return static_cast<void *>(nullptr);
    };
    return &registration;
}

// "" if the library is attached, otherwise the reason why it is not.
EXPORTED const char *specgen_kernels_problem() { return attach_problem(); }

// The instruction set in use; "" if the library is not attached.
EXPORTED const char *specgen_kernels_instructions() {
    return *attach_problem() == 0 ? kernels->name : "";
}

// The version of ggml that the library is for.
EXPORTED const char *specgen_kernels_built_for() { return built_for_ggml; }

// --- operators ---

// Products computed, attentions computed, bytes of packed weights, attentions left to llama.cpp.
EXPORTED void specgen_kernels_counts(uint64_t counts[4]) {
    const OperatorCounts now = operator_counts();
    counts[0] = now.products;
    counts[1] = now.attentions;
    counts[2] = packed_bytes();
    counts[3] = now.other_attentions;
}

// See `enable_operators`.
EXPORTED void specgen_kernels_enable(int products, int attention) {
    enable_operators(products != 0, attention != 0);
}

// The rows of an output matrix that a draft needs: see `RowLimit`.
EXPORTED void *specgen_kernels_new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n) {
    return new_row_limit(n_rows, rows, n);
}
EXPORTED void specgen_kernels_delete_row_limit(void *limit) {
    delete_row_limit(static_cast<RowLimit *>(limit));
}
EXPORTED void specgen_kernels_set_row_limit(void *limit) {
    set_row_limit(static_cast<RowLimit *>(limit));
}

// See `InstructionSet::likeliest_tokens`.
EXPORTED double specgen_kernels_likeliest(float *row, int64_t n, int n_best, int32_t *tokens,
                                          float *scores) {
    return kernels->likeliest_tokens(row, n, n_best, tokens, scores);
}

// --- packed weights ---

// Packing and reading ahead use no more than this: see `Allowance`.
EXPORTED void specgen_kernels_allow(unsigned n_threads, uint64_t memory_bytes) {
    allowance = {n_threads, static_cast<size_t>(memory_bytes)};
}

// From now on, workers of this process keep quantised weights packed.
EXPORTED void specgen_kernels_serve() {
    ggml_backend_reg *cpu = ggml_api.cpu_reg();
    serve_packed(ggml_api.device_of(cpu, 0));
}

// Bytes of the packed form of a ggml_tensor; 0 if it has none.
EXPORTED uint64_t specgen_kernels_packed_size(const void *tensor) {
    const auto *weights = static_cast<const ggml_tensor *>(tensor);
    return can_pack(weights) ? packed_size(weights) : 0;
}

// Packed weights in a file: see `PackedFile`.
EXPORTED void *specgen_kernels_open_packed(const char *path) { return new PackedFile(path); }
// From now on, the calling thread loads models with this file, or without one (null).
EXPORTED void specgen_kernels_load_packed(void *file) {
    packed_file = static_cast<PackedFile *>(file);
}
// Let a buffer of more bytes than this be streamed, if need be from the new file at `new_path`.
EXPORTED void specgen_kernels_limit_packed(void *file, uint64_t max_bytes, const char *new_path) {
    static_cast<PackedFile *>(file)->limit(max_bytes, new_path);
}
// After the model was loaded. Returns 0 or errno.
EXPORTED int specgen_kernels_finish_packed(void *file) {
    return static_cast<PackedFile *>(file)->finish();
}
EXPORTED int specgen_kernels_packed_problem(const void *file) {
    return static_cast<const PackedFile *>(file)->problem();
}
EXPORTED int specgen_kernels_is_whole_packed(const void *file) {
    return static_cast<const PackedFile *>(file)->is_whole();
}
EXPORTED uint64_t specgen_kernels_streamed_bytes(const void *file) {
    return static_cast<const PackedFile *>(file)->streamed_bytes();
}
EXPORTED int specgen_kernels_used_packed(const void *file) {
    return static_cast<const PackedFile *>(file)->was_used();
}
EXPORTED uint64_t specgen_kernels_packed_file_bytes(const void *file) {
    return static_cast<const PackedFile *>(file)->bytes();
}
EXPORTED int specgen_kernels_write_packed(const void *file, const char *path) {
    return static_cast<const PackedFile *>(file)->write(path);
}
EXPORTED void specgen_kernels_close_packed(void *file) { delete static_cast<PackedFile *>(file); }
