// How the library joins llama.cpp: what ggml_backend_load() finds in it.
//
// The CPU backend of ggml keeps a list of extra buffer types: other layouts of weights, with code
// that multiplies them. llama.cpp's own layouts are there; `ggml_backend_init` puts ours in front
// of them. So weights that we cover are loaded into our layout, the CPU backend's threads call our
// code for their operators, and everything else goes on as before: no second thread pool, no
// splits of the graph, adapters and control vectors where llama.cpp wants them. (The alternative,
// a device of its own, splits a graph in some 300 parts and needs threads of its own: 0.4 ms a
// token of a 1.5B model and 1.5 ms of a 0.5B one, which is a tenth of what such a draft costs.)
//
// The list is internal to ggml-cpu; see ggml_internals.h for what that means.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

#ifdef __aarch64__
#include "instruction_sets/arm_cpu.h"
#endif
#include "ggml/ggml_internals.h"
#include "instruction_sets/instruction_set.h"
#include "packed/packed_file.h"
#include "ggml/operators.h"
#include "packed/packed_weights.h"
#include "packed/worker_weights.h"

Ggml ggml_api = {};

namespace {

std::string problem = "it was not loaded by ggml_backend_load";

#ifdef __aarch64__

bool cpu_has(const char *) { return arm_has_dot_products(); }

#else

// One leaf of CPUID. (`__builtin_cpu_supports` answers no to everything where the compiler's runtime library is
// zig's, and GCC 12 has no name for AVX-VNNI.)
struct CpuId {
    uint32_t a, b, c, d;
    explicit CpuId(uint32_t leaf, uint32_t page = 0) {
        __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(page));
    }
};

bool all_of(uint32_t word, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return word >> bit & 1; });
}

