// Makes the table of an instruction set from its vector type.
#pragma once

#include "attention/attention.h"
#include "attention/softmax.h"
#include "instruction_sets/instruction_set.h"
#include "logits/likeliest_tokens.h"
#include "products/plain_product.h"
#include "products/product_table.h"

namespace {

// `most_columns` is the most columns of a tile of a product.
template <class V, int most_columns>
constexpr InstructionSet make_instruction_set(const char *name) {
    using Products = ProductTable<V, most_columns>;
    return {name,
            V::lanes,
            [](WeightType, int64_t) { return most_columns; },
            Products::group_bytes,
            Products::pack,
            Products::column_bytes,
            Products::inputs_per_block,
            Products::prepare,
            Products::multiply,
            [] {},
            Attention<V>::bytes,
            Attention<V>::run,
            PlainProduct<V>::run,
            Softmax<V>::run,
            LikeliestTokens<V>::run};
}

}  // namespace
