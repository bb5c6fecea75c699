// A window of an LSTM or GRU as its caller hands it over, the sizes both passes need, and what their threads share.
//
// Memory: drive, outputs and gradients are [B][T][..] as the caller has them. `kept`, what backward reads again, is
// [T][slice][B][vector][unit], in the order in which both passes walk, in the products' format; the state itself stays in
// fp32. Operands of products are small copies of one step. A slice is two panels, and in bf16 one line of the cache: rows
// of a window lie so far apart, often by a power of two, that a line touched twice would be fetched twice.
//
// Legend: B rows, T time steps, D width, K inputs of a unit's recurrent product, G gates.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "cells.h"
#include "products.h"
#include "team.h"

extern "C" {

// One window. The same layout as `cpu_window._Window`. Pointers that a pass does not use, and switches that are off, are
// null.
struct Window {
    int64_t num_rows, num_steps, width, num_inputs, num_threads;
    const void *drive;          // [B][T][G D]
    const float *weight;        // [G D][K]
    const float *bias;          // [G D]
    const float *candidate_bias;  // [D], GRU
    const float *norm_scale, *norm_shift, *skip_scale;  // [D]
    float norm_epsilon;
    const uint8_t *reset;       // [B][T]
    const float *hidden, *cell;  // [B][D]
    void *output;               // [B][T][D]
    void *previous;             // [B][T][D], the hidden state that each position read
    float *last_hidden, *last_cell;  // [B][D]
    void *kept;                 // [T][slices][B][KEPT, one more with a norm][SLICE]
    float *inverse_deviation;   // [T][B]
    const void *grad_output;    // [B][T][D]
    const float *grad_last_hidden, *grad_last_cell;  // [B][D]
    void *grad_drive;           // [B][T][GRADIENTS D]
    float *grad_hidden, *grad_cell;  // [B][D]
    float *grad_bias;           // [GRADIENTS D]
    float *grad_norm_scale, *grad_norm_shift, *grad_skip_scale;  // [D]
    float *grad_weight;         // [G D], diagonal only
};
}

namespace {

constexpr int SLICE = 2 * LANES;
constexpr int ROW_CHUNK = 32;
constexpr int ROWS_AHEAD = 4;

struct Deleter {
    void operator()(void *memory) const {
        ::operator delete[](memory, std::align_val_t(64));
    }
};

template <class T>
using Buffer = std::unique_ptr<T[], Deleter>;

// For what is written whole before it is read.
template <class T>
Buffer<T> room(size_t count) {
    return Buffer<T>(static_cast<T *>(::operator new[](count * sizeof(T), std::align_val_t(64))));
}

// Where there is padding, which must not hold what a product could turn into NaN.
template <class T>
Buffer<T> zeros(size_t count) {
    Buffer<T> memory = room<T>(count);
    std::memset(static_cast<void *>(memory.get()), 0, count * sizeof(T));
    return memory;
}

// Sizes that both passes need.
template <class T, class Cell>
struct Shape {
    explicit Shape(const Window &window)
        : rows(window.num_rows), steps(window.num_steps), width(window.width), unit_inputs(window.num_inputs),
          padded(round_up(width, SLICE)), panels(padded / LANES), slices(padded / SLICE),
          row_stride(round_up(rows, LANES)), diagonal(unit_inputs == 1 && width != 1),
          blocks(!diagonal && unit_inputs < width && unit_inputs % SLICE == 0),
          head(blocks ? unit_inputs : padded), norm(window.norm_scale != nullptr),
          vectors(Cell::KEPT + (norm ? 1 : 0)) {}

    const int rows, steps, width, unit_inputs;
    const int padded, panels, slices, row_stride;
    const bool diagonal;
    // Heads are multiplied one by one where a slice never spans two; else as one matrix with zeros between heads.
    const bool blocks;
    const int head;
    const bool norm;
    const int vectors;

    int first_unit_of_head(int unit) const {
        return blocks ? unit / head * head : 0;
    }
    int lanes(int panel) const {
        const int left = width - panel * LANES;
        return left < 0 ? 0 : left < LANES ? left : LANES;
    }
    // The first of a row's vectors for a panel; they lie SLICE apart.
    size_t kept_at(int step, int panel, int row) const {
        const size_t record = (static_cast<size_t>(step) * slices + panel / 2) * rows + row;
        return record * vectors * SLICE + panel % 2 * LANES;
    }
    size_t step_size() const {
        return static_cast<size_t>(slices) * rows * vectors * SLICE;
    }
    // Where a step's own fp32 copy of the units of a panel lies: [slice][row][unit].
    size_t local_at(int panel, int row) const {
        return (static_cast<size_t>(panel / 2) * rows + row) * SLICE + panel % 2 * LANES;
    }
    // Which units `unit` hears from, of any gate: the row of the weight begins with the first of them.
    Range heard_by(int unit) const {
        const int first = unit / unit_inputs * unit_inputs;
        return {first, first + unit_inputs};
    }
};

// What the threads of one pass share and each thread's place among them.
template <class T, class Cell>
class Pass {
  protected:
    Pass(const Window &window, const Shape<T, Cell> &shape) : window(window), shape(shape) {
        statistics = zeros<float>(2ul * 2 * shape.slices * shape.row_stride);
    }

    INLINE bool is_reset(int row, int step) const {
        return window.reset != nullptr && window.reset[static_cast<size_t>(row) * shape.steps + step];
    }

    INLINE T *kept_at(int step, int panel, int row) const {
        return static_cast<T *>(window.kept) + shape.kept_at(step, panel, row);
    }

    // Two numbers a slice and row; two sets in turn, so that no barrier is needed between reading one and writing the next.
    float *statistic(int step, int which, int slice) {
        return statistics.get() + ((static_cast<size_t>(step & 1) * 2 + which) * shape.slices + slice) * shape.row_stride;
    }

    const Window &window;
    const Shape<T, Cell> &shape;
    Barrier barrier;
    Buffer<float> statistics;
};

}  // namespace
