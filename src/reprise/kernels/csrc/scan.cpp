// Linear scans: h_t = a_t * h_{t-1} + v_t, unit by unit, with what makes a and v from the gates in the same pass.
//
// A thread owns some rows, or some units of a row, and goes through them in the order of memory; the state of a row stays
// in the nearest cache. A unit's numbers depend neither on the number of rows nor on the number of threads.
// Equations: kernels/reference_scan.py.
//
// GATES     sums a unit takes, in the order of the weights
// BIASED    the gates still want their bias
// RATED     a unit has a decay rate
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "team.h"
#include "vectors.h"

namespace {

// Beyond these an exponential's reciprocal would no longer be a normal number.
constexpr float LARGEST_EXPONENT = 80.0f;
// What 1 - a^2 counts as at least, as in the reference.
constexpr float SMALLEST_SQUARE = 1e-24f;

INLINE vec at_most(vec value, float limit) {
    return value > limit ? splat(limit) : value;
}

// exp(x) - 1 for x <= 0, relative error below 3e-7 however small x is.
INLINE vec exponential_less_one(vec x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    const vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const vec rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec series = rest * (1.0f / 5040.0f) + (1.0f / 720.0f);
    series = series * rest + (1.0f / 120.0f);
    series = series * rest + (1.0f / 24.0f);
    series = series * rest + (1.0f / 6.0f);
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest;
    const vec power = as_bits<vec>((__builtin_convertvector(whole, ivec) + 127) << 23);
    return series * power + (power - 1.0f);
}

INLINE vec reciprocal_root(vec value) {
#if defined(__AVX512F__)
    const vec guess = (vec)_mm512_rsqrt14_ps((__m512)value);
    return guess + guess * (0.5f - 0.5f * value * guess * guess);
#else
    float lanes[LANES];
    store(lanes, value);
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = 1.0f / std::sqrt(lanes[lane]);
    return load(lanes);
#endif
}

// Gates a, v: the scan itself.
struct Plain {
    static constexpr int GATES = 2;
    static constexpr bool BIASED = false, RATED = false;

    static INLINE vec forward(const vec *gate, vec, vec hidden) {
        return gate[0] * hidden + gate[1];
    }

    // Gradients by the gates; returns the previous hidden state's.
    static INLINE vec backward(const vec *gate, vec, vec hidden, vec grad, vec *gradient, vec &) {
        gradient[0] = grad * hidden;
        gradient[1] = grad;
        return grad * gate[0];
    }
};

// Gates z, n.
struct MinGru {
    static constexpr int GATES = 2;
    static constexpr bool BIASED = true, RATED = false;

    static INLINE vec forward(const vec *gate, vec, vec hidden) {
        return hidden + sigmoid(gate[0]) * (gate[1] - hidden);
    }

    static INLINE vec backward(const vec *gate, vec, vec hidden, vec grad, vec *gradient, vec &) {
        const vec z = sigmoid(gate[0]);
        gradient[0] = grad * (gate[1] - hidden) * z * (1.0f - z);
        gradient[1] = grad * z;
        return grad * (1.0f - z);
    }
};

// Gates f, i, n. With F = exp(-f) and I = exp(-i), f / (f + i) = (1 + I) / (2 + F + I).
struct MinLstm {
    static constexpr int GATES = 3;
    static constexpr bool BIASED = true, RATED = false;

    static INLINE vec forward(const vec *gate, vec, vec hidden) {
        const vec f = exponential(at_most(-gate[0], LARGEST_EXPONENT));
        const vec i = exponential(at_most(-gate[1], LARGEST_EXPONENT));
        const vec fresh = (1.0f + f) * reciprocal(2.0f + f + i);
        return hidden + fresh * (gate[2] - hidden);
    }

    static INLINE vec backward(const vec *gate, vec, vec hidden, vec grad, vec *gradient, vec &) {
        const vec f = exponential(at_most(-gate[0], LARGEST_EXPONENT));
        const vec i = exponential(at_most(-gate[1], LARGEST_EXPONENT));
        const vec scale = reciprocal(2.0f + f + i);
        const vec kept = (1.0f + i) * scale, fresh = (1.0f + f) * scale;
        const vec grad_kept = grad * (hidden - gate[2]);
        gradient[0] = grad_kept * kept * f * scale;
        gradient[1] = -grad_kept * fresh * i * scale;
        gradient[2] = grad * fresh;
        return grad * kept;
    }
};

// Gates r, i, u. With m = a - 1, which keeps its digits, 1 - a^2 = -m (2 + m).
struct RgLru {
    static constexpr int GATES = 3;
    static constexpr bool BIASED = true, RATED = true;

    static INLINE vec forward(const vec *gate, vec rate, vec hidden) {
        const vec less = exponential_less_one(-rate * sigmoid(gate[0]));
        const vec square = at_least(-less * (2.0f + less));
        return (1.0f + less) * hidden + square * reciprocal_root(square) * sigmoid(gate[1]) * gate[2];
    }

