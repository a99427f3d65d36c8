// The kernels for ARM CPUs (AArch64) with dot products of bytes.
#include "vectors/neon.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet neon_dotprod_set = instruction_set_of<Neon, 8>("neon-dotprod");
