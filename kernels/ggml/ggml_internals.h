// The parts of ggml's internal interface that the library relies on.
//
// ggml ships headers for its users, but not for those who extend its CPU backend. These
// declarations describe the binaries of one version of ggml: that of the llama-cpp-python in
// pyproject.toml. tests/ggml_layout_check.cpp compares them with ggml's own headers, and
// attach.cpp refuses any other version. docs/kernels.md, "When llama.cpp moves", explains how to
// follow ggml, and why the public interface does not suffice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

constexpr char built_for_ggml[] = "0.25.3";
constexpr int n_ggml_types = 43;
constexpr int n_ggml_operators = 101;

struct ggml_threadpool;
struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_backend_device;
struct ggml_backend_reg;

struct ggml_tensor {
    int type;
    ggml_backend_buffer *buffer;
    int64_t ne[4];  // numbers of elements
    size_t nb[4];   // strides in bytes
    int op;
    int32_t op_params[16];
    int32_t flags;
    ggml_tensor *src[10];
    ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};

// What a thread knows about an operator that it computes together with others.
struct ggml_compute_params {
    int ith;  // the number of this thread
    int nth;  // how many threads there are
    size_t wsize;
    void *wdata;  // work memory, shared by all threads
    ggml_threadpool *threadpool;
    bool use_ref;
};

struct ggml_backend_buffer_type_i {
    const char *(*get_name)(ggml_backend_buffer_type *);
    ggml_backend_buffer *(*alloc_buffer)(ggml_backend_buffer_type *, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type *);
    size_t (*get_max_size)(ggml_backend_buffer_type *);
    size_t (*get_alloc_size)(ggml_backend_buffer_type *, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type *);
};
struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_device *device;
    void *context;  // of an extra buffer type of the CPU: its ggml::cpu::extra_buffer_type
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer *);
    void *(*get_base)(ggml_backend_buffer *);
    int (*init_tensor)(ggml_backend_buffer *, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer *, ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer *, ggml_tensor *, const void *, size_t offset,
                       size_t size);
    void (*get_tensor)(ggml_backend_buffer *, const ggml_tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(ggml_backend_buffer *, ggml_tensor *, const void *, size_t, size_t,
                          size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer *, const ggml_tensor *, void *, size_t, size_t,
                          size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer *, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer *, uint8_t);
    void (*reset)(ggml_backend_buffer *);
};
struct ggml_backend_buffer {  // the beginning of it: ggml makes buffers
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type *buft;
    void *context;
};

struct ggml_backend_device_i {
    void *not_used[6];
    ggml_backend_buffer_type *(*get_buffer_type)(ggml_backend_device *);
};
struct ggml_backend_device {  // the beginning of it
    ggml_backend_device_i iface;
};

struct ggml_backend_reg_i {
    const char *(*get_name)(ggml_backend_reg *);
    size_t (*get_device_count)(ggml_backend_reg *);
    ggml_backend_device *(*get_device)(ggml_backend_reg *, size_t);
    void *(*get_proc_address)(ggml_backend_reg *, const char *);
};
struct ggml_backend_reg {
    int api_version;
    ggml_backend_reg_i iface;
    void *context;
};
constexpr int backend_api_version = 2;

// The CPU backend asks every extra buffer type about each operator of a graph. The object that
// `get_tensor_traits` returns computes it, in all threads at once, unless it returns false. ggml
// calls these functions through virtual tables, so their order matters.
namespace ggml::cpu {
class tensor_traits {
  public:
    virtual ~tensor_traits() {}
    virtual bool work_size(int n_threads, const ggml_tensor *op, size_t &size) = 0;
    virtual bool compute_forward(ggml_compute_params *params, ggml_tensor *op) = 0;
};
class extra_buffer_type {
  public:
    virtual ~extra_buffer_type() {}
    virtual bool supports_op(ggml_backend_device *device, const ggml_tensor *op) = 0;
    virtual tensor_traits *get_tensor_traits(const ggml_tensor *op) = 0;
};
}  // namespace ggml::cpu

// Returns the extra buffer types of a device. ggml_backend_reg_get_proc_address finds the function.
using GetExtraTypes = ggml_backend_buffer_type **(*)(ggml_backend_device *);

// What ggml's CPU backend knows about a type.
struct ggml_type_traits_cpu {
    void (*from_float)(const float *values, void *row, int64_t n);
    void (*vec_dot)(int n, float *output, size_t, const void *row, size_t, const void *other,
                    size_t, int n_rows);
    int vec_dot_type;  // the type of the other row
    int64_t nrows;     // the most rows that one call takes
};

// The functions of ggml's libraries that are called. They are looked up when the library is
// attached, so that nothing of llama.cpp is needed to compile it.
struct Ggml {
    // Public functions of libggml-base.
    const char *(*version)();
    const char *(*op_name)(int op);
    const char *(*type_name)(int type);
    size_t (*tensor_overhead)();
    size_t (*nbytes)(const ggml_tensor *);
    size_t (*row_size)(int type, int64_t n);
    size_t (*buffer_size)(ggml_backend_buffer *);
    ggml_backend_buffer_type *(*type_of_buffer)(ggml_backend_buffer *);
    ggml_backend_device *(*device_of)(ggml_backend_reg *, size_t);
    void *(*procedure_of)(ggml_backend_reg *, const char *);

    // Public functions of libggml-cpu.
    ggml_backend_reg *(*cpu_reg)();
    const ggml_type_traits_cpu *(*cpu_type)(int type);

    // Internal functions.
    ggml_backend_buffer *(*buffer_init)(ggml_backend_buffer_type *, ggml_backend_buffer_i, void *,
                                        size_t);
    std::vector<ggml_backend_buffer_type *> &(*extra_buffer_types)();
    void (*barrier)(ggml_threadpool *);
    void (*chunk_set)(ggml_threadpool *, int);
    int (*chunk_add)(ggml_threadpool *, int);

    // The numbers of operators, which change from version to version.
    int mul_mat;
    int mul_mat_id;
    int flash_attention;
    int soft_max;
};
extern Ggml ggml_api;
