// The kernels for CPUs with AVX-512 and its VNNI extension (F, BW, DQ, VL, VNNI).
#include "vectors/avx512_amd.h"

#include "instruction_sets/make_instruction_set.h"

namespace {

// AMD's CPUs compute attention with fewer multiplications (attention/halved_products.h).
constexpr InstructionSet with_attention_of_amd(InstructionSet set, const char *name) {
    set.name = name;
    set.attention_bytes = Attention<Avx512Amd>::bytes;
    set.attention = Attention<Avx512Amd>::run;
    return set;
}

}  // namespace

const InstructionSet avx512_vnni_set = make_instruction_set<Avx512Vnni, 12>("avx512-vnni");
const InstructionSet avx512_vnni_amd_set =
    with_attention_of_amd(make_instruction_set<Avx512Vnni, 12>("avx512-vnni"), "avx512-vnni-amd");
