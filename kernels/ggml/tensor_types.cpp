#include "ggml/tensor_types.h"

#include <string>

namespace {

struct TypeName {
    const char *name;
    WeightType type;
};
constexpr TypeName type_names[] = {
    {"q4_0", WeightType::q4_0},     {"q4_1", WeightType::q4_1},     {"q5_0", WeightType::q5_0},
    {"q5_1", WeightType::q5_1},     {"q8_0", WeightType::q8_0},     {"q2_K", WeightType::q2_k},
    {"q3_K", WeightType::q3_k},     {"q4_K", WeightType::q4_k},     {"q5_K", WeightType::q5_k},
    {"q6_K", WeightType::q6_k},     {"iq4_nl", WeightType::iq4_nl}, {"iq4_xs", WeightType::iq4_xs},
    {"mxfp4", WeightType::mxfp4},   {"f16", WeightType::f16},       {"bf16", WeightType::bf16},
    {"f32", WeightType::f32},
};

// By ggml's number of a type.
constexpr int n_types = 128;  // more than ggml has
WeightType weight_types[n_types];
NumberType number_types[n_types];

}  // namespace

void learn_types() {
    for (int t = 0; t < n_types; t++) {
        weight_types[t] = WeightType::none;
        number_types[t] = NumberType::unsupported;
    }
    for (int t = 0; t < n_ggml_types && t < n_types; t++) {
        const char *found = ggml_api.type_name(t);
        if (found == nullptr) continue;
        const std::string name = found;
        for (const auto &known : type_names) {
            if (name == known.name) weight_types[t] = known.type;
        }
        if (name == "f32") number_types[t] = NumberType::f32;
        if (name == "f16") number_types[t] = NumberType::f16;
        if (name == "bf16") number_types[t] = NumberType::bf16;
        if (name == "q8_0") number_types[t] = NumberType::q8_0;
    }
}

WeightType weight_type(const ggml_tensor *weights) {
    const bool is_known = weights->type >= 0 && weights->type < n_types;
    return is_known ? weight_types[weights->type] : WeightType::none;
}

NumberType number_type(const ggml_tensor *tensor) {
    const bool is_known = tensor->type >= 0 && tensor->type < n_types;
    return is_known ? number_types[tensor->type] : NumberType::unsupported;
}
