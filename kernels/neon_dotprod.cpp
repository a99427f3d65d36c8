// The kernels for ARM CPUs (AArch64) with dot products of bytes.
#include "vector_neon.h"

#include "instruction_set_of.h"

const InstructionSet neon_dotprod_set = instruction_set_of<Neon, 8>("neon-dotprod");
