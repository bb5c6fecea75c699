// The gates of one row and sixteen units: a step forward, and back. Equations: kernels/reference.py.
//
// GATES       products a unit takes from the previous hidden state, in the order of the weights
// GRADIENTS   blocks of a row's gate gradients; the recurrent product reads GATES of them from RECURRENT_BLOCK on
// KEPT        vectors that backward reads again; the cell state, where there is one, lies at CELL
#pragma once

#include "vectors.h"

struct Coupled {
    static constexpr int GATES = 3, GRADIENTS = 3, RECURRENT_BLOCK = 0, KEPT = 4, CELL = 3;

    // o, f, z
    static INLINE vec forward(const vec *product, const vec *drive, vec, vec cell, vec, vec *kept) {
        kept[0] = sigmoid(product[0] + drive[0]);
        kept[1] = sigmoid(product[1] + drive[1]);
        kept[2] = hyperbolic_tangent(product[2] + drive[2]);
        kept[CELL] = kept[2] + kept[1] * (cell - kept[2]);
        return kept[0] * hyperbolic_tangent(kept[CELL]);
    }

    // Gradients by the sums inside the gates; `carried` is the cell's, before and after.
    static INLINE vec backward(vec update, const vec *kept, vec, vec cell, vec *gradient, vec &carried) {
        const vec squashed = hyperbolic_tangent(kept[CELL]);
        carried += update * kept[0] * (1.0f - squashed * squashed);
        gradient[0] = update * squashed * kept[0] * (1.0f - kept[0]);
        gradient[1] = carried * (cell - kept[2]) * kept[1] * (1.0f - kept[1]);
        gradient[2] = carried * (1.0f - kept[1]) * (1.0f - kept[2] * kept[2]);
        carried *= kept[1];
        return vec{};
    }
};

struct Textbook {
    static constexpr int GATES = 4, GRADIENTS = 4, RECURRENT_BLOCK = 0, KEPT = 5, CELL = 4;

    // o, f, i, z
    static INLINE vec forward(const vec *product, const vec *drive, vec, vec cell, vec, vec *kept) {
        for (int gate = 0; gate < 3; ++gate) kept[gate] = sigmoid(product[gate] + drive[gate]);
        kept[3] = hyperbolic_tangent(product[3] + drive[3]);
        kept[CELL] = kept[1] * cell + kept[2] * kept[3];
        return kept[0] * hyperbolic_tangent(kept[CELL]);
    }

    static INLINE vec backward(vec update, const vec *kept, vec, vec cell, vec *gradient, vec &carried) {
        const vec squashed = hyperbolic_tangent(kept[CELL]);
        carried += update * kept[0] * (1.0f - squashed * squashed);
        gradient[0] = update * squashed * kept[0] * (1.0f - kept[0]);
        gradient[1] = carried * cell * kept[1] * (1.0f - kept[1]);
        gradient[2] = carried * kept[3] * kept[2] * (1.0f - kept[2]);
        gradient[3] = carried * kept[2] * (1.0f - kept[3] * kept[3]);
        carried *= kept[1];
        return vec{};
    }
};

// Gates r, z, n of the recurrent product, n, r, z of the input's. The gradients' blocks are n, r, z, c, where c is what the
// reset gate multiplies: the input's product has the first three, the recurrent one the last three, both without a copy.
struct Gru {
    static constexpr int GATES = 3, GRADIENTS = 4, RECURRENT_BLOCK = 1, KEPT = 4, CELL = -1;

    static INLINE vec forward(const vec *product, const vec *drive, vec hidden, vec, vec candidate_bias, vec *kept) {
        kept[0] = sigmoid(product[0] + drive[1]);
        kept[1] = sigmoid(product[1] + drive[2]);
        kept[3] = product[2] + candidate_bias;
        kept[2] = hyperbolic_tangent(drive[0] + kept[0] * kept[3]);
        return kept[2] + kept[1] * (hidden - kept[2]);
    }

    // Returns what reaches the previous hidden state around the products.
    static INLINE vec backward(vec update, const vec *kept, vec hidden, vec, vec *gradient, vec &) {
        gradient[0] = update * (1.0f - kept[1]) * (1.0f - kept[2] * kept[2]);
        gradient[1] = gradient[0] * kept[3] * kept[0] * (1.0f - kept[0]);
        gradient[2] = update * (hidden - kept[2]) * kept[1] * (1.0f - kept[1]);
        gradient[3] = gradient[0] * kept[0];
        return update * kept[1];
    }
};
