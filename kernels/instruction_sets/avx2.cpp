// The kernels for CPUs with AVX2, FMA and F16C.
#include "vectors/avx2.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet avx2_set = make_instruction_set<Avx2, 8>("avx2");
