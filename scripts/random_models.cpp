// Writes random models of llama.cpp's architectures, for the tests of all architectures.
//
//     random_models list                                        the names: ARCHITECTURE[-moe]
//     random_models write NAME SEED VOCABULARY.gguf F32.gguf [Q4_K.gguf]
//
// The shapes are those of llama.cpp's own tests, whose source this file includes: it is built with
// the folder of that source (scripts/build_architectures.py) and the installed libllama. That
// program writes a vocabulary without text; here a model gets the one of another file, and all
// architectures are tried, also those that it leaves out.

#define main static unused_main
#include "tests/test-llama-archs.cpp"
#undef main

#include <algorithm>
#include <iostream>

const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);

static const uint32_t CONTEXT_LENGTH = 512;

static std::string model_name(const llm_arch arch, const bool moe) {
    return std::string(llm_arch_name(arch)) + (moe ? "-moe" : "");
}

static std::vector<std::pair<llm_arch, bool>> models() {
    std::vector<std::pair<llm_arch, bool>> found;
    for (const llm_arch & arch : llm_arch_all()) {
        if (arch == LLM_ARCH_UNKNOWN) {
            continue;
        }
        for (const bool moe : { false, true }) {
            const bool mandatory = moe_mandatory(arch) || arch == LLM_ARCH_DEEPSEEK2OCR;
            if (moe ? mandatory || moe_implemented(arch) : !mandatory) {
                found.emplace_back(arch, moe);
            }
        }
    }
    return found;
}

// The vocabulary of `from` replaces that of `to`.
static void copy_vocabulary(gguf_context * to, const gguf_context * from) {
    std::vector<std::string> old;
    for (int64_t key = 0; key < gguf_get_n_kv(to); key++) {
        if (strncmp(gguf_get_key(to, key), "tokenizer.", 10) == 0) {
            old.emplace_back(gguf_get_key(to, key));
        }
    }
    for (const std::string & key : old) {
        gguf_remove_key(to, key.c_str());
    }
    for (int64_t key = 0; key < gguf_get_n_kv(from); key++) {
        const char * name = gguf_get_key(from, key);
        if (strncmp(name, "tokenizer.", 10) != 0) {
            continue;
        }
        switch (gguf_get_kv_type(from, key)) {
            case GGUF_TYPE_STRING: gguf_set_val_str(to, name, gguf_get_val_str(from, key)); break;
            case GGUF_TYPE_UINT32: gguf_set_val_u32(to, name, gguf_get_val_u32(from, key)); break;
            case GGUF_TYPE_BOOL: gguf_set_val_bool(to, name, gguf_get_val_bool(from, key)); break;
            case GGUF_TYPE_ARRAY: {
                const size_t n = gguf_get_arr_n(from, key);
                if (gguf_get_arr_type(from, key) == GGUF_TYPE_STRING) {
                    std::vector<const char *> strings;
                    for (size_t i = 0; i < n; i++) {
                        strings.push_back(gguf_get_arr_str(from, key, i));
                    }
                    gguf_set_arr_str(to, name, strings.data(), n);
                } else {
                    gguf_set_arr_data(to, name, gguf_get_arr_type(from, key), gguf_get_arr_data(from, key), n);
                }
                break;
            }
            default: throw std::runtime_error(std::string("unexpected type of ") + name);
        }
    }
}

// What the architectures need that llama.cpp's tests leave out.
static void complete(const llm_arch arch, gguf_context * shape) {
    llama_model_saver saver(arch, shape);
    const uint32_t n_layer = gguf_get_val_u32(shape, gguf_find_key(shape, saver.llm_kv(LLM_KV_BLOCK_COUNT).c_str()));
    if (arch == LLM_ARCH_GEMMA4) {
        std::vector<uint32_t> windowed(n_layer, 1);
        windowed.back() = 0;
        saver.add_kv(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN, windowed);
    }
    if (arch == LLM_ARCH_RWKV7 || arch == LLM_ARCH_ARWKV7) {
        saver.add_kv(LLM_KV_ATTENTION_DECAY_LORA_RANK, uint32_t(64));
        saver.add_kv(LLM_KV_ATTENTION_ICLR_LORA_RANK, uint32_t(64));
        saver.add_kv(LLM_KV_ATTENTION_VALUE_RESIDUAL_MIX_LORA_RANK, uint32_t(32));
        saver.add_kv(LLM_KV_ATTENTION_GATE_LORA_RANK, uint32_t(128));
    }
    if (arch == LLM_ARCH_RWKV6QWEN2 || arch == LLM_ARCH_ARWKV7) {
        saver.add_kv(LLM_KV_TOKEN_SHIFT_COUNT, uint32_t(1));
    }
    if (arch == LLM_ARCH_PLM) {
        saver.add_kv(LLM_KV_ATTENTION_KEY_LENGTH, uint32_t(192));
        saver.add_kv(LLM_KV_ATTENTION_VALUE_LENGTH, uint32_t(128));
        saver.add_kv(LLM_KV_ROPE_DIMENSION_COUNT, uint32_t(64));
    }
}

