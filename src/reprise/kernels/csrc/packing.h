// The recurrent weight, laid out for the products of both passes (products.h) once a window.
#pragma once

#include "window.h"

namespace {

// One unit's weights of one gate for the units of a head, zeros where it hears nothing.
template <class T, class Cell>
void read_row(const Window &window, const Shape<T, Cell> &shape, int gate, int unit, int first_input, float *row) {
    std::memset(row, 0, shape.head * sizeof(float));
    if (unit >= shape.width) return;
    const float *weights = window.weight + (static_cast<size_t>(gate) * shape.width + unit) * shape.unit_inputs;
    std::memcpy(row + shape.heard_by(unit).first - first_input, weights, shape.unit_inputs * sizeof(float));
}

// Outputs are the gates of a panel's units, inputs the hidden units of their head.
template <class T, class Cell>
void pack_panel(const Window &window, const Shape<T, Cell> &shape, int panel, T *to) {
    // A word is what a lane reads at once: an fp32 number, or two of bf16.
    constexpr int per_word = PAIRED<T>;
    const int first = panel * LANES, num_words = shape.head / per_word;
    std::vector<float> row(shape.head);
    std::vector<T> rows(static_cast<size_t>(LANES) * shape.head);
    for (int gate = 0; gate < Cell::GATES; ++gate) {
        for (int lane = 0; lane < LANES; ++lane) {
            read_row(window, shape, gate, first + lane, shape.first_unit_of_head(first), row.data());
            T *own = rows.data() + static_cast<size_t>(lane) * shape.head;
            for (int input = 0; input < shape.head; input += LANES) store(own + input, load(row.data() + input));
        }
        for (int word = 0; word < num_words; ++word)
            for (int lane = 0; lane < LANES; ++lane)
                std::memcpy(
                    to + packed_index<T, Cell::GATES>(static_cast<size_t>(word) * per_word, gate, lane),
                    rows.data() + static_cast<size_t>(lane) * shape.head + word * per_word, sizeof(uint32_t));
    }
}

// Sixteen columns of one unit's weights of one gate, from hidden unit `first` on.
template <class T, class Cell>
INLINE vec read_columns(const Window &window, const Shape<T, Cell> &shape, int gate, int unit, int first) {
    if (unit >= shape.width) return vec{};
    const Range heard = shape.heard_by(unit);
    const float *weights = window.weight + (static_cast<size_t>(gate) * shape.width + unit) * shape.unit_inputs;
    if (heard.first <= first && first + LANES <= heard.last) return load(weights + first - heard.first);
    float lanes[LANES] = {};
    for (int lane = 0; lane < LANES; ++lane)
        if (heard.first <= first + lane && first + lane < heard.last) lanes[lane] = weights[first + lane - heard.first];
    return load(static_cast<const float *>(lanes));
}

INLINE void store_pair(float *to, size_t stride, vec even, vec odd) {
    store(to, even);
    store(to + stride, odd);
}

// Numbers of two rows side by side in a word.
INLINE void store_pair(bf16 *to, size_t, vec even, vec odd) {
    halves both[2];
    bf16 lanes[2 * LANES];
    store(lanes, even);
    store(lanes + LANES, odd);
    std::memcpy(both, lanes, sizeof both);
    const uvec words = __builtin_convertvector(both[0], uvec) | __builtin_convertvector(both[1], uvec) << 16;
    std::memcpy(to, &words, sizeof words);
}

// The transposed weight: outputs are a slice's hidden units, inputs the gates of all units of their head.
template <class T, class Cell>
void pack_transposed(const Window &window, const Shape<T, Cell> &shape, int slice, T *to) {
    const int first = slice * SLICE, first_unit = shape.first_unit_of_head(first);
    for (int gate = 0; gate < Cell::GATES; ++gate)
        for (int unit = 0; unit < shape.head; unit += 2)
            for (int half = 0; half < 2; ++half) {
                const int column = first + half * LANES;
                const size_t input = static_cast<size_t>(gate) * shape.head + unit;
                store_pair(
                    to + packed_index<T, 2>(input, half, 0), packed_index<T, 2>(1, 0, 0),
                    read_columns(window, shape, gate, first_unit + unit, column),
                    read_columns(window, shape, gate, first_unit + unit + 1, column));
            }
}

}  // namespace
