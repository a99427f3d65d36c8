// Times products: how much a further column costs. Not a test; build and run by hand:
//
//     for set in avx2 avx_vnni avx512_vnni amx_int8; do g++ FLAGS -c kernels/$set.cpp; done
//     g++ -O3 -std=c++17 -Ikernels kernels/tests/products_bench.cpp *.o -o products_bench -pthread
//     ./products_bench amx-int8 q4_k 1536 [MB]     instruction set, type, number of inputs
//
// where FLAGS are those of scripts/build_kernels.py. It multiplies 600 MB of packed weights, which
// fit in no cache, on two threads; with MB = 0, one group of rows again and again on one thread.
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

// Memory for n bytes, in large pages.
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

void bench(const InstructionSet &set, WeightType type, int64_t n_inputs, double megabytes) {
    const size_t group_bytes = set.group_bytes(type, n_inputs);
    const int64_t n_groups = std::max<int64_t>(1, static_cast<int64_t>(megabytes * 1e6) / group_bytes);
    const int n_threads = n_groups > 1 ? 2 : 1;
    const int n_repeats = n_groups > 1 ? 7 : 300;
    const int lanes = set.rows_per_group;
    const size_t bytes = n_groups * group_bytes;
    char *weights = allocate(bytes + 8192);
    for (size_t i = 0; i < bytes; i++) weights[i] = static_cast<char>((i * 2654435761U) >> 13 & 0x3b);
    constexpr int most = 96;
    std::vector<float> values(n_inputs), outputs(n_groups * lanes * most);
    for (auto &v : values) v = static_cast<float>(rand()) / static_cast<float>(RAND_MAX) - 0.5f;
    const size_t column_bytes = set.column_bytes(type, n_inputs);
    char *prepared = allocate(column_bytes * most);
    double one = 0;
    std::printf("%-7s %5ld inputs, ns for 256 weights of %d rows:", names[static_cast<int>(type)],
                static_cast<long>(n_inputs), lanes);
    for (int n : {1, 2, 4, 6, 8, 10, 12, 13, 16, 24, 32, 96}) {
        const int tile = set.max_columns(type, n), n_tiles = (n + tile - 1) / tile;
        const auto first = [&](int t) { return n * t / n_tiles; };
        for (int t = 0; t < n_tiles; t++) {
            const int size = first(t + 1) - first(t);
            for (int c = 0; c < size; c++) {
                set.prepare(type, values.data(), n_inputs, prepared + first(t) * column_bytes, size, c);
            }
        }
        double best = 1e9;
        for (int repeat = 0; repeat < n_repeats; repeat++) {
            best = std::min(best, seconds(n_threads, [&](int thread) {
                for (int64_t g = n_groups * thread / n_threads;
                     g < n_groups * (thread + 1) / n_threads; g++) {
                    for (int t = 0; t < n_tiles; t++) {
                        set.multiply(type, weights + g * group_bytes,
                                     prepared + first(t) * column_bytes, n_inputs,
                                     first(t + 1) - first(t), lanes,
                                     outputs.data() + (g + first(t) * n_groups) * lanes,
                                     n_groups * lanes);
                    }
                }
                set.finish();
            }));
        }
        if (n == 1) one = best;
        std::printf(" %d: %.0f (%.2f)", n, best * 1e9 * 256 / n_inputs / n_groups * n_threads,
                    best / one);
        std::fflush(stdout);
    }
    std::printf("\n");
    munmap(weights, bytes + 8192);
    munmap(prepared, column_bytes * most);
}

int main(int argc, char **argv) {
#ifdef __aarch64__
    const InstructionSet *const sets[] = {&neon_dotprod_set};
#else
    syscall(SYS_arch_prctl, 0x1023, 18);  // see attach.cpp
    const InstructionSet *const sets[] = {&avx2_set, &avx_vnni_set, &avx512_vnni_set, &amx_int8_set};
#endif
    for (const InstructionSet *set : sets) {
        if (argc < 2 || std::strcmp(argv[1], set->name) != 0) continue;
        for (int t = 1; t < static_cast<int>(WeightType::count); t++) {
            if (argc > 2 && std::strcmp(argv[2], names[t]) != 0) continue;
            bench(*set, static_cast<WeightType>(t), argc > 3 ? atoi(argv[3]) : 1536,
                  argc > 4 ? atof(argv[4]) : 600);
        }
    }
}
