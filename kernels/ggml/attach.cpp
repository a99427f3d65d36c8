// How the library joins llama.cpp.
//
// ggml's CPU backend keeps a list of extra buffer types: other layouts of weights, with code that
// multiplies them. llama.cpp's own layouts are in it, and `attach` puts ours in front of them. So
// weights that we cover are loaded into our layout, the CPU backend's threads call our code for
// their operators, and everything else stays as it is: no second thread pool, no splits of the
// graph, and adapters and control vectors where llama.cpp expects them. (The alternative, a
// device of our own, splits a graph into about 300 parts and needs its own threads: 0.4 ms per
// token of a 1.5B model, and 1.5 ms per token of a 0.5B model, which is a tenth of what such a
// draft costs.)
//
// The list is internal to ggml-cpu: see ggml_internals.h.
#include "ggml/attach.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ggml/ggml_internals.h"
#include "ggml/operators.h"
#include "ggml/tensor_types.h"
#include "instruction_sets/choose_kernels.h"
#include "packed/packed_file.h"
#include "packed/packed_weights.h"

Ggml ggml_api = {};

namespace {

std::string problem = "it was not loaded by ggml_backend_load";

// --- finding ggml's functions ---

const std::string &they_are_for() {
    static const std::string text = std::string("they are for ggml ") + built_for_ggml;
    return text;
}

// Find a function of a library that is already loaded. Returns false if it is not there.
template <class Function>
bool find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        problem = they_are_for() + ", and llama.cpp's has no function " + name;
    }
    return function != nullptr;
}

