// The kernels for CPUs with AVX-VNNI, FMA and F16C.
#include "vectors/avx_vnni.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet avx_vnni_set = make_instruction_set<AvxVnni, 8>("avx-vnni");
