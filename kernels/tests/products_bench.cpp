// Compares the time of products in two versions of the kernels, by the number of columns, in
// interleaved runs in one process, and checks whether they compute the same bits. (Measured one
// after the other, two versions of the same speed may seem to differ by a fifth.) Not a test; build
// and run it by hand:
//
//     SOURCE=instruction_sets/avx512_vnni.cpp
//     g++ FLAGS -IOLD/kernels -Davx512_vnni_set=before -c OLD/kernels/$SOURCE -o before.o
//     g++ FLAGS -Ikernels -Davx512_vnni_set=after -c kernels/$SOURCE -o after.o
//     g++ -O3 -z muldefs -Ikernels kernels/tests/products_bench.cpp *.o -o bench -pthread
//     ./bench q4_k 1536       type, number of inputs
//     ./bench q4_k 1536 0     the same, megabytes of weights
//
// where FLAGS are those of scripts/build_kernels.py. (`-z muldefs`, because the file's second set,
// for AMD, is defined twice. With amx_int8.cpp, link avx512_vnni.cpp, too.)
//
// It multiplies 600 MB of packed weights, which exceed any cache, on two threads. With 0 megabytes,
// it multiplies the same group of rows repeatedly on one thread.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "instruction_sets/instruction_set.h"

extern const InstructionSet before, after;

constexpr const char *names[] = {"none", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
                                 "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
                                 "iq4_xs", "mxfp4", "f16", "bf16", "f32"};
constexpr int most_columns = 96;

// Allocates n bytes in large pages.
char *allocate(size_t n) {
    void *memory = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, n, MADV_HUGEPAGE);
    return static_cast<char *>(memory);
}

template <class Work> double seconds(int n_threads, Work work) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int t = 1; t < n_threads; t++) others.emplace_back(work, t);
    work(0);
    for (auto &thread : others) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Random weights, and up to 96 columns.
struct Inputs {
    WeightType type;
    int64_t n_inputs;
    size_t group_bytes;
    size_t column_bytes;
    int64_t n_groups;
    int n_threads;
    char *weights;
    char *prepared;
    std::vector<float> values;

    Inputs(WeightType type, int64_t n_inputs, double megabytes)
        : type(type), n_inputs(n_inputs), group_bytes(after.group_bytes(type, n_inputs)),
          column_bytes(after.column_bytes(type, n_inputs)),
          n_groups(static_cast<int64_t>(megabytes * 1e6) / static_cast<int64_t>(group_bytes)) {
        n_groups = std::max<int64_t>(1, n_groups);
        n_threads = n_groups > 1 ? 2 : 1;
        weights = allocate(bytes());
        // With these bits, no scale or weight is infinite, NaN, negative, or so small (subnormal)
        // that the CPU takes a hundred times as long to multiply it.
        for (size_t i = 0; i < bytes(); i++) {
            weights[i] = static_cast<char>(((i * 2654435761U) >> 13 & 0x3b) | 0x20);
        }
        prepared = allocate(column_bytes * most_columns);
        values.resize(n_inputs);
        for (auto &v : values) v = static_cast<float>(rand()) / static_cast<float>(RAND_MAX) - 0.5f;
    }
    ~Inputs() {
        munmap(weights, bytes());
        munmap(prepared, column_bytes * most_columns);
    }
    Inputs(const Inputs &) = delete;

    // The weights, and some memory after them, because kernels prefetch beyond the end. (It must be
    // written to: a prefetch from memory that does not exist yet takes longer than a product.)
    size_t bytes() const { return n_groups * group_bytes + 8192; }
};

// The time of a product with n columns, in seconds.
double time_product(const InstructionSet &set, const Inputs &inputs, int n,
                    std::vector<float> &outputs) {
    const int most = set.max_columns(inputs.type, n);
    const int n_tiles = (n + most - 1) / most;
    const auto first = [&](int tile) { return n * tile / n_tiles; };
    const auto size = [&](int tile) { return first(tile + 1) - first(tile); };
    for (int tile = 0; tile < n_tiles; tile++) {
        char *const prepared = inputs.prepared + first(tile) * inputs.column_bytes;
        for (int c = 0; c < size(tile); c++) {
            set.prepare(inputs.type, inputs.values.data(), inputs.n_inputs, prepared, size(tile),
                        c);
        }
    }
    const int lanes = set.rows_per_group;
    const int64_t n_rows = inputs.n_groups * lanes;
    outputs.resize(n_rows * n);
    return seconds(inputs.n_threads, [&](int thread) {
        const int64_t end = inputs.n_groups * (thread + 1) / inputs.n_threads;
        for (int64_t g = inputs.n_groups * thread / inputs.n_threads; g < end; g++) {
            for (int tile = 0; tile < n_tiles; tile++) {
                set.multiply(inputs.type, inputs.weights + g * inputs.group_bytes,
                             inputs.prepared + first(tile) * inputs.column_bytes, inputs.n_inputs,
                             size(tile), lanes, &outputs[g * lanes + first(tile) * n_rows],
                             n_rows);
            }
        }
        set.finish();
    });
}

void compare(const Inputs &inputs, int n) {
    std::vector<float> outputs_before, outputs_after;
    double best_before = 1e9;
    double best_after = 1e9;
    const int n_repeats = inputs.n_groups > 1 ? 7 : 500;
    for (int repeat = 0; repeat < n_repeats; repeat++) {
        best_before = std::min(best_before, time_product(before, inputs, n, outputs_before));
        best_after = std::min(best_after, time_product(after, inputs, n, outputs_after));
    }
    const double scale = 1e9 * 256 * inputs.n_threads / static_cast<double>(inputs.n_inputs) /
                         static_cast<double>(inputs.n_groups);
    const bool same = std::memcmp(outputs_before.data(), outputs_after.data(),
                                  outputs_after.size() * sizeof(float)) == 0;
    std::printf("%3d columns: before %5.0f, after %5.0f (%.2f); %s bits\n", n,
                best_before * scale, best_after * scale, best_after / best_before,
                same ? "the same" : "different");
    std::fflush(stdout);
}

int main(int argc, char **argv) {
#ifndef __aarch64__
    syscall(SYS_arch_prctl, 0x1023, 18);  // see instruction_sets/choose_kernels.cpp
#endif
    const int n_inputs = argc > 2 ? atoi(argv[2]) : 1536;
    const double megabytes = argc > 3 ? atof(argv[3]) : 600;
    for (int t = 1; t < static_cast<int>(WeightType::count); t++) {
        if (argc > 1 && std::strcmp(argv[1], names[t]) != 0) continue;
        const Inputs inputs(static_cast<WeightType>(t), n_inputs, megabytes);
        std::printf("%s, %d inputs: nanoseconds for 256 weights of %d rows\n", names[t], n_inputs,
                    after.rows_per_group);
        for (int n : {1, 2, 4, 6, 8, 10, 12, 13, 16, 24, 32, 96}) compare(inputs, n);
    }
}