// The registers that the system saves for every process, as bits: 1 and 2 for AVX, 5 to 7 for AVX-512.
uint32_t saved_registers() {
    if (!all_of(CpuId(1).c, {27})) return 0;  // OSXSAVE
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Whether the CPU has AMX, and the system lets this process use its registers (8 KB a thread that
// are only saved for those who ask).
bool may_use_tiles() {
    if (!all_of(CpuId(7).d, {24, 25})) return false;  // AMX-TILE, AMX-INT8
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool cpu_has(const char *instructions) {
    const std::string name = instructions;
    if (CpuId(0).a < 7 || !all_of(saved_registers(), {1, 2})) return false;
    if (!all_of(CpuId(1).c, {12, 29}) || !all_of(CpuId(7).b, {5})) return false;  // FMA, F16C; AVX2
    if (name == "avx-vnni") return CpuId(7).a >= 1 && all_of(CpuId(7, 1).a, {4});
    if (name == "amx-int8") return cpu_has("avx512-vnni") && may_use_tiles();
    if (name == "avx512-vnni") {
        return all_of(saved_registers(), {5, 6, 7}) && all_of(CpuId(7).b, {16, 17, 30, 31}) &&
               all_of(CpuId(7).c, {11});  // F, DQ, BW, VL; VNNI
    }
    return true;
}

#endif

// The best instruction set of this CPU, or the one that is asked for.
const InstructionSet *choose_kernels() {
    const InstructionSet *known[] = {
#ifdef __aarch64__
        &neon_dotprod_set,
#else
#ifndef WITHOUT_AMX_INT8  // where the compiler is too old for an instruction set
        &amx_int8_set,
#endif
#ifndef WITHOUT_AVX512_VNNI
        &avx512_vnni_set,
#endif
#ifndef WITHOUT_AVX_VNNI
        &avx_vnni_set,
#endif
        &avx2_set,
#endif
    };
    const char *asked = std::getenv("SPECGEN_KERNELS_INSTRUCTIONS");
    for (const InstructionSet *set : known) {
        if (asked != nullptr && *asked && std::strcmp(asked, set->name) != 0) continue;
        if (cpu_has(set->name)) return set;
    }
    return nullptr;
}

// A function of a library that is loaded already; false if it is not there.
template <class Function>
bool find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        problem = std::string("they are for ggml ") + built_for_ggml +
                  ", and llama.cpp's has no function " + name;
    }
    return function != nullptr;
}

// The library of the CPU backend in use, which has one of several names where ggml chose it for this
// processor (GGML_BACKEND_DL); null if ggml has none. Any of its functions says where it is.
void *cpu_library(void *registry) {
    const auto by_name = reinterpret_cast<ggml_backend_reg *(*)(const char *)>(
        dlsym(registry, "ggml_backend_reg_by_name"));
    ggml_backend_reg *cpu = by_name ? by_name("CPU") : nullptr;
    Dl_info about = {};
    if (cpu == nullptr || !dladdr(reinterpret_cast<void *>(cpu->iface.get_name), &about)) {
        return nullptr;
    }
    return dlopen(about.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

// Find the functions of the ggml that is loaded, if it is the version whose structures are declared: no other's
// are read.
bool find_functions() {
    const std::string built_for = std::string("they are for ggml ") + built_for_ggml;
    const std::string not_loaded =
        built_for + ", and its libraries (libggml-base.so.0, libggml.so.0, the CPU's) are not loaded";
    void *base = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (base == nullptr) {
        problem = not_loaded;
        return false;
    }
    if (!find(base, "ggml_version", ggml_api.version)) return false;
    if (std::strcmp(ggml_api.version(), built_for_ggml) != 0) {
        problem = built_for + ", and llama.cpp has ggml " + ggml_api.version();
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

// Whether this ggml looks like the version that it says it is. A build of one's own may have been changed.
bool check_ggml() {
    const std::string changed = std::string("this build of ggml ") + built_for_ggml +
                                " was changed: ";
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
    int missing = 4;
    for (int op = 0; op < n_ggml_operators; op++) {
        const char *name = ggml_api.op_name(op);
        for (const auto &[wanted, number] : {std::pair{"MUL_MAT", &ggml_api.mul_mat},
                                             std::pair{"MUL_MAT_ID", &ggml_api.mul_mat_id},
                                             std::pair{"SOFT_MAX", &ggml_api.soft_max},
                                             std::pair{"FLASH_ATTN_EXT",
                                                       &ggml_api.flash_attention}}) {
            if (std::strcmp(name, wanted) == 0) {
                *number = op;
                missing--;
            }
        }
    }
    if (missing != 0) problem = changed + "it names its operators otherwise";
    return missing == 0;
}

// Put our buffer type in front, and look whether llama.cpp will see it.
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
    // ggml copies its list when the first model is loaded.
    for (auto **type = get_types ? get_types(device) : nullptr; type && *type; type++) {
        if (*type == ours) return true;
    }
    types.erase(std::remove(types.begin(), types.end(), ours), types.end());
    problem = "a model was loaded before the kernels";
    return false;
}

// llama.cpp maps a model's file with all its pages, unless memory is local to processors: then a page is mapped
// when it is used. With packed weights hardly any is (0.4 s for a file of 4 GB).
void *(*procedure_of_cpu)(ggml_backend_reg *, const char *) = nullptr;
bool (*is_numa)() = nullptr;

bool maps_when_used() {
    return (packed_file != nullptr && packed_file->is_whole()) || is_numa();
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

bool attach() {
    if (!find_functions() || !check_ggml()) return false;
    kernels = choose_kernels();
    if (kernels == nullptr) {
        #ifdef __aarch64__
        problem = "this CPU lacks dot products (ARMv8.2), or the instructions that were asked for";
#else
        problem = "this CPU lacks AVX2, FMA or F16C, or the instructions that were asked for";
#endif
        return false;
    }
    learn_types();
    if (!offer_weights()) return false;
    map_when_used();
    problem.clear();
    return true;
}

ggml_backend_reg registration;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Called by ggml_backend_load(): a backend without devices, or null if the library does not fit.
EXPORTED ggml_backend_reg *ggml_backend_init() {
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

// "" if the library is attached, else why it is not.
EXPORTED const char *specgen_kernels_problem() { return problem.c_str(); }

// The instruction set in use; "" if the library is not attached.
EXPORTED const char *specgen_kernels_instructions() {
    return problem.empty() ? kernels->name : "";
}

EXPORTED const char *specgen_kernels_built_for() { return built_for_ggml; }

// Products computed, attentions computed, bytes of packed weights, attentions left to llama.cpp.
EXPORTED void specgen_kernels_counts(uint64_t counts[4]) {
    const OperatorCounts now = operator_counts();
    counts[0] = now.products;
    counts[1] = now.attentions;
    counts[2] = packed_bytes();
    counts[3] = now.other_attentions;
}

// From now on let workers of this process keep quantised weights packed.
EXPORTED void specgen_kernels_serve() {
    ggml_backend_reg *cpu = ggml_api.cpu_reg();
    serve_packed(ggml_api.device_of(cpu, 0));
}

// Whether weights loaded from now on are packed, and whether attention and operators on tensors that
// are not packed are computed by us.
EXPORTED void specgen_kernels_enable(int products, int attention) {
    enable_operators(products != 0, attention != 0);
}

// The rows of an output matrix that a draft needs, see operators.h.
EXPORTED void *specgen_kernels_new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n) {
    return new_row_limit(n_rows, rows, n);
}
EXPORTED void specgen_kernels_delete_row_limit(void *limit) {
    delete_row_limit(static_cast<RowLimit *>(limit));
}
EXPORTED void specgen_kernels_set_row_limit(void *limit) {
    set_row_limit(static_cast<RowLimit *>(limit));
}

// The likeliest tokens of a row of logits, see instruction_set.h.
EXPORTED double specgen_kernels_likeliest(float *row, int64_t n, int n_best, int32_t *tokens,
                                          float *scores) {
    return kernels->likeliest(row, n, n_best, tokens, scores);
}

// Packed weights in a file, see packed_file.h. From now on the calling thread loads models with `file`, or
// without one (null).
EXPORTED void *specgen_kernels_open_packed(const char *path) { return new PackedFile(path); }
EXPORTED void specgen_kernels_load_packed(void *file) {
    packed_file = static_cast<PackedFile *>(file);
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
