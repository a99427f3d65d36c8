// Compares ggml/ggml_internals.h with ggml's own headers: the offset and type of every declared
// member, the sizes of structures, the types of the functions that are called, the order of virtual
// functions, the number of types and operators, and the sizes of blocks of weights.
//
//   python -m scripts.check_ggml
//
// downloads the headers, compiles this file with them, and runs it. Nearly everything is compared
// by the compiler; only the virtual tables are compared at run time.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

// ggml's headers.
#define GGML_COMMON_DECL_CPP
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-common.h"
#include "ggml-cpu.h"
#include "ggml-cpu/ggml-cpu-impl.h"
#include "ggml-cpu/traits.h"
#include "ggml.h"

// The declarations of the kernels.
namespace ours {
#include "ggml/ggml_internals.h"
#include "products/packed_formats.h"
}  // namespace ours

namespace {

// --- whether two types are passed and stored in the same way ---

template <class Ours, class Ggml>
struct Names : std::is_same<Ours, Ggml> {};
#define SAME_NAME(type) \
    template <>         \
    struct Names<ours::type, ::type> : std::true_type {}
SAME_NAME(ggml_tensor);
SAME_NAME(ggml_threadpool);
SAME_NAME(ggml_compute_params);
SAME_NAME(ggml_backend_buffer);
SAME_NAME(ggml_backend_buffer_i);
SAME_NAME(ggml_backend_buffer_type);
SAME_NAME(ggml_backend_buffer_type_i);
SAME_NAME(ggml_backend_device);
SAME_NAME(ggml_backend_reg);
SAME_NAME(ggml_backend_reg_i);
SAME_NAME(ggml_type_traits_cpu);
SAME_NAME(ggml::cpu::tensor_traits);

// Structures are compared by name (and their members below), enumerations by size, as integers.
template <class Ours, class Ggml>
constexpr bool same_value() {
    constexpr bool are_numbers = (std::is_integral_v<Ours> || std::is_enum_v<Ours>) &&
                                 (std::is_integral_v<Ggml> || std::is_enum_v<Ggml>);
    if constexpr (are_numbers) {
        return sizeof(Ours) == sizeof(Ggml) &&
               std::is_same_v<Ours, bool> == std::is_same_v<Ggml, bool>;
    }
    return Names<Ours, Ggml>::value;
}
template <class Ours, class Ggml>
struct Same : std::bool_constant<same_value<Ours, Ggml>()> {};
template <class Ours, class Ggml>
struct Same<const Ours, const Ggml> : Same<Ours, Ggml> {};
template <class Ours, class Ggml>
struct Same<Ours *, Ggml *> : Same<Ours, Ggml> {};
template <class Ours, class Ggml>
struct Same<Ours &, Ggml &> : Same<Ours, Ggml> {};
template <class Ours, class Ggml, size_t n>
struct Same<Ours[n], Ggml[n]> : Same<Ours, Ggml> {};
template <class Ours, class Ggml>
struct Same<std::vector<Ours>, std::vector<Ggml>> : Same<Ours, Ggml> {};
template <class Ours, class... OurArguments, class Ggml, class... GgmlArguments>
struct Same<Ours(OurArguments...), Ggml(GgmlArguments...)> {
    static constexpr bool compare() {
        if constexpr (sizeof...(OurArguments) == sizeof...(GgmlArguments)) {
            return Same<Ours, Ggml>::value && (Same<OurArguments, GgmlArguments>::value && ...);
        }
        return false;
    }
    static constexpr bool value = compare();
};

// --- structures ---

#define SAME_MEMBER(type, member)                                                              \
    static_assert(offsetof(ours::type, member) == offsetof(::type, member),                    \
                  #type "::" #member " is elsewhere in ggml");                                 \
    static_assert(Same<decltype(ours::type::member), decltype(::type::member)>::value,         \
                  #type "::" #member " has another type in ggml")
// For a structure whose members are all declared.
#define SAME_SIZE(type)                                   \
    static_assert(sizeof(ours::type) == sizeof(::type) && \
                      alignof(ours::type) == alignof(::type), #type " has another size in ggml")

SAME_SIZE(ggml_tensor);
SAME_MEMBER(ggml_tensor, type);
SAME_MEMBER(ggml_tensor, buffer);
SAME_MEMBER(ggml_tensor, ne);
SAME_MEMBER(ggml_tensor, nb);
SAME_MEMBER(ggml_tensor, op);
SAME_MEMBER(ggml_tensor, op_params);
SAME_MEMBER(ggml_tensor, flags);
SAME_MEMBER(ggml_tensor, src);
SAME_MEMBER(ggml_tensor, view_src);
SAME_MEMBER(ggml_tensor, view_offs);
SAME_MEMBER(ggml_tensor, data);
SAME_MEMBER(ggml_tensor, name);
SAME_MEMBER(ggml_tensor, extra);
SAME_MEMBER(ggml_tensor, padding);

SAME_SIZE(ggml_compute_params);
SAME_MEMBER(ggml_compute_params, ith);
SAME_MEMBER(ggml_compute_params, nth);
SAME_MEMBER(ggml_compute_params, wsize);
SAME_MEMBER(ggml_compute_params, wdata);
SAME_MEMBER(ggml_compute_params, threadpool);
SAME_MEMBER(ggml_compute_params, use_ref);

SAME_SIZE(ggml_backend_buffer_type_i);
SAME_MEMBER(ggml_backend_buffer_type_i, get_name);
SAME_MEMBER(ggml_backend_buffer_type_i, alloc_buffer);
SAME_MEMBER(ggml_backend_buffer_type_i, get_alignment);
SAME_MEMBER(ggml_backend_buffer_type_i, get_max_size);
SAME_MEMBER(ggml_backend_buffer_type_i, get_alloc_size);
SAME_MEMBER(ggml_backend_buffer_type_i, is_host);
SAME_SIZE(ggml_backend_buffer_type);
SAME_MEMBER(ggml_backend_buffer_type, iface);
SAME_MEMBER(ggml_backend_buffer_type, device);
SAME_MEMBER(ggml_backend_buffer_type, context);

SAME_SIZE(ggml_backend_buffer_i);
SAME_MEMBER(ggml_backend_buffer_i, free_buffer);
SAME_MEMBER(ggml_backend_buffer_i, get_base);
SAME_MEMBER(ggml_backend_buffer_i, init_tensor);
SAME_MEMBER(ggml_backend_buffer_i, memset_tensor);
SAME_MEMBER(ggml_backend_buffer_i, set_tensor);
SAME_MEMBER(ggml_backend_buffer_i, get_tensor);
SAME_MEMBER(ggml_backend_buffer_i, set_tensor_2d);
SAME_MEMBER(ggml_backend_buffer_i, get_tensor_2d);
SAME_MEMBER(ggml_backend_buffer_i, cpy_tensor);
SAME_MEMBER(ggml_backend_buffer_i, clear);
SAME_MEMBER(ggml_backend_buffer_i, reset);
// Only a part of these is declared, because ggml allocates them.
SAME_MEMBER(ggml_backend_buffer, iface);
SAME_MEMBER(ggml_backend_buffer, buft);
SAME_MEMBER(ggml_backend_buffer, context);
static_assert(offsetof(ours::ggml_backend_device, iface) == offsetof(::ggml_backend_device, iface));
SAME_MEMBER(ggml_backend_device_i, get_buffer_type);
static_assert(offsetof(::ggml_backend_device_i, get_memory) == 2 * sizeof(void *),
              "specgen/llama/rpc.py::_DeviceStruct differs");

SAME_SIZE(ggml_backend_reg_i);
SAME_MEMBER(ggml_backend_reg_i, get_name);
SAME_MEMBER(ggml_backend_reg_i, get_device_count);
SAME_MEMBER(ggml_backend_reg_i, get_device);
SAME_MEMBER(ggml_backend_reg_i, get_proc_address);
SAME_SIZE(ggml_backend_reg);
SAME_MEMBER(ggml_backend_reg, api_version);
SAME_MEMBER(ggml_backend_reg, iface);
SAME_MEMBER(ggml_backend_reg, context);

SAME_SIZE(ggml_type_traits_cpu);
SAME_MEMBER(ggml_type_traits_cpu, from_float);
SAME_MEMBER(ggml_type_traits_cpu, vec_dot);
SAME_MEMBER(ggml_type_traits_cpu, vec_dot_type);
SAME_MEMBER(ggml_type_traits_cpu, nrows);

// --- functions ---

#define SAME_FUNCTION(member, function)                                     \
    static_assert(Same<decltype(ours::Ggml::member), decltype(&::function)>::value, \
                  #function " has another type in ggml")

SAME_FUNCTION(version, ggml_version);
SAME_FUNCTION(op_name, ggml_op_name);
SAME_FUNCTION(type_name, ggml_type_name);
SAME_FUNCTION(tensor_overhead, ggml_tensor_overhead);
SAME_FUNCTION(nbytes, ggml_nbytes);
SAME_FUNCTION(row_size, ggml_row_size);
SAME_FUNCTION(buffer_size, ggml_backend_buffer_get_size);
SAME_FUNCTION(type_of_buffer, ggml_backend_buffer_get_type);
SAME_FUNCTION(device_of, ggml_backend_reg_dev_get);
SAME_FUNCTION(procedure_of, ggml_backend_reg_get_proc_address);
SAME_FUNCTION(buffer_init, ggml_backend_buffer_init);
SAME_FUNCTION(cpu_reg, ggml_backend_cpu_reg);
SAME_FUNCTION(cpu_type, ggml_get_type_traits_cpu);
SAME_FUNCTION(extra_buffer_types, ggml_backend_cpu_get_extra_buffer_types);
SAME_FUNCTION(barrier, ggml_barrier);
SAME_FUNCTION(chunk_set, ggml_threadpool_chunk_set);
SAME_FUNCTION(chunk_add, ggml_threadpool_chunk_add);
static_assert(Same<ours::GetExtraTypes, ggml_backend_dev_get_extra_bufts_t>::value);

// --- virtual functions ---

// Our classes can take the place of ggml's: they override every virtual function that ggml
// declares.
struct Traits : ::ggml::cpu::tensor_traits {
    bool work_size(int, const ::ggml_tensor *, size_t &) override { return false; }
    bool compute_forward(::ggml_compute_params *, ::ggml_tensor *) override { return false; }
};
struct Type : ::ggml::cpu::extra_buffer_type {
    bool supports_op(::ggml_backend_device *, const ::ggml_tensor *) override { return false; }
    ::ggml::cpu::tensor_traits *get_tensor_traits(const ::ggml_tensor *) override {
        return nullptr;
    }
};
static_assert(!std::is_abstract_v<Traits> && !std::is_abstract_v<Type>,
              "ggml has another virtual function");

// The position of a virtual function in the table of its class. In the C++ ABI of Linux, it is part
// of a pointer to the function.
template <class Function>
ptrdiff_t place(Function function) {
    ptrdiff_t parts[2];
    static_assert(sizeof function == sizeof parts);
    std::memcpy(parts, &function, sizeof parts);
    return parts[0];
}

template <class Ours, class Ggml>
int compare(const char *name, Ours ours, Ggml ggml) {
    if (place(ours) == place(ggml)) return 0;
    std::fprintf(stderr, "error: %s is elsewhere in ggml's virtual table\n", name);
    return 1;
}

// --- numbers ---

static_assert(std::string_view(ours::built_for_ggml) == GGML_VERSION,
              "ggml_internals.h is for another version of ggml");
static_assert(ours::backend_api_version == GGML_BACKEND_API_VERSION,
              "ggml's backends have another interface");
static_assert(ours::n_ggml_types == GGML_TYPE_COUNT, "ggml has more or fewer types");
static_assert(ours::n_ggml_operators == GGML_OP_COUNT, "ggml has more or fewer operators");

#define SAME_BLOCK(format, block, n_weights)                                                    \
    static_assert(ours::format::gguf_bytes == sizeof(block) && ours::format::weights == n_weights, \
                  #block " has another size in ggml")

SAME_BLOCK(Q4_0, block_q4_0, QK4_0);
SAME_BLOCK(Q4_1, block_q4_1, QK4_1);
SAME_BLOCK(Q5_0, block_q5_0, QK5_0);
SAME_BLOCK(Q5_1, block_q5_1, QK5_1);
SAME_BLOCK(Q8_0, block_q8_0, QK8_0);
SAME_BLOCK(Q2_K, block_q2_K, QK_K);
SAME_BLOCK(Q3_K, block_q3_K, QK_K);
SAME_BLOCK(Q4_K, block_q4_K, QK_K);
SAME_BLOCK(Q5_K, block_q5_K, QK_K);
SAME_BLOCK(Q6_K, block_q6_K, QK_K);
SAME_BLOCK(IQ4_NL, block_iq4_nl, QK4_NL);
SAME_BLOCK(IQ4_XS, block_iq4_xs, QK_K);
SAME_BLOCK(MXFP4, block_mxfp4, QK_MXFP4);

}  // namespace

int main() {
    using OurTraits = ours::ggml::cpu::tensor_traits;
    using OurType = ours::ggml::cpu::extra_buffer_type;
    using ::ggml::cpu::extra_buffer_type;
    using ::ggml::cpu::tensor_traits;
    static_assert(sizeof(OurTraits) == sizeof(tensor_traits));
    static_assert(sizeof(OurType) == sizeof(extra_buffer_type));
    return compare("work_size", &OurTraits::work_size, &tensor_traits::work_size) +
           compare("compute_forward", &OurTraits::compute_forward,
                   &tensor_traits::compute_forward) +
           compare("supports_op", &OurType::supports_op, &extra_buffer_type::supports_op) +
           compare("get_tensor_traits", &OurType::get_tensor_traits,
                   &extra_buffer_type::get_tensor_traits);
}
