// The types of weights that have a packed form.
#pragma once

// `none` stands for all other types of GGUF, `count` for how many there are.
enum class WeightType {
    none, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4,
    f16, bf16, f32,
    count
};
