// Arithmetic that gives the same bits on a GPU, under g++ and in torch (ops/candidates.py, plan 20).
//
// Basic IEEE operations, each rounded for itself, and integers. On the device the *_rn intrinsics keep nvcc
// from contracting a product and a sum into one rounding; a host compiler needs -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KD_BOTH __host__ __device__ __forceinline__
#else
#define KD_BOTH inline
#endif
#ifdef __CUDA_ARCH__
#define KD_UNROLL _Pragma("unroll")
#else
#define KD_UNROLL
#endif

namespace kdtree {

constexpr float kMaxFloat = 3.40282347e+38f;

KD_BOTH float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KD_BOTH float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

KD_BOTH double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

KD_BOTH double sum(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

KD_BOTH double quotient(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// a * b + c, rounded once. Only where the product is exact, so that it is the two operations above.
KD_BOTH float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// The sum of two numbers that are not negative, cut off instead of rounded.
KD_BOTH float sum_cut(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rz(a, b);
#else
  const float total = a + b, part = total - a;
  const float error = (a - (total - part)) + (b - part);  // exact: a + b = total + error
  return error < 0 ? nextafterf(total, 0.0f) : total;
#endif
}

template <typename To, typename From>
KD_BOTH To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the bits of one type as another of the same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Unsigned integers that are ordered as the numbers are. Of a float that is a candidate's, so never 0,
// which stands for no candidate; -0 and 0 are the same.
KD_BOTH uint32_t ordered(float x) {
  const uint32_t bits = bits_as<uint32_t>(sum(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

KD_BOTH float value_of(uint32_t order) {
  return bits_as<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

KD_BOTH uint64_t ordered(double x) {
  const uint64_t bits = bits_as<uint64_t>(sum(x, 0.0));
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

// NaN and infinities are no candidates; neither is a log-probability above 0.
KD_BOTH bool is_candidate(float x, bool from_logits) {
  return (bits_as<uint32_t>(x) & 0x7f800000u) != 0x7f800000u && (from_logits || x <= 0.0f);
}

// exp(x) for |x| <= log(2) / 2: Taylor's polynomial of degree 7, coefficients 1/7! to 1/0!.
KD_BOTH float power_of(float x) {
  float power = 1.98412701e-04f;
  power = sum(product(power, x), 1.38888892e-03f);
  power = sum(product(power, x), 8.33333377e-03f);
  power = sum(product(power, x), 4.16666679e-02f);
  power = sum(product(power, x), 1.66666672e-01f);
  power = sum(product(power, x), 0.5f);
  power = sum(product(power, x), 1.0f);
  return sum(product(power, x), 1.0f);
}

// exp(x) for x <= 0 in units of 2^-40; 0 for NaN and below -30. Cody and Waite's reduction, then the polynomial.
KD_BOTH uint64_t fixed_exp(float x) {
  if (!(x >= -30.0f)) return 0;
  const float halvings = rintf(product(x, 1.44269502f));
  float rest = sum(x, -product(halvings, 0.693145752f));
  rest = sum(rest, -product(halvings, 1.42860677e-06f));
  // float32 below 2 is a whole number of 2^-24.
  return static_cast<uint64_t>(product(power_of(rest), 16777216.0f)) << 16 >> static_cast<int>(-halvings);
}

// A sum of at most 8 `fixed_exp`, without integers of 64 bits or conversions, which are slow on a GPU. A term
// power * 2^-halvings is cut to whole 2^-20 by adding it to a number in [8, 16), where float32 has that step;
// what is cut off is cut to whole 2^-40 the same way. 8 terms of at most 1 leave neither range.
struct ExpSum {
  float coarse = 8.0f, fine = 0x1p-17f;

  KD_BOTH void add(float x) {
    x = fmaxf(x, -40.0f);  // NaN too; below -29 a term is 0 by its shift alone
    // Adding 1.5 * 2^23 rounds to a whole number, as rintf does, and leaves it in the last bits.
    const float shifted = sum(product(x, 1.44269502f), 12582912.0f);
    const float halvings = sum(shifted, -12582912.0f);
    float rest = fused(halvings, -0.693145752f, x);  // 6 bits by 16: exact
    rest = sum(rest, -product(halvings, 1.42860677e-06f));
    const float power = power_of(rest);
    const float term = bits_as<float>(bits_as<uint32_t>(power) + (bits_as<uint32_t>(shifted) << 23));
    const float next = sum_cut(coarse, term);
    fine = sum_cut(fine, sum(term, -sum(next, -coarse)));
    coarse = next;
  }

  // The sum in units of 2^-20, and the rest in units of 2^-40; each below 2^24.
  KD_BOTH uint32_t coarse_units() const { return bits_as<uint32_t>(coarse) - 0x41000000u; }
  KD_BOTH uint32_t fine_units() const { return bits_as<uint32_t>(fine) - 0x37000000u; }
};

KD_BOTH uint64_t of_units(uint32_t coarse, uint32_t fine) { return (uint64_t{coarse} << 20) + fine; }

// A chunk's part of the whole sum of exponentials: its own sum, scaled from its maximum to the row's.
KD_BOTH uint64_t scaled(uint64_t chunk_sum, uint64_t scale) {
  const double both = product(static_cast<double>(chunk_sum), static_cast<double>(scale));
  return static_cast<uint64_t>(product(both, 0x1p-40));
}

// Natural log of a number in units of 2^-40, at least 1: 2 atanh((f - 1) / (f + 1)) and the exponent.
KD_BOTH double log_of_fixed(uint64_t total) {
  const uint64_t bits = bits_as<uint64_t>(static_cast<double>(total));
  int exponent = static_cast<int>(bits >> 52) - 1022;
  double fraction = bits_as<double>((bits & 0xfffffffffffffull) | 0x3fe0000000000000ull);  // in [0.5, 1)
  if (fraction < 0.7071067811865476) {
    fraction = product(fraction, 2.0);
    exponent -= 1;
  }
  const double ratio = quotient(sum(fraction, -1.0), sum(fraction, 1.0));
  const double square = product(ratio, ratio);
  double series = 1.0 / 21;
  KD_UNROLL
  for (int term = 9; term >= 0; --term) series = sum(product(series, square), 1.0 / (2 * term + 1));
  return sum(product(static_cast<double>(exponent - 40), 0.6931471805599453),
             product(product(ratio, 2.0), series));
}

// The log of a row's sum of exponentials: of its largest logit, and of the sum over the chunks.
KD_BOTH float normaliser(float top, uint64_t total) {
  return static_cast<float>(sum(static_cast<double>(top), log_of_fixed(total > 0 ? total : 1)));
}

// What a probability weighs, and where a draw in [0, 1) falls among weights that sum up to `total`.
KD_BOTH uint64_t weight_of(float p) {
  return p >= 0.0f && p <= 2.0f ? static_cast<uint64_t>(product(p, 0x1p40f)) : 0;
}

KD_BOTH uint64_t reach_of(float draw, uint64_t total) {
  const float scaled_draw = product(draw, 0x1p31f);
  const uint64_t u = !(scaled_draw >= 1.0f)           ? 0  // NaN too
                     : scaled_draw >= 2147483648.0f ? 0x7fffffffu
                                                      : static_cast<uint64_t>(scaled_draw);
  return 2 * u * (total >> 32) + (u * (total & 0xffffffffu) >> 31);
}

}  // namespace kdtree