    static INLINE vec backward(const vec *gate, vec rate, vec hidden, vec grad, vec *gradient, vec &grad_rate) {
        const vec r = sigmoid(gate[0]), i = sigmoid(gate[1]);
        const vec less = exponential_less_one(-rate * r), decay = 1.0f + less;
        const vec square = at_least(-less * (2.0f + less));
        const vec inverse_gain = reciprocal_root(square);
        const vec grad_value = grad * square * inverse_gain;
        const vec grad_exponent = grad * decay * (decay * inverse_gain * i * gate[2] - hidden);
        gradient[0] = grad_exponent * rate * r * (1.0f - r);
        gradient[1] = grad_value * gate[2] * i * (1.0f - i);
        gradient[2] = grad_value * i;
        grad_rate += grad_exponent * r;
        return grad * decay;
    }

  private:
    static INLINE vec at_least(vec square) {
        return square < SMALLEST_SQUARE ? splat(SMALLEST_SQUARE) : square;
    }
};

constexpr int MOST_GATES = 3;

struct Sizes {
    int64_t rows, steps, width;
};

// A tensor [rows, steps, ...] a gate, at a distance of `stride` numbers from one step to the next.
struct Blocks {
    void *const *first;
    int64_t stride;

    template <class T>
    T *at(int gate, int64_t position, int64_t unit) const {
        return static_cast<T *>(first[gate]) + position * stride + unit;
    }
};

template <class Cell>
INLINE vec load_rate(const float *rate, int64_t unit, int count) {
    return Cell::RATED ? load(rate + unit, count) : vec{};
}

template <class Cell, class In>
INLINE void load_gates(vec *gate, Blocks gates, const float *bias, int64_t width, int64_t at, int64_t unit, int count) {
    for (int index = 0; index < Cell::GATES; ++index) {
        gate[index] = load(gates.at<const In>(index, at, unit), count);
        if (Cell::BIASED) gate[index] += load(bias + index * width + unit, count);
    }
}

// A row's next step, which the processor does not guess, since its gates end in between: a fifth to a third of the time.
template <class T>
INLINE void expect(const T *address) {
    __builtin_prefetch(address);
}

template <class T>
INLINE void expect_write(T *address) {
    __builtin_prefetch(address, 1);
}

INLINE void add(float *to, vec value, int count) {
    store(to, load(to, count) + value, count);
}

// Whole vectors first, so that they are compiled for a whole one, then the rest of the units.
template <class Step>
INLINE void each_vector(int64_t first, int64_t stop, Step step) {
    int64_t unit = first;
    for (; unit + LANES <= stop; unit += LANES) step(unit, LANES);
    if (unit < stop) step(unit, static_cast<int>(stop - unit));
}

struct Forward {
    Sizes sizes;
    Blocks gates;
    const float *bias, *rate, *initial;
    const uint8_t *reset;
    void *outputs;
    float *last;

    template <class Cell, class In, class Out>
    void run(int64_t row, int64_t first, int64_t stop) const {
        float *hidden = last + row * sizes.width;
        std::copy(initial + row * sizes.width + first, initial + row * sizes.width + stop, hidden + first);
        for (int64_t at = row * sizes.steps; at < (row + 1) * sizes.steps; ++at) {
            if (reset && reset[at]) std::fill(hidden + first, hidden + stop, 0.0f);
            each_vector(first, stop, [&](int64_t unit, int count) __attribute__((always_inline)) {
                step<Cell, In, Out>(hidden, at, unit, count);
            });
        }
    }

  private:
    template <class Cell, class In, class Out>
    INLINE void step(float *hidden, int64_t at, int64_t unit, int count) const {
        vec gate[MOST_GATES];
        load_gates<Cell, In>(gate, gates, bias, sizes.width, at, unit, count);
        for (int index = 0; index < Cell::GATES; ++index) expect(gates.at<const In>(index, at + 1, unit));
        expect_write(static_cast<Out *>(outputs) + (at + 1) * sizes.width + unit);
        const vec next = Cell::forward(gate, load_rate<Cell>(rate, unit, count), load(hidden + unit, count));
        store(hidden + unit, next, count);
        store(static_cast<Out *>(outputs) + at * sizes.width + unit, next, count);
    }
};

struct Backward {
    Sizes sizes;
    Blocks gates;
    const float *bias, *rate, *initial;
    const uint8_t *reset;
    const void *outputs, *grad_outputs;
    Blocks grad_gates;
    // One row each of sums over time; `carried` holds the last state's gradients first and the initial one's in the end.
    float *grad_bias, *grad_rate, *carried;

    template <class Cell, class In, class Out>
    void run(int64_t row, int64_t first, int64_t stop) const {
        for (int64_t at = (row + 1) * sizes.steps - 1; at >= row * sizes.steps; --at)
            each_vector(first, stop, [&](int64_t unit, int count) __attribute__((always_inline)) {
                step<Cell, In, Out>(row, at, unit, count);
            });
    }

