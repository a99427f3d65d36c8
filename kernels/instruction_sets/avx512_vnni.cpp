// The kernels for CPUs with AVX-512 and its VNNI extension (F, BW, DQ, VL, VNNI).
#include "vectors/avx512.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet avx512_vnni_set = make_instruction_set<Avx512, 12>("avx512-vnni");
