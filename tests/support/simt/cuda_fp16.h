// float16 of cuda_fp16.h, as far as csrc_trees uses it.
#pragma once

using __half = _Float16;

inline float __half2float(__half x) { return static_cast<float>(x); }
