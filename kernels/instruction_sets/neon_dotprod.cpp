// The kernels for ARM CPUs (AArch64) with dot products of bytes.
#include "vectors/neon.h"

#include "instruction_sets/make_instruction_set.h"

const InstructionSet neon_dotprod_set = make_instruction_set<Neon, 8>("neon-dotprod");
