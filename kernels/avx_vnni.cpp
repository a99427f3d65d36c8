// The kernels for CPUs with AVX-VNNI, FMA and F16C.
#include "vector_avx_vnni.h"

#include "instruction_set_of.h"

const InstructionSet avx_vnni_set = instruction_set_of<AvxVnni, 8>("avx-vnni");
