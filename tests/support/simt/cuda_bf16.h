// bfloat16 of cuda_bf16.h, as far as csrc_trees uses it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }
// Of NaN and a number it is the number, as on a GPU.
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const auto larger = [](__nv_bfloat16 one, __nv_bfloat16 other) {
    return std::isnan(__bfloat162float(one)) || __bfloat162float(one) < __bfloat162float(other) ? other : one;
  };
  return {larger(a.x, b.x), larger(a.y, b.y)};
}