  private:
    template <class Cell, class In, class Out>
    INLINE void step(int64_t row, int64_t at, int64_t unit, int count) const {
        const bool fresh = reset && reset[at];
        const int64_t width = sizes.width;
        vec gate[MOST_GATES], gradient[MOST_GATES], rate_gradient = {};
        load_gates<Cell, In>(gate, gates, bias, width, at, unit, count);
        for (int index = 0; index < Cell::GATES; ++index) {
            expect(gates.at<const In>(index, at - 1, unit));
            expect_write(grad_gates.at<In>(index, at - 1, unit));
        }
        expect(static_cast<const Out *>(outputs) + (at - 2) * width + unit);
        expect(static_cast<const Out *>(grad_outputs) + (at - 1) * width + unit);
        const vec hidden = fresh ? vec{} : previous<Out>(row, at, unit, count);
        float *passed = carried + row * width + unit;
        const vec grad = load(static_cast<const Out *>(grad_outputs) + at * width + unit, count) + load(passed, count);
        const vec back =
            Cell::backward(gate, load_rate<Cell>(rate, unit, count), hidden, grad, gradient, rate_gradient);
        store(passed, fresh ? vec{} : back, count);
        if (Cell::RATED) add(grad_rate + row * width + unit, rate_gradient, count);
        for (int index = 0; index < Cell::GATES; ++index) {
            store(grad_gates.at<In>(index, at, unit), gradient[index], count);
            if (Cell::BIASED) add(grad_bias + (row * Cell::GATES + index) * width + unit, gradient[index], count);
        }
    }

    template <class Out>
    INLINE vec previous(int64_t row, int64_t at, int64_t unit, int count) const {
        if (at == row * sizes.steps) return load(initial + row * sizes.width + unit, count);
        return load(static_cast<const Out *>(outputs) + (at - 1) * sizes.width + unit, count);
    }
};

// Whole rows where there is one for every thread, else pieces of rows.
template <class Cell, class In, class Out, class Pass>
void spread(const Pass &pass, int threads) {
    const int64_t vectors = (pass.sizes.width + LANES - 1) / LANES;
    const int64_t wanted = pass.sizes.rows ? (threads + pass.sizes.rows - 1) / pass.sizes.rows : 1;
    const int64_t pieces = std::min(wanted, vectors);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t item = 0; item < pass.sizes.rows * pieces; ++item) {
        const int64_t piece = item % pieces;
        const int64_t first = vectors * piece / pieces * LANES, stop = vectors * (piece + 1) / pieces * LANES;
        pass.template run<Cell, In, Out>(item / pieces, first, std::min(stop, pass.sizes.width));
    }
}

template <class Pass>
void choose(const Pass &pass, int cell, int is_bf16, int threads) {
    switch (cell * 2 + is_bf16) {
        case 0: return spread<Plain, float, float>(pass, threads);
        case 1: return spread<Plain, bf16, float>(pass, threads);
        case 2: return spread<MinGru, float, float>(pass, threads);
        case 3: return spread<MinGru, bf16, bf16>(pass, threads);
        case 4: return spread<MinLstm, float, float>(pass, threads);
        case 5: return spread<MinLstm, bf16, bf16>(pass, threads);
        case 6: return spread<RgLru, float, float>(pass, threads);
        case 7: return spread<RgLru, bf16, bf16>(pass, threads);
    }
}

}  // namespace

// cell: 0 the scan itself, 1 minGRU, 2 minLSTM, 3 RG-LRU. Gates are fp32 or bf16, outputs in the same format (the scan's
// own always in fp32), everything else in fp32. `reset` may be null; so may what the cell does not have.
extern "C" void reprise_scan_forward(
    int cell, int is_bf16, int threads, int64_t rows, int64_t steps, int64_t width, void *const *gates, int64_t stride,
    const float *bias, const float *rate, const float *initial, const uint8_t *reset, void *outputs, float *last
) {
    choose(
        Forward{{rows, steps, width}, {gates, stride}, bias, rate, initial, reset, outputs, last}, cell, is_bf16,
        usable_threads(threads)
    );
}

extern "C" void reprise_scan_backward(
    int cell, int is_bf16, int threads, int64_t rows, int64_t steps, int64_t width, void *const *gates, int64_t stride,
    const float *bias, const float *rate, const float *initial, const uint8_t *reset, const void *outputs,
    const void *grad_outputs, void *const *grad_gates, float *grad_bias, float *grad_rate, float *carried
) {
    const Blocks grads{grad_gates, stride};
    choose(
        Backward{
            {rows, steps, width}, {gates, stride}, bias, rate, initial, reset, outputs, grad_outputs, grads, grad_bias,
            grad_rate, carried
        },
        cell, is_bf16, usable_threads(threads)
    );
}
