// Sixteen floats at a time, on every processor: GCC and Clang lower this vector to whatever registers there are.
//
// Numbers kept in memory are `float` or `bf16`; arithmetic is always fp32.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

INLINE vec splat(float value) {
    return value - vec{};
}

template <class To, class From>
INLINE To as_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

INLINE vec load(const float *from) {
    vec value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE vec load(const bf16 *from) {
    halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return as_bits<vec>(__builtin_convertvector(bits, uvec) << 16);
}

INLINE void store(float *to, vec value) {
    std::memcpy(to, &value, sizeof value);
}

// Round to nearest, ties to even; a NaN stays one.
INLINE void store(bf16 *to, vec value) {
#if defined(__AVX512BF16__)
    const __m256bh bits = _mm512_cvtneps_pbh((__m512)value);
#else
    const uvec raw = as_bits<uvec>(value);
    const uvec rounded = (raw + 0x7fff + ((raw >> 16) & 1)) >> 16;
    const uvec quiet = (raw >> 16) | 0x40;
    const halves bits = __builtin_convertvector(value == value ? rounded : quiet, halves);
#endif
    std::memcpy(to, &bits, sizeof bits);
}

INLINE float to_float(float value) {
    return value;
}

INLINE float to_float(bf16 value) {
    return as_bits<float>(static_cast<uint32_t>(value.bits) << 16);
}

INLINE void from_float(float *to, float value) {
    *to = value;
}

INLINE void from_float(bf16 *to, float value) {
    const uint32_t raw = as_bits<uint32_t>(value);
    to->bits = static_cast<uint16_t>(value == value ? (raw + 0x7fff + ((raw >> 16) & 1)) >> 16 : (raw >> 16) | 0x40);
}

// The first `count` numbers, zeros after them: for the last panel of a width that is no multiple of LANES.
template <class T>
INLINE vec load(const T *from, int count) {
    if (count >= LANES) return load(from);
    float lanes[LANES] = {};
    for (int lane = 0; lane < count; ++lane) lanes[lane] = to_float(from[lane]);
    return load(lanes);
}

template <class T>
INLINE void store(T *to, vec value, int count) {
    if (count >= LANES) return store(to, value);
    T lanes[LANES];
    store(lanes, value);
    if (count > 0) std::memcpy(to, lanes, count * sizeof(T));
}

INLINE float sum(vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
#endif
}

INLINE vec reciprocal(vec value) {
#if defined(__AVX512F__)
    // 14 bits by table, doubled by one Newton step: a third of a division's time. An infinite value must give zero.
    const vec guess = (vec)_mm512_rcp14_ps((__m512)value);
    const vec better = guess + guess * (1.0f - value * guess);
    return guess == 0.0f ? guess : better;
#else
    return 1.0f / value;
#endif
}

// exp(x), relative error below 2e-7 where the result is a normal number; a NaN stays one.
INLINE vec exponential(vec x) {
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.0f ? splat(-87.0f) : x;
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
    const vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec series = rest * (1.0f / 720.0f) + (1.0f / 120.0f);
    series = series * rest + (1.0f / 24.0f);
    series = series * rest + (1.0f / 6.0f);
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    const ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return series * as_bits<vec>(power);
}

INLINE vec sigmoid(vec x) {
    return reciprocal(1.0f + exponential(-x));
}

// Absolute error below 2e-7.
INLINE vec hyperbolic_tangent(vec x) {
    return 2.0f * reciprocal(1.0f + exponential(-2.0f * x)) - 1.0f;
}
