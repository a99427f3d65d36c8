#include "packed/packed_weights.h"

#include "packed/packed_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

const InstructionSet *kernels = nullptr;

namespace {

struct TypeName {
    const char *name;
    WeightType type;
};
constexpr TypeName type_names[] = {
    {"q4_0", WeightType::q4_0},     {"q4_1", WeightType::q4_1},     {"q5_0", WeightType::q5_0},
    {"q5_1", WeightType::q5_1},     {"q8_0", WeightType::q8_0},     {"q2_K", WeightType::q2_k},
    {"q3_K", WeightType::q3_k},     {"q4_K", WeightType::q4_k},     {"q5_K", WeightType::q5_k},
    {"q6_K", WeightType::q6_k},     {"iq4_nl", WeightType::iq4_nl}, {"iq4_xs", WeightType::iq4_xs},
    {"mxfp4", WeightType::mxfp4},   {"f16", WeightType::f16},       {"bf16", WeightType::bf16},
    {"f32", WeightType::f32},
};
constexpr int n_types = 128;  // more than ggml has
WeightType weight_types[n_types];
CacheType cache_types[n_types];

std::atomic<uint64_t> alive_bytes{0};

int64_t n_groups(const ggml_tensor *weights) {
    return (weights->ne[1] + kernels->rows_per_group - 1) / kernels->rows_per_group;
}

// Weights that arrive in pieces wait here until the whole tensor is there.
std::mutex pieces_mutex;
struct Pieces {
    std::vector<char> data;
    size_t arrived = 0;
};
std::map<const ggml_tensor *, Pieces> pieces;

void pack_groups(const ggml_tensor *weights, const char *rows, char *packed,
                 std::atomic<int64_t> &next) {
    const int64_t groups = n_groups(weights), total = groups * weights->ne[2];
    const size_t group_bytes = kernels->group_bytes(weight_type(weights), weights->ne[0]);
    constexpr int64_t batch = 4;
    for (int64_t first; (first = next.fetch_add(batch)) < total;) {
        for (int64_t i = first; i < std::min(first + batch, total); i++) {
            const int64_t row = i % groups * kernels->rows_per_group;
            const int n_rows = static_cast<int>(
                std::min<int64_t>(kernels->rows_per_group, weights->ne[1] - row));
            kernels->pack(weight_type(weights), rows + i / groups * weights->nb[2] +
                          row * weights->nb[1], weights->nb[1], n_rows, weights->ne[0],
                          packed + i * group_bytes);
        }
    }
}

// --- the buffer's functions, as ggml calls them ---

void free_buffer(ggml_backend_buffer *buffer) {
    if (buffer->context == nullptr) return;
    const size_t size = ggml_api.buffer_size(buffer);
    munmap(buffer->context, std::max<size_t>(size, 1));
    alive_bytes -= size;
}

void *get_base(ggml_backend_buffer *buffer) { return buffer->context; }

void set_tensor(ggml_backend_buffer *, ggml_tensor *tensor, const void *data, size_t offset,
                size_t size) {
    const size_t bytes = ggml_api.nbytes(tensor);
    if (offset == 0 && size == bytes) {
        const auto *rows = static_cast<const char *>(data);
        const size_t packed_bytes = matrix_bytes(tensor) * tensor->ne[2];
        if (packed_file == nullptr) {
            pack(tensor, rows, static_cast<char *>(tensor->data));
            return;
        }
        if (!packed_file->has(tensor, rows, packed_bytes)) {
            pack(tensor, rows, static_cast<char *>(tensor->data));
            packed_file->packed(tensor, rows, packed_bytes);
        }
        packed_file->drop(rows, size);
        return;
    }
    const std::lock_guard<std::mutex> lock(pieces_mutex);
    Pieces &waiting = pieces[tensor];
    waiting.data.resize(bytes);
    std::memcpy(waiting.data.data() + offset, data, size);
    waiting.arrived += size;
    if (waiting.arrived >= bytes) {
        pack(tensor, waiting.data.data(), static_cast<char *>(tensor->data));
        pieces.erase(tensor);
    }
}

void clear(ggml_backend_buffer *buffer, uint8_t value) {
    std::memset(buffer->context, value, ggml_api.buffer_size(buffer));
}

ggml_backend_buffer *alloc_buffer(ggml_backend_buffer_type *type, size_t size) {
    void *memory = packed_file != nullptr ? packed_file->take_memory(size) : nullptr;
    if (memory == nullptr) {
        memory = mmap(nullptr, std::max<size_t>(size, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        // Weights are read from end to end for each token: with pages of 2 MB that takes 5 % less.
        madvise(memory, size, MADV_HUGEPAGE);
        if (packed_file != nullptr) packed_file->remember(memory, size);
    }
    ggml_backend_buffer_i functions = {};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.set_tensor = set_tensor;
    functions.clear = clear;
    alive_bytes += size;
    return ggml_api.buffer_init(type, functions, memory, size);
}

size_t get_alloc_size(ggml_backend_buffer_type *, const ggml_tensor *tensor) {
    return can_pack(tensor) ? matrix_bytes(tensor) * tensor->ne[2] : ggml_api.nbytes(tensor);
}

ggml_backend_buffer_type buffer_type;

// Whether a tensor is the scale of a matrix (`blk.0.attn_q.scale`, `.input_scale`: BitNet, NVFP4).
// llama.cpp asks whether it can be multiplied as the matrix is, and then multiplies elements with it.
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
    // A thread takes some 20 us to start, in which another one packs some 20 KB.
    const size_t useful = 1 + bytes / (256 << 10);
    const unsigned n_threads = static_cast<unsigned>(
        std::min<size_t>(std::max(1U, std::thread::hardware_concurrency()), useful));
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
    return type != WeightType::none && !is_scale(weights) && weights->view_src == nullptr && weights->ne[3] == 1 &&
           weights->ne[0] > 0 && weights->ne[0] % kernels->inputs_per_block(type) == 0;
}

WeightType weight_type(const ggml_tensor *weights) {
    return weights->type >= 0 && weights->type < n_types ? weight_types[weights->type]
                                                         : WeightType::none;
}

CacheType cache_type(const ggml_tensor *tensor) {
    return tensor->type >= 0 && tensor->type < n_types ? cache_types[tensor->type]
                                                       : CacheType::unsupported;
}

void learn_types() {
    for (int t = 0; t < n_types; t++) {
        weight_types[t] = WeightType::none;
        cache_types[t] = CacheType::unsupported;
    }
    for (int t = 0; t < n_ggml_types && t < n_types; t++) {
        const char *found = ggml_api.type_name(t);
        if (found == nullptr) continue;
        const std::string name = found;
        for (const auto &known : type_names) {
            if (name == known.name) weight_types[t] = known.type;
        }
        if (name == "f32") cache_types[t] = CacheType::f32;
        if (name == "f16") cache_types[t] = CacheType::f16;
        if (name == "bf16") cache_types[t] = CacheType::bf16;
        if (name == "q8_0") cache_types[t] = CacheType::q8_0;
    }
}

size_t matrix_bytes(const ggml_tensor *weights) {
    return kernels->group_bytes(weight_type(weights), weights->ne[0]) * n_groups(weights);
}

uint64_t packed_bytes() { return alive_bytes; }
