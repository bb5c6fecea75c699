// Products of a few rows with a weight that is laid out once and multiplied at every step of a window.
//
// A packed weight is a run of panels. A panel holds VECTORS times LANES outputs and all its inputs, in the order in which the
// inner loop reads them: inputs, (vector, lane), and for bf16 two consecutive inputs side by side, which is what both the
// AVX-512 dot product and an AMX tile want. The number of inputs is a multiple of INPUT_STEP, padded with zeros.
//
// For one output the inputs are always added in the same order, so its bits depend neither on the number of rows nor on
// the number of threads.
#pragma once

#include <cstddef>

#include "vectors.h"

constexpr int INPUT_STEP = 32;

// Rows that share one pass over a panel: the accumulators must fit the registers.
#if defined(__AVX512F__)
constexpr int ROW_BLOCK = 8;
#else
constexpr int ROW_BLOCK = 2;
#endif

INLINE size_t round_up(size_t value, size_t step) {
    return (value + step - 1) / step * step;
}

template <class T>
constexpr int PAIRED = sizeof(T) == sizeof(bf16) ? 2 : 1;

// Where output (vector, lane) of a panel keeps its weight for one input.
template <class T, int VECTORS>
INLINE size_t packed_index(size_t input, int vector, int lane) {
    constexpr size_t paired = PAIRED<T>;
    return ((input / paired * VECTORS + vector) * LANES + lane) * paired + input % paired;
}

INLINE vec multiply_add(vec total, const float *input, const float *weights) {
    return total + *input * load(weights);
}

INLINE vec multiply_add(vec total, const bf16 *inputs, const bf16 *weights) {
#if defined(__AVX512BF16__)
    int32_t pair;
    std::memcpy(&pair, inputs, sizeof pair);
    const __m512i both = _mm512_set1_epi32(pair), packed = _mm512_loadu_si512(weights);
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)both, (__m512bh)packed);
#else
    uvec packed;
    std::memcpy(&packed, weights, sizeof packed);
    total = total + to_float(inputs[0]) * as_bits<vec>(packed << 16);
    return total + to_float(inputs[1]) * as_bits<vec>(packed & 0xffff0000u);
#endif
}

// ROWS rows of inputs[ROWS][stride] times one panel: out[ROWS][VECTORS][LANES].
template <class T, int VECTORS, int ROWS>
INLINE void multiply_rows(const T *inputs, size_t stride, const T *panel, size_t num_inputs, float *out) {
    vec totals[ROWS][VECTORS] = {};
    for (size_t input = 0; input < num_inputs; input += PAIRED<T>) {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int vector = 0; vector < VECTORS; ++vector)
                totals[row][vector] =
                    multiply_add(totals[row][vector], inputs + row * stride + input, panel + vector * LANES * PAIRED<T>);
        panel += VECTORS * LANES * PAIRED<T>;
    }
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < VECTORS; ++vector) store(out + (row * VECTORS + vector) * LANES, totals[row][vector]);
}

#include "tiles.h"

// inputs[num_rows][stride] times one panel: out[num_rows][VECTORS][LANES]. Where there are tiles, `inputs` and `out` have
// room for num_rows rounded up to TILE_ROWS.
template <class T, int VECTORS>
INLINE void multiply(const T *inputs, size_t stride, int num_rows, const T *panel, size_t num_inputs, float *out) {
#if defined(HAS_TILES)
    // For a single row too: its cost is that of reading the weight, and bits then do not depend on the number of rows.
    if constexpr (PAIRED<T> == 2) return multiply_tiles<VECTORS>(inputs, stride, num_rows, panel, num_inputs, out);
#endif
    int row = 0;
    for (; row + ROW_BLOCK <= num_rows; row += ROW_BLOCK)
        multiply_rows<T, VECTORS, ROW_BLOCK>(inputs + row * stride, stride, panel, num_inputs, out + row * VECTORS * LANES);
    if constexpr (ROW_BLOCK > 4) {
        for (; row + 4 <= num_rows; row += 4)
            multiply_rows<T, VECTORS, 4>(inputs + row * stride, stride, panel, num_inputs, out + row * VECTORS * LANES);
    }
    for (; row < num_rows; ++row)
        multiply_rows<T, VECTORS, 1>(inputs + row * stride, stride, panel, num_inputs, out + row * VECTORS * LANES);
}
