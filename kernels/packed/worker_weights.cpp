#include "packed/worker_weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "ggml/tensor_types.h"
#include "packed/packed_weights.h"
#include "packed/pages.h"

namespace {

// --- the packed matrices ---

struct Matrix {
    // Bytes of the matrix as it was sent, from its address on.
    size_t bytes;
    char *packed;
    size_t packed_bytes;
};

// By the address of the matrix as it was sent. There is no lock: a worker changes them only between
// graphs, and reads them only within graphs.
std::map<uintptr_t, Matrix> matrices;

uintptr_t address(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

char *map_memory(size_t bytes) {
    void *memory = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<char *>(memory);
}

// Forget the matrices between two addresses.
void forget(uintptr_t first, uintptr_t end) {
    for (auto matrix = matrices.lower_bound(first); matrix != matrices.end();) {
        if (matrix->first >= end) return;
        munmap(matrix->second.packed, std::max<size_t>(matrix->second.packed_bytes, 1));
        matrix = matrices.erase(matrix);
    }
}

// The matrix that contains an address; null if none does.
const Matrix *matrix_at(uintptr_t at) {
    auto next = matrices.upper_bound(at);
    if (next == matrices.begin()) return nullptr;
    --next;
    return at < next->first + next->second.bytes ? &next->second : nullptr;
}

// Whether a tensor is used for products only: quantised weights of a layer, or of its experts.
// Weights that are not quantised are read by other operators too, and other stacks of matrices
// are multiplied one by one.
bool is_matrix(const ggml_tensor *tensor) {
    const WeightType type = weight_type(tensor);
    const bool is_quantized =
        type != WeightType::f32 && type != WeightType::f16 && type != WeightType::bf16;
    const bool is_alone = tensor->ne[2] == 1 || std::strstr(tensor->name, "_exps.") != nullptr;
    return can_pack(tensor) && is_quantized && is_alone && tensor->ne[1] > 1 &&
           std::strstr(tensor->name, ".weight") != nullptr;
}

// --- the buffer's functions, as ggml calls them ---

void free_buffer(ggml_backend_buffer *buffer) {
    const uintptr_t base = address(buffer->context);
    const size_t size = ggml_api.buffer_size(buffer);
    forget(base, base + size);
    munmap(buffer->context, std::max<size_t>(size, 1));
}

void *get_base(ggml_backend_buffer *buffer) { return buffer->context; }

void set_tensor(ggml_backend_buffer *, ggml_tensor *tensor, const void *data, size_t offset,
                size_t size) {
    const uintptr_t at = address(tensor->data);
    forget(at, at + std::max<size_t>(ggml_api.nbytes(tensor), 1));
    if (offset == 0 && size == ggml_api.nbytes(tensor) && is_matrix(tensor)) {
        const size_t bytes = packed_size(tensor);
        if (char *packed = map_memory(bytes)) {
            pack(tensor, static_cast<const char *>(data), packed);
            matrices[at] = {size, packed, bytes};
            // From here on, the pages of the tensor read as zeros.
            const Pages pages = Pages::within(static_cast<const char *>(tensor->data), size);
            if (pages.bytes > 0) madvise(pages.start, pages.bytes, MADV_DONTNEED);
            return;
        }
    }
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void get_tensor(ggml_backend_buffer *, const ggml_tensor *tensor, void *data, size_t offset,
                size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void set_bytes(ggml_backend_buffer *, ggml_tensor *tensor, uint8_t value, size_t offset,
               size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

bool copy_tensor(ggml_backend_buffer *, const ggml_tensor *, ggml_tensor *) { return false; }

void clear(ggml_backend_buffer *buffer, uint8_t value) {
    std::memset(buffer->context, value, ggml_api.buffer_size(buffer));
}

ggml_backend_buffer *alloc_buffer(ggml_backend_buffer_type *type, size_t size) {
    char *memory = map_memory(size);
    if (memory == nullptr) return nullptr;
    ggml_backend_buffer_i functions = {};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.memset_tensor = set_bytes;
    functions.set_tensor = set_tensor;
    functions.get_tensor = get_tensor;
    functions.cpy_tensor = copy_tensor;
    functions.clear = clear;
    return ggml_api.buffer_init(type, functions, memory, size);
}

ggml_backend_buffer_type buffer_type;

}  // namespace

void serve_packed(ggml_backend_device *cpu) {
    buffer_type.iface = {};
    buffer_type.iface.get_name = [](ggml_backend_buffer_type *) { return "specgen worker"; };
    buffer_type.iface.alloc_buffer = alloc_buffer;
    buffer_type.iface.get_alignment = [](ggml_backend_buffer_type *) { return size_t{64}; };
    buffer_type.iface.is_host = [](ggml_backend_buffer_type *) { return true; };
    buffer_type.device = cpu;
    cpu->iface.get_buffer_type = [](ggml_backend_device *) { return &buffer_type; };
}

const char *packed_for_worker(const ggml_tensor *weights) {
    if (matrices.empty()) return nullptr;
    const auto found = matrices.find(address(weights->data));
    if (found == matrices.end() || found->second.bytes != ggml_api.nbytes(weights)) return nullptr;
    return found->second.packed;
}

void check_readable(const ggml_tensor *op) {
    if (matrices.empty()) return;
    for (const ggml_tensor *source : op->src) {
        if (source == nullptr || matrix_at(address(source->data)) == nullptr) continue;
        std::fprintf(stderr,
                     "error: the operator %s needs %s as it was sent, and it is packed\n"
                     "hint: start the worker with --kernels llama.cpp\n",
                     ggml_api.op_name(op->op), source->name);
        _exit(9);
    }
}
