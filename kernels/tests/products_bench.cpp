// Measures the time of products by the number of columns. Not a test; build and run it by hand:
//
//     for set in avx2 avx_vnni avx512_vnni amx_int8; do
//         g++ FLAGS -Ikernels -c kernels/instruction_sets/$set.cpp
//     done
//     g++ -O3 -std=c++17 -Ikernels kernels/tests/products_bench.cpp *.o -o products_bench -pthread
//     ./products_bench amx-int8 q4_k 1536 [MB]     instruction set, type, number of inputs
//
// where FLAGS are those of scripts/build_kernels.py. It multiplies 600 MB of packed weights, which
// exceed any cache, on two threads. With MB = 0, it multiplies the same group of rows repeatedly on
// one thread.
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

// A product of random weights with up to 96 columns.
struct Bench {
    const InstructionSet &set;
    WeightType type;
    int64_t n_inputs;
    size_t group_bytes;
    size_t column_bytes;
    int64_t n_groups;
    int n_threads;
    char *weights;
    char *prepared;
    std::vector<float> values;
    std::vector<float> outputs;

    Bench(const InstructionSet &set, WeightType type, int64_t n_inputs, double megabytes)
        : set(set), type(type), n_inputs(n_inputs), group_bytes(set.group_bytes(type, n_inputs)),
          column_bytes(set.column_bytes(type, n_inputs)),
          n_groups(static_cast<int64_t>(megabytes * 1e6) / static_cast<int64_t>(group_bytes)) {
        n_groups = std::max<int64_t>(1, n_groups);
        n_threads = n_groups > 1 ? 2 : 1;
        weights = allocate(bytes());
        for (size_t i = 0; i < n_groups * group_bytes; i++) {
            weights[i] = static_cast<char>((i * 2654435761U) >> 13 & 0x3b);
        }
        prepared = allocate(column_bytes * most_columns);
        values.resize(n_inputs);
        for (auto &v : values) v = static_cast<float>(rand()) / static_cast<float>(RAND_MAX) - 0.5f;
        outputs.resize(n_groups * set.rows_per_group * most_columns);
    }
    ~Bench() {
        munmap(weights, bytes());
        munmap(prepared, column_bytes * most_columns);
    }
    Bench(const Bench &) = delete;

    // The weights, and some memory after them, because kernels prefetch beyond the end.
    size_t bytes() const { return n_groups * group_bytes + 8192; }

    // The minimum time of a product with n columns, in seconds.
    double least_seconds(int n) {
        const int most = set.max_columns(type, n);
        const int n_tiles = (n + most - 1) / most;
        const auto first = [&](int tile) { return n * tile / n_tiles; };
        const auto size = [&](int tile) { return first(tile + 1) - first(tile); };
        for (int tile = 0; tile < n_tiles; tile++) {
            for (int c = 0; c < size(tile); c++) {
                set.prepare(type, values.data(), n_inputs, prepared + first(tile) * column_bytes,
                            size(tile), c);
            }
        }
        const int lanes = set.rows_per_group;
        const auto multiply = [&](int thread) {
            const int64_t end = n_groups * (thread + 1) / n_threads;
            for (int64_t g = n_groups * thread / n_threads; g < end; g++) {
                for (int tile = 0; tile < n_tiles; tile++) {
                    float *to = outputs.data() + (g + first(tile) * n_groups) * lanes;
                    set.multiply(type, weights + g * group_bytes,
                                 prepared + first(tile) * column_bytes, n_inputs, size(tile),
                                 lanes, to, n_groups * lanes);
                }
            }
            set.finish();
        };
        double best = 1e9;
        const int n_repeats = n_groups > 1 ? 7 : 300;
        for (int repeat = 0; repeat < n_repeats; repeat++) {
            best = std::min(best, seconds(n_threads, multiply));
        }
        return best;
    }

    void print() {
        std::printf("%-7s %5ld inputs, ns for 256 weights of %d rows:",
                    names[static_cast<int>(type)], static_cast<long>(n_inputs),
                    set.rows_per_group);
        double one = 0;
        for (int n : {1, 2, 4, 6, 8, 10, 12, 13, 16, 24, 32, 96}) {
            const double best = least_seconds(n);
            if (n == 1) one = best;
            std::printf(" %d: %.0f (%.2f)", n,
                        best * 1e9 * 256 / n_inputs / n_groups * n_threads, best / one);
            std::fflush(stdout);
        }
        std::printf("\n");
    }
};

int main(int argc, char **argv) {
#ifdef __aarch64__
    const InstructionSet *const sets[] = {&neon_dotprod_set};
#else
    syscall(SYS_arch_prctl, 0x1023, 18);  // see instruction_sets/choose_kernels.cpp
    const InstructionSet *const sets[] = {&avx2_set, &avx_vnni_set, &avx512_vnni_set,
                                          &amx_int8_set};
#endif
    const int n_inputs = argc > 3 ? atoi(argv[3]) : 1536;
    const double megabytes = argc > 4 ? atof(argv[4]) : 600;
    for (const InstructionSet *set : sets) {
        if (argc < 2 || std::strcmp(argv[1], set->name) != 0) continue;
        for (int t = 1; t < static_cast<int>(WeightType::count); t++) {
            if (argc > 2 && std::strcmp(argv[2], names[t]) != 0) continue;
            Bench(*set, static_cast<WeightType>(t), n_inputs, megabytes).print();
        }
    }
}