// An optional tensor that files of other models have: llama.cpp makes all that it would load.
static bool is_other_models(const llm_arch arch, const std::string & name) {
    static const std::regex scale("\\.(input_)?scale$");  // factors of a matrix, BitNet's
    if (arch == LLM_ARCH_RWKV6QWEN2 && name.find("time_mix_first") != std::string::npos) {
        return true;  // it makes an RWKV6 of it
    }
    return arch != LLM_ARCH_BITNET && std::regex_search(name, scale);
}

static void write(const llm_arch arch, const bool moe, const size_t seed, const char * vocabulary, const char * path) {
    gguf_context_ptr vocab(gguf_init_from_file(vocabulary, { /*no_alloc =*/ true, /*ctx =*/ nullptr }));
    if (!vocab) {
        throw std::runtime_error(std::string("no vocabulary in ") + vocabulary);
    }
    gguf_context_ptr shape = get_gguf_ctx(arch, moe);
    complete(arch, shape.get());
    const std::string prefix = std::string(llm_arch_name(arch)) + ".";
    const int64_t tokens = gguf_find_key(vocab.get(), "tokenizer.ggml.tokens");
    const std::string size_key = prefix + "vocab_size";
    const uint32_t n_tokens = gguf_get_arr_n(vocab.get(), tokens);
    // At least what the generator asks for: some architectures need as many.
    const uint32_t n_vocab = std::max(n_tokens, gguf_get_val_u32(shape.get(), gguf_find_key(shape.get(), size_key.c_str())));
    copy_vocabulary(shape.get(), vocab.get());
    std::vector<std::string> names;
    for (uint32_t i = 0; i < n_vocab; i++) {
        names.push_back(i < n_tokens ? gguf_get_arr_str(vocab.get(), tokens, i) : "[PAD" + std::to_string(i) + "]");
    }
    std::vector<const char *> pointers;
    for (const std::string & name : names) {
        pointers.push_back(name.c_str());
    }
    const int64_t types = gguf_find_key(vocab.get(), "tokenizer.ggml.token_type");
    const int32_t * of_type = (const int32_t *) gguf_get_arr_data(vocab.get(), types);
    std::vector<int32_t> token_types(of_type, of_type + n_tokens);
    token_types.resize(n_vocab, LLAMA_TOKEN_TYPE_UNUSED);
    gguf_set_arr_str(shape.get(), "tokenizer.ggml.tokens", pointers.data(), n_vocab);
    gguf_set_arr_data(shape.get(), "tokenizer.ggml.token_type", GGUF_TYPE_INT32, token_types.data(), n_vocab);
    gguf_set_val_u32(shape.get(), size_key.c_str(), n_vocab);
    gguf_set_val_u32(shape.get(), (prefix + "context_length").c_str(), CONTEXT_LENGTH);

    llama_model_params params = llama_model_default_params();
    params.progress_callback = silent_model_load_progress;
    tensor_data_params tensor_params = { seed, 0.1f };
    llama_model_ptr model(llama_model_init_from_user(shape.get(), set_tensor_data, &tensor_params, params));
    if (!model) {
        throw std::runtime_error("llama.cpp makes no model of it");
    }
    // Not by llama.cpp's saver: it knows neither the tensors nor the metadata of all architectures,
    // and gives a model the keys of all others, as zeros.
    gguf_context_ptr saved(gguf_init_empty());
    gguf_set_kv(saved.get(), shape.get());
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model.get())) {
        if (gguf_find_tensor(saved.get(), tensor->name) < 0 && !is_other_models(arch, name)) {
            gguf_add_tensor(saved.get(), tensor);
        }
    }
    if (!gguf_write_to_file(saved.get(), path, /*only_meta =*/ false)) {
        throw std::runtime_error(std::string("cannot write ") + path);
    }
}

static void quantize(const char * from, const char * to) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_MOSTLY_Q4_K_M;
    params.nthread = 1;
    // llama.cpp would quantise these, by which it then cannot multiply.
    const llama_model_tensor_override exact[] = { { "ple_norm", GGML_TYPE_F32 }, { nullptr, GGML_TYPE_COUNT } };
    params.tt_overrides = exact;
    if (llama_model_quantize(from, to, &params) != 0) {
        throw std::runtime_error("it cannot be quantised");
    }
}

int main(int argc, char ** argv) {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (arguments == std::vector<std::string>{ "list" }) {
        for (const auto & [arch, moe] : models()) {
            std::cout << model_name(arch, moe) << "\n";
        }
        return 0;
    }
    if (arguments.size() < 5 || arguments[0] != "write") {
        std::cerr << "random_models list | write NAME SEED VOCABULARY.gguf F32.gguf [Q4_K.gguf]\n";
        return 2;
    }
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                fputs(text, stderr);
            }
        },
        nullptr);
    try {
        for (const auto & [arch, moe] : models()) {
            if (model_name(arch, moe) == arguments[1]) {
                write(arch, moe, std::stoull(arguments[2]), argv[4], argv[5]);
                if (argc > 6) {
                    quantize(argv[5], argv[6]);
                }
                return 0;
            }
        }
        throw std::runtime_error("no such architecture");
    } catch (const std::exception & error) {
        std::cerr << arguments[1] << ": " << error.what() << "\n";
        return 1;
    }
}
