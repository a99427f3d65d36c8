// The table of functions of one instruction set, made of its vector type.
#pragma once

#include "attention/attention.h"
#include "instruction_sets/instruction_set.h"
#include "logits/likeliest_tokens.h"
#include "products/plain_rows.h"
#include "products/product_table.h"

namespace {

template <class V, int columns>
constexpr InstructionSet instruction_set_of(const char *name) {
    using P = Products<V, columns>;
    return {name,
            V::lanes,
            [](WeightType, int64_t) { return columns; },
            P::group_bytes,
            P::pack,
            P::column_bytes,
            P::inputs_per_block,
            P::prepare,
            P::multiply,
            [] {},
            Attention<V>::bytes,
            Attention<V>::run,
            PlainRows<V>::run,
            PlainRows<V>::softmax,
            Likeliest<V>::run};
}

}  // namespace
