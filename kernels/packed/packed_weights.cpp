#include "packed/packed_weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "ggml/tensor_types.h"
#include "instruction_sets/choose_kernels.h"
#include "packed/allowance.h"
#include "packed/packed_file.h"

namespace {

std::atomic<uint64_t> bytes_in_memory{0};

// --- packing ---

// Groups of rows of one matrix.
int64_t n_groups(const ggml_tensor *weights) {
    return (weights->ne[1] + kernels->rows_per_group - 1) / kernels->rows_per_group;
}

// Pack group `group` of matrix `matrix`.
void pack_group(const ggml_tensor *weights, const char *rows, int64_t matrix, int64_t group,
                char *packed) {
    const int64_t row = group * kernels->rows_per_group;
    const int64_t left = weights->ne[1] - row;
    const int n_rows = static_cast<int>(std::min<int64_t>(kernels->rows_per_group, left));
    kernels->pack(weight_type(weights), rows + matrix * weights->nb[2] + row * weights->nb[1],
                  weights->nb[1], n_rows, weights->ne[0], packed);
}

// The work of one thread: it takes a few groups at a time. `next` is the first that nobody has
// taken.
void pack_groups(const ggml_tensor *weights, const char *rows, char *packed,
                 std::atomic<int64_t> &next) {
    const int64_t per_matrix = n_groups(weights);
    const int64_t total = per_matrix * weights->ne[2];
    const size_t group_bytes = kernels->group_bytes(weight_type(weights), weights->ne[0]);
    constexpr int64_t at_once = 4;
    for (int64_t first; (first = next.fetch_add(at_once)) < total;) {
        for (int64_t i = first; i < std::min(first + at_once, total); i++) {
            pack_group(weights, rows, i / per_matrix, i % per_matrix, packed + i * group_bytes);
        }
    }
}

// Load a whole tensor.
void load_tensor(ggml_tensor *tensor, const char *rows) {
    if (packed_file != nullptr) {
        packed_file->load(tensor, rows);
    } else {
        pack(tensor, rows, static_cast<char *>(tensor->data));
    }
}

// Weights that arrive in pieces wait here until the whole tensor has arrived.
struct Pieces {
    std::vector<char> rows;
    size_t arrived = 0;
};
std::mutex pieces_mutex;
std::map<const ggml_tensor *, Pieces> pieces;

// --- the buffer's functions, as ggml calls them ---

void free_buffer(ggml_backend_buffer *buffer) {
    if (buffer->context == nullptr) return;
    const size_t size = ggml_api.buffer_size(buffer);
    munmap(buffer->context, std::max<size_t>(size, 1));
    bytes_in_memory -= size;
}

void *get_base(ggml_backend_buffer *buffer) { return buffer->context; }

void set_tensor(ggml_backend_buffer *, ggml_tensor *tensor, const void *data, size_t offset,
                size_t size) {
    const size_t bytes = ggml_api.nbytes(tensor);
    if (offset == 0 && size == bytes) {
        load_tensor(tensor, static_cast<const char *>(data));
        return;
    }
    const std::lock_guard<std::mutex> lock(pieces_mutex);
    Pieces &waiting = pieces[tensor];
    waiting.rows.resize(bytes);
    std::memcpy(waiting.rows.data() + offset, data, size);
    waiting.arrived += size;
    if (waiting.arrived >= bytes) {
        pack(tensor, waiting.rows.data(), static_cast<char *>(tensor->data));
        pieces.erase(tensor);
    }
}

void clear(ggml_backend_buffer *buffer, uint8_t value) {
    std::memset(buffer->context, value, ggml_api.buffer_size(buffer));
}

ggml_backend_buffer *alloc_buffer(ggml_backend_buffer_type *type, size_t size) {
    void *memory = packed_file != nullptr ? packed_file->take_memory(size) : nullptr;
    if (memory == nullptr) {
        if (packed_file != nullptr && packed_file->problem() != 0) return nullptr;
        memory = mmap(nullptr, std::max<size_t>(size, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        // Weights are read from end to end for each token: with pages of 2 MB that takes 5% less
        // time.
        madvise(memory, size, MADV_HUGEPAGE);
        if (packed_file != nullptr) packed_file->remember(memory, size);
    }
    ggml_backend_buffer_i functions = {};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.set_tensor = set_tensor;
    functions.clear = clear;
    bytes_in_memory += size;
    return ggml_api.buffer_init(type, functions, memory, size);
}

size_t get_alloc_size(ggml_backend_buffer_type *, const ggml_tensor *tensor) {
    return can_pack(tensor) ? packed_size(tensor) : ggml_api.nbytes(tensor);
}

ggml_backend_buffer_type buffer_type;

// Whether a tensor is the scale of a matrix (`blk.0.attn_q.scale`, `.input_scale`: BitNet,
// NVFP4). llama.cpp asks whether it can be multiplied like the matrix, and then multiplies
// elements with it.
bool is_scale(const ggml_tensor *tensor) {
    const std::string_view name(tensor->name, strnlen(tensor->name, sizeof tensor->name));
    const auto ends_with = [&](std::string_view end) {
        return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
    };
    return ends_with(".scale") || ends_with(".input_scale");
}

}  // namespace

void pack(const ggml_tensor *weights, const char *rows, char *packed) {
    std::atomic<int64_t> next{0};
    const size_t bytes = ggml_api.nbytes(weights);
    // Starting a thread takes about 20 us, in which another one packs about 20 KB.
    const size_t useful = 1 + bytes / (256 << 10);
    const unsigned n_threads =
        static_cast<unsigned>(std::min<size_t>(std::max(1U, allowance.n_threads), useful));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < n_threads; i++) {
        try {
            others.emplace_back([&] { pack_groups(weights, rows, packed, next); });
        } catch (const std::system_error &) {
            break;  // no more threads: those that there are do the work
        }
    }
    pack_groups(weights, rows, packed, next);
    for (auto &thread : others) thread.join();
}

ggml_backend_buffer_type *packed_buffer_type(ggml_backend_device *cpu,
                                             ggml::cpu::extra_buffer_type *operators) {
    buffer_type.iface = {};
    buffer_type.iface.get_name = [](ggml_backend_buffer_type *) { return "specgen"; };
    buffer_type.iface.alloc_buffer = alloc_buffer;
    buffer_type.iface.get_alignment = [](ggml_backend_buffer_type *) { return size_t{64}; };
    buffer_type.iface.get_alloc_size = get_alloc_size;
    buffer_type.device = cpu;
    buffer_type.context = operators;
    return &buffer_type;
}

bool is_packed(const ggml_tensor *tensor) {
    return tensor != nullptr && tensor->buffer != nullptr &&
           ggml_api.type_of_buffer(tensor->buffer) == &buffer_type;
}

bool can_pack(const ggml_tensor *weights) {
    const WeightType type = weight_type(weights);
    return type != WeightType::none && !is_scale(weights) && weights->view_src == nullptr &&
           weights->ne[3] == 1 && weights->ne[0] > 0 &&
           weights->ne[0] % kernels->inputs_per_block(type) == 0;
}

size_t packed_size(const ggml_tensor *weights) {
    const size_t group_bytes = kernels->group_bytes(weight_type(weights), weights->ne[0]);
    return group_bytes * n_groups(weights) * weights->ne[2];
}

uint64_t packed_bytes() { return bytes_in_memory; }
