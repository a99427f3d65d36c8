#include "instruction_sets/choose_kernels.h"

#include <cstdlib>
#include <cstring>

#ifdef __aarch64__
#include "instruction_sets/arm_cpu.h"
#else
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#endif

const InstructionSet *kernels = nullptr;

namespace {

#ifdef __aarch64__

constexpr char missing[] =
    "this CPU lacks dot products (ARMv8.2), or the instructions that were asked for";

bool cpu_has(const char *) { return arm_has_dot_products(); }

#else

constexpr char missing[] =
    "this CPU lacks AVX2, FMA or F16C, or the instructions that were asked for";

// One leaf of CPUID. (`__builtin_cpu_supports` is of no use here: it always answers no with the
// compiler runtime of zig, and in GCC 12 it has no name for AVX-VNNI.)
struct CpuId {
    uint32_t a;
    uint32_t b;
    uint32_t c;
    uint32_t d;

    explicit CpuId(uint32_t leaf, uint32_t page = 0) {
        __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(page));
    }
};

bool all_of(uint32_t word, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return word >> bit & 1; });
}

// The registers that the system saves for each process, as bits: 1 and 2 are those of AVX, 5 to 7
// those of AVX-512.
uint32_t saved_registers() {
    const bool has_xgetbv = all_of(CpuId(1).c, {27});  // OSXSAVE
    if (!has_xgetbv) return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Whether the CPU has AMX and the system lets this process use its registers: 8 KB per thread,
// which are saved only for processes that ask for it.
bool may_use_tiles() {
    if (!all_of(CpuId(7).d, {24, 25})) return false;  // AMX-TILE, AMX-INT8
    constexpr long request_permission = 0x1023;       // ARCH_REQ_XCOMP_PERM
    constexpr long tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool cpu_has_avx2() {
    return CpuId(0).a >= 7 && all_of(saved_registers(), {1, 2}) &&
           all_of(CpuId(1).c, {12, 29}) &&  // FMA, F16C
           all_of(CpuId(7).b, {5});         // AVX2
}

bool cpu_has_avx_vnni() { return CpuId(7).a >= 1 && all_of(CpuId(7, 1).a, {4}); }

bool cpu_has_avx512() {
    return all_of(saved_registers(), {5, 6, 7}) &&
           all_of(CpuId(7).b, {16, 17, 30, 31});  // F, DQ, BW, VL
}

bool cpu_has_avx512_vnni() { return cpu_has_avx512() && all_of(CpuId(7).c, {11}); }

// CPUID has the maker's name in registers b, d and c: "AuthenticAMD".
bool cpu_is_by_amd() {
    const CpuId maker(0);
    return maker.b == 0x68747541 && maker.d == 0x69746e65 && maker.c == 0x444d4163;
}

bool cpu_has(const char *instructions) {
    const std::string name = instructions;
    if (!cpu_has_avx2()) return false;
    if (name == "avx-vnni") return cpu_has_avx_vnni();
    if (name == "avx512") return cpu_has_avx512();
    if (name == "avx512-vnni") return cpu_has_avx512_vnni();
    if (name == "avx512-vnni-amd") return cpu_has_avx512_vnni() && cpu_is_by_amd();
    if (name == "amx-int8") return cpu_has_avx512_vnni() && may_use_tiles();
    return true;
}

#endif

// The best one first. A compiler may be too old for some of them.
const InstructionSet *const compiled_sets[] = {
#ifdef __aarch64__
    &neon_dotprod_set,
#else
#ifndef WITHOUT_AMX_INT8
    &amx_int8_set,
#endif
#ifndef WITHOUT_AVX512_VNNI
    &avx512_vnni_amd_set,
    &avx512_vnni_set,
#endif
#ifndef WITHOUT_AVX_VNNI
    &avx_vnni_set,
#endif
    &avx512_set,
    &avx2_set,
#endif
};

}  // namespace

const char *choose_kernels() {
    const char *wanted = std::getenv("SPECGEN_KERNELS_INSTRUCTIONS");
    kernels = nullptr;
    for (const InstructionSet *set : compiled_sets) {
        const bool is_wanted =
            wanted == nullptr || *wanted == 0 || std::strcmp(wanted, set->name) == 0;
        if (is_wanted && cpu_has(set->name)) {
            kernels = set;
            return "";
        }
    }
    return missing;
}
