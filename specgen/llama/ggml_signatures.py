"""The C functions of GGML that specgen calls, which llama-cpp-python does not declare.

`specgen.llama.library.native` has them as attributes.
"""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER: Any = ctypes.c_void_p
_TEXT: Any = ctypes.c_char_p
_BOOL: Any = ctypes.c_bool
_INT: Any = ctypes.c_int
_INT64: Any = ctypes.c_int64
_FLOAT: Any = ctypes.c_float
_SIZE: Any = ctypes.c_size_t
_SIZE_POINTER: Any = ctypes.POINTER(ctypes.c_size_t)
_INT64_POINTER: Any = ctypes.POINTER(ctypes.c_int64)


class GgmlInitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", _BOOL))


class GgufInitParams(ctypes.Structure):
    """gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", _BOOL), ("tensors", ctypes.POINTER(_POINTER)))


class GgmlTypeTraits(ctypes.Structure):
    """ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", _TEXT),
        ("blck_size", _INT64),
        ("blck_size_interleave", _INT64),
        ("type_size", _SIZE),
        ("is_quantized", _BOOL),
        ("to_float", ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _INT64)),
        ("from_float_ref", _POINTER),
    )


#: The type of the result of each function, then those of its arguments.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    # GGUF files
    "gguf_init_from_file": (_POINTER, _TEXT, GgufInitParams),
    "gguf_free": (None, _POINTER),
    "gguf_find_key": (_INT64, _POINTER, _TEXT),
    "gguf_get_kv_type": (_INT, _POINTER, _INT64),
    "gguf_get_val_u8": (ctypes.c_uint8, _POINTER, _INT64),
    "gguf_get_val_i8": (ctypes.c_int8, _POINTER, _INT64),
    "gguf_get_val_u16": (ctypes.c_uint16, _POINTER, _INT64),
    "gguf_get_val_i16": (ctypes.c_int16, _POINTER, _INT64),
    "gguf_get_val_u32": (ctypes.c_uint32, _POINTER, _INT64),
    "gguf_get_val_i32": (ctypes.c_int32, _POINTER, _INT64),
    "gguf_get_val_f32": (_FLOAT, _POINTER, _INT64),
    "gguf_get_val_u64": (ctypes.c_uint64, _POINTER, _INT64),
    "gguf_get_val_i64": (_INT64, _POINTER, _INT64),
    "gguf_get_val_f64": (ctypes.c_double, _POINTER, _INT64),
    "gguf_get_val_bool": (ctypes.c_bool, _POINTER, _INT64),
    "gguf_get_val_str": (_TEXT, _POINTER, _INT64),
    "gguf_get_arr_type": (_INT, _POINTER, _INT64),
    "gguf_get_arr_n": (_SIZE, _POINTER, _INT64),
    "gguf_get_arr_data": (_POINTER, _POINTER, _INT64),
    "gguf_get_arr_str": (_TEXT, _POINTER, _INT64, _SIZE),
    "gguf_get_data_offset": (_SIZE, _POINTER),
    "gguf_get_n_tensors": (_INT64, _POINTER),
    "gguf_get_tensor_offset": (_SIZE, _POINTER, _INT64),
    "gguf_get_tensor_size": (_SIZE, _POINTER, _INT64),
    "gguf_find_tensor": (_INT64, _POINTER, _TEXT),
    "gguf_get_tensor_type": (_INT, _POINTER, _INT64),
    "gguf_get_tensor_ne": (_INT64_POINTER, _POINTER, _INT64),
    # GGUF metadata that is written
    "gguf_init_empty": (_POINTER,),
    "gguf_get_n_kv": (_INT64, _POINTER),
    "gguf_get_key": (_TEXT, _POINTER, _INT64),
    "gguf_set_kv": (None, _POINTER, _POINTER),
    "gguf_remove_key": (_INT64, _POINTER, _TEXT),
    "gguf_set_val_u32": (None, _POINTER, _TEXT, ctypes.c_uint32),
    "gguf_set_val_str": (None, _POINTER, _TEXT, _TEXT),
    "gguf_set_arr_data": (None, _POINTER, _TEXT, _INT, _TEXT, _SIZE),
    "gguf_add_tensor": (None, _POINTER, _POINTER),
    "gguf_get_meta_size": (_SIZE, _POINTER),
    "gguf_get_meta_data": (None, _POINTER, _POINTER),
    # tensors and their types
    "ggml_init": (_POINTER, GgmlInitParams),
    "ggml_free": (None, _POINTER),
    "ggml_tensor_overhead": (_SIZE,),
    "ggml_new_tensor": (_POINTER, _POINTER, _INT, _INT, _INT64_POINTER),
    "ggml_get_first_tensor": (_POINTER, _POINTER),
    "ggml_get_next_tensor": (_POINTER, _POINTER, _POINTER),
    "ggml_get_name": (_TEXT, _POINTER),
    "ggml_set_name": (_POINTER, _POINTER, _TEXT),
    "ggml_nbytes": (_SIZE, _POINTER),
    "ggml_type_name": (_TEXT, _INT),
    "ggml_blck_size": (_INT64, _INT),
    "ggml_row_size": (_SIZE, _INT, _INT64),
    "ggml_get_type_traits": (ctypes.POINTER(GgmlTypeTraits), _INT),
    "ggml_quantize_requires_imatrix": (_BOOL, _INT),
    "ggml_quantize_chunk": (_SIZE, _INT, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER),
    # operators and graphs
    "ggml_mul_mat": (_POINTER, _POINTER, _POINTER, _POINTER),
    "ggml_mul_mat_id": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    "ggml_permute": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "ggml_flash_attn_ext": (_POINTER, *5 * (_POINTER,), _FLOAT, _FLOAT, _FLOAT),
    "ggml_graph_overhead_custom": (_SIZE, _SIZE, _BOOL),
    "ggml_new_graph_custom": (_POINTER, _POINTER, _SIZE, _BOOL),
    "ggml_build_forward_expand": (None, _POINTER, _POINTER),
    # the version, backends and devices
    "ggml_version": (_TEXT,),
    "ggml_backend_load": (_POINTER, _TEXT),
    "ggml_backend_load_all_from_path": (None, _TEXT),
    "ggml_backend_reg_count": (_SIZE,),
    "ggml_backend_reg_by_name": (_POINTER, _TEXT),
    "ggml_backend_reg_dev_count": (_SIZE, _POINTER),
    "ggml_backend_reg_dev_get": (_POINTER, _POINTER, _SIZE),
    "ggml_backend_reg_get_proc_address": (_POINTER, _POINTER, _TEXT),
    "ggml_backend_dev_count": (_SIZE,),
    "ggml_backend_dev_get": (_POINTER, _SIZE),
    "ggml_backend_dev_by_type": (_POINTER, _INT),
    "ggml_backend_dev_name": (_TEXT, _POINTER),
    "ggml_backend_dev_description": (_TEXT, _POINTER),
    "ggml_backend_dev_type": (_INT, _POINTER),
    "ggml_backend_dev_memory": (None, _POINTER, _SIZE_POINTER, _SIZE_POINTER),
    "ggml_backend_dev_backend_reg": (_POINTER, _POINTER),
    "ggml_backend_dev_init": (_POINTER, _POINTER, _TEXT),
    "ggml_backend_free": (None, _POINTER),
    "ggml_backend_graph_compute": (_INT, _POINTER, _POINTER),
    # buffers
    "ggml_backend_cpu_buffer_type": (_POINTER,),
    "ggml_backend_buft_name": (_TEXT, _POINTER),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, _POINTER, _POINTER),
    "ggml_backend_buffer_set_usage": (None, _POINTER, _INT),
    "ggml_backend_buffer_free": (None, _POINTER),
    "ggml_backend_tensor_set": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_tensor_get": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    # the end of the process
    "ggml_set_abort_callback": (_POINTER, _POINTER),
}
