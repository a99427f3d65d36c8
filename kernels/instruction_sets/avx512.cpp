// The kernels for CPUs with AVX-512 (F, BW, DQ, VL).
#include "vectors/avx512.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet avx512_set = make_instruction_set<Avx512, 12>("avx512");
