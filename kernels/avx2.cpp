// The kernels for CPUs with AVX2, FMA and F16C.
#include "vector_avx2.h"

#include "instruction_set_of.h"

const InstructionSet avx2_set = instruction_set_of<Avx2, 8>("avx2");