// The library of the CPU backend in use; null if ggml has none. It has one of several names if
// ggml chose it for this processor (GGML_BACKEND_DL), so the address of one of its functions
// tells which it is.
void *cpu_library(void *registry) {
    const auto backend_by_name = reinterpret_cast<ggml_backend_reg *(*)(const char *)>(
        dlsym(registry, "ggml_backend_reg_by_name"));
    ggml_backend_reg *cpu = backend_by_name ? backend_by_name("CPU") : nullptr;
    Dl_info about = {};
    if (cpu == nullptr || !dladdr(reinterpret_cast<void *>(cpu->iface.get_name), &about)) {
        return nullptr;
    }
    return dlopen(about.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

// Find the functions of the ggml that is loaded, if it is the version whose structures are
// declared. Structures of another version are not touched.
bool find_functions() {
    const std::string not_loaded =
        they_are_for() +
        ", and its libraries (libggml-base.so.0, libggml.so.0, the CPU's) are not loaded";
    void *base = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (base == nullptr) {
        problem = not_loaded;
        return false;
    }
    if (!find(base, "ggml_version", ggml_api.version)) return false;
    if (std::strcmp(ggml_api.version(), built_for_ggml) != 0) {
        problem = they_are_for() + ", and llama.cpp has ggml " + ggml_api.version();
        return false;
    }
    void *registry = dlopen("libggml.so.0", RTLD_NOW | RTLD_NOLOAD);
    void *cpu = registry ? cpu_library(registry) : nullptr;
    if (cpu == nullptr) {
        problem = not_loaded;
        return false;
    }
    return find(base, "ggml_op_name", ggml_api.op_name) &&
           find(base, "ggml_type_name", ggml_api.type_name) &&
           find(base, "ggml_tensor_overhead", ggml_api.tensor_overhead) &&
           find(base, "ggml_nbytes", ggml_api.nbytes) &&
           find(base, "ggml_row_size", ggml_api.row_size) &&
           find(base, "ggml_backend_buffer_get_size", ggml_api.buffer_size) &&
           find(base, "ggml_backend_buffer_get_type", ggml_api.type_of_buffer) &&
           find(base, "ggml_backend_reg_dev_get", ggml_api.device_of) &&
           find(base, "ggml_backend_reg_get_proc_address", ggml_api.procedure_of) &&
           find(cpu, "ggml_backend_cpu_reg", ggml_api.cpu_reg) &&
           find(cpu, "ggml_get_type_traits_cpu", ggml_api.cpu_type) &&
           find(base, "ggml_backend_buffer_init", ggml_api.buffer_init) &&
           find(cpu, "_Z39ggml_backend_cpu_get_extra_buffer_typesv",
                ggml_api.extra_buffer_types) &&
           find(cpu, "ggml_barrier", ggml_api.barrier) &&
           find(cpu, "ggml_threadpool_chunk_set", ggml_api.chunk_set) &&
           find(cpu, "ggml_threadpool_chunk_add", ggml_api.chunk_add);
}

// --- checking ggml ---

// Look up the numbers of the operators by their names. Returns false if one has another name.
bool find_operators() {
    const std::pair<const char *, int *> wanted[] = {
        {"MUL_MAT", &ggml_api.mul_mat},
        {"MUL_MAT_ID", &ggml_api.mul_mat_id},
        {"SOFT_MAX", &ggml_api.soft_max},
        {"FLASH_ATTN_EXT", &ggml_api.flash_attention},
    };
    size_t n_found = 0;
    for (int op = 0; op < n_ggml_operators; op++) {
        for (const auto &[name, number] : wanted) {
            if (std::strcmp(ggml_api.op_name(op), name) == 0) {
                *number = op;
                n_found++;
            }
        }
    }
    return n_found == std::size(wanted);
}

// Whether this ggml looks like the version that it claims to be. A user's own build may have been
// changed.
bool check_ggml() {
    const std::string changed =
        std::string("this build of ggml ") + built_for_ggml + " was changed: ";
    constexpr size_t object_bytes = 32;  // of ggml_object, which ggml_tensor_overhead includes
    const size_t tensor_bytes = ggml_api.tensor_overhead() - object_bytes;
    if (tensor_bytes != sizeof(ggml_tensor)) {
        problem = changed + "a tensor takes " + std::to_string(tensor_bytes) + " bytes, not " +
                  std::to_string(sizeof(ggml_tensor));
        return false;
    }
    const int api_version = ggml_api.cpu_reg()->api_version;
    if (api_version != backend_api_version) {
        problem = changed + "its backends have interface " + std::to_string(api_version) +
                  ", not " + std::to_string(backend_api_version);
        return false;
    }
    if (!find_operators()) {
        problem = changed + "its operators have other names";
        return false;
    }
    return true;
}

// --- joining ---

// Put our buffer type in front, and check that llama.cpp will see it.
bool offer_weights() {
    ggml_backend_reg *cpu = ggml_api.cpu_reg();
    ggml_backend_device *device = ggml_api.device_of(cpu, 0);
    auto *ours = packed_buffer_type(device, operators());
    auto &types = ggml_api.extra_buffer_types();
    if (std::find(types.begin(), types.end(), ours) == types.end()) {
        types.insert(types.begin(), ours);
    }
    const auto get_types = reinterpret_cast<GetExtraTypes>(
        ggml_api.procedure_of(cpu, "ggml_backend_dev_get_extra_bufts"));
    // ggml copies its list when the first model is loaded. After that, ours does not appear.
    for (auto **type = get_types ? get_types(device) : nullptr; type && *type; type++) {
        if (*type == ours) return true;
    }
    types.erase(std::remove(types.begin(), types.end(), ours), types.end());
    problem = "a model was loaded before the kernels";
    return false;
}

// llama.cpp maps a model's file with all its pages, unless it is told that memory is local to
// processors (NUMA): then a page is mapped when it is used. With packed weights hardly any page is
// used, so we tell it that (0.4 s for a file of 4 GB).
void *(*procedure_of_cpu)(ggml_backend_reg *, const char *) = nullptr;
bool (*is_numa)() = nullptr;

bool maps_when_used() {
    return (packed_file != nullptr && packed_file->reads_rows()) || is_numa();
}

void *procedure(ggml_backend_reg *registry, const char *name) {
    void *found = procedure_of_cpu(registry, name);
    if (found == nullptr || std::strcmp(name, "ggml_backend_cpu_is_numa") != 0) return found;
    is_numa = reinterpret_cast<bool (*)()>(found);
    return reinterpret_cast<void *>(maps_when_used);
}

void map_when_used() {
    if (procedure_of_cpu != nullptr) return;
    ggml_backend_reg *cpu = ggml_api.cpu_reg();
    procedure_of_cpu = cpu->iface.get_proc_address;
    cpu->iface.get_proc_address = procedure;
}

}  // namespace

bool attach() {
    if (!find_functions() || !check_ggml()) return false;
    problem = choose_kernels();
    if (!problem.empty()) return false;
    learn_types();
    if (!offer_weights()) return false;
    map_when_used();
    return true;
}

const char *attach_problem() { return problem.c_str(); }
