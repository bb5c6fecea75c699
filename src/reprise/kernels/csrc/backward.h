// A window backward, from the last step to the first: gradients of the gates' sums, of the state and of what is summed
// over all steps. Those of the weights are one large product over all steps, and a library's.
#pragma once

#include "packing.h"
#include "window.h"

namespace {

template <class T, class Cell>
class Backward : Pass<T, Cell> {
    using Base = Pass<T, Cell>;
    using Base::barrier, Base::is_reset, Base::kept_at, Base::shape, Base::statistic, Base::window;
    // Sums over rows and steps, a panel: gradients of the gates' biases, of a diagonal weight, of norm and skip.
    static constexpr int WEIGHT_SUMS = Cell::GRADIENTS, OTHER_SUMS = WEIGHT_SUMS + Cell::GATES, SUMS = OTHER_SUMS + 3;

  public:
    Backward(const Window &window, const Shape<T, Cell> &shape)
        : Base(window, shape), operand_stride(static_cast<size_t>(Cell::GATES) * shape.padded),
          operand_size((shape.rows + ROW_CHUNK) * operand_stride),
          panel_size(static_cast<size_t>(SLICE) * Cell::GATES * shape.head),
          operands(zeros<T>(shape.diagonal ? 1 : 2 * operand_size)),
          hidden(zeros<float>(static_cast<size_t>(shape.rows) * shape.padded)),
          cells(zeros<float>(static_cast<size_t>(shape.rows) * shape.padded)),
          packed(room<T>(shape.diagonal ? 1 : shape.slices * panel_size)) {}

    void run(int thread, int num_threads) {
#pragma omp single
        barrier.set_size(num_threads);
        [[maybe_unused]] const TileThread tiles{};
        const Range slices = share(shape.slices, thread, num_threads);
        const Range panels = {slices.first * 2, slices.last * 2};
        std::vector<float> means(shape.row_stride), products(shape.row_stride);
        std::vector<vec> sums(static_cast<size_t>(panels.last - panels.first) * SUMS, vec{});
        auto sums_of = [&](int panel) { return sums.data() + static_cast<size_t>(panel - panels.first) * SUMS; };
        for (int slice = slices.first; slice < slices.last && !shape.diagonal; ++slice)
            pack_transposed<T, Cell>(window, shape, slice, packed.get() + slice * panel_size);
        for (int panel = panels.first; panel < panels.last; ++panel)
            for (int row = 0; row < shape.rows; ++row) begin(panel, row);
        for (int step = shape.steps - 1; step >= 0; --step) {
            for (int slice = slices.first; slice < slices.last; ++slice)
                receive(step, slice, sums_of(2 * slice), sums_of(2 * slice + 1));
            if (shape.norm) {
                barrier.meet();
                combine(step, means.data(), products.data());
            }
            for (int slice = slices.first; slice < slices.last; ++slice)
                gates(step, slice, means.data(), products.data(), sums_of(2 * slice));
            if (shape.diagonal) continue;
            barrier.meet();
            for (int slice = slices.first; slice < slices.last; ++slice) pass_back(step, slice);
        }
        for (int panel = panels.first; panel < panels.last; ++panel) end(panel, sums_of(panel));
    }

  private:
    void begin(int panel, int row) {
        const size_t from = static_cast<size_t>(row) * shape.width + panel * LANES;
        const size_t to = shape.local_at(panel, row);
        const int lanes = shape.lanes(panel);
        store(hidden.get() + to, load(window.grad_last_hidden + from, lanes));
        if constexpr (Cell::CELL >= 0) store(cells.get() + to, load(window.grad_last_cell + from, lanes));
    }

    // The whole gradient of a step's hidden state, and what the norm needs to know of all its units.
    void receive(int step, int slice, vec *left_sums, vec *right_sums) {
        float *totals = statistic(step, 0, slice), *products = statistic(step, 1, slice);
        const T *output = static_cast<const T *>(window.grad_output);
        vec *sums[2] = {left_sums, right_sums};
        for (int row = 0; row < shape.rows; ++row) {
            vec total = {}, product = {};
            for (int half = 0; half < 2; ++half) {
                const int panel = 2 * slice + half, first = panel * LANES, lanes = shape.lanes(panel);
                const T *from = output + (static_cast<size_t>(row) * shape.steps + step) * shape.width + first;
                float *at = hidden.get() + shape.local_at(panel, row);
                const vec gradient = load(at) + load(from, lanes);
                __builtin_prefetch(from - shape.width);
                store(at, gradient);
                if (!shape.norm) continue;
                const vec normed = load(kept_at(step, panel, row) + Cell::KEPT * SLICE, lanes);
                const vec scaled = gradient * load(window.norm_scale + first, lanes);
                total += scaled;
                product += scaled * normed;
                sums[half][OTHER_SUMS] += gradient * normed;
                sums[half][OTHER_SUMS + 1] += gradient;
            }
            if (!shape.norm) continue;
            totals[row] = sum(total);
            products[row] = sum(product);
        }
    }

    void combine(int step, float *means, float *products) {
        const float share_of_unit = 1.0f / shape.width;
        for (int row = 0; row < shape.rows; row += LANES) {
            vec total = {}, product = {};
            for (int slice = 0; slice < shape.slices; ++slice) {
                total += load(statistic(step, 0, slice) + row);
                product += load(statistic(step, 1, slice) + row);
            }
            store(means + row, total * share_of_unit);
            store(products + row, product * share_of_unit);
        }
    }

    void gates(int step, int slice, const float *means, const float *products, vec *sums) {
        for (int row = 0; row < shape.rows; row += ROWS_AHEAD) {
            const int last = row + ROWS_AHEAD < shape.rows ? row + ROWS_AHEAD : shape.rows;
            for (int half = 0; half < 2; ++half)
                gates_of_rows(step, 2 * slice + half, {row, last}, means, products, sums + half * SUMS);
        }
    }

    INLINE void gates_of_rows(
        int step, int panel, Range rows, const float *means, const float *products, vec *sums) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        const vec scale = shape.norm ? load(window.norm_scale + first, lanes) : vec{};
        const vec skip = window.skip_scale ? load(window.skip_scale + first, lanes) : vec{};
        vec weights[Cell::GATES] = {};
        if (shape.diagonal)
            for (int gate = 0; gate < Cell::GATES; ++gate)
                weights[gate] = load(window.weight + static_cast<size_t>(gate) * shape.width + first, lanes);
        // In registers: stores between would make the processor add in memory.
        vec totals[SUMS];
        for (int index = 0; index < SUMS; ++index) totals[index] = sums[index];
        for (int row = rows.first; row < rows.last; ++row) {
            float *at = hidden.get() + shape.local_at(panel, row);
            vec update = load(at);
            if (shape.norm) {
                const vec normed = load(kept_at(step, panel, row) + Cell::KEPT * SLICE);
                const float inverse = window.inverse_deviation[static_cast<size_t>(step) * shape.rows + row];
                update = inverse * (update * scale - means[row] - normed * products[row]);
            }
            store(at, gate(step, panel, row, update, skip, weights, totals));
        }
        for (int index = 0; index < SUMS; ++index) sums[index] = totals[index];
    }

    // One row of a panel from its update's gradient to the gates'; returns what reaches the previous hidden state here.
    INLINE vec gate(int step, int panel, int row, vec update, vec skip, const vec *weights, vec *sums) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        const size_t position = static_cast<size_t>(row) * shape.steps + step;
        const T *from = kept_at(step, panel, row);
        const bool anew = is_reset(row, step);
        vec kept[Cell::KEPT], gradient[Cell::GRADIENTS], cell = {}, carried = {};
        for (int index = 0; index < Cell::KEPT; ++index) kept[index] = load(from + index * SLICE);
        const vec before = load(static_cast<const T *>(window.previous) + position * shape.width + first, lanes);
        float *cell_at = cells.get() + shape.local_at(panel, row);
        if constexpr (Cell::CELL >= 0) {
            carried = load(cell_at);
            if (!anew)
                cell = step > 0 ? load(from - shape.step_size() + Cell::CELL * SLICE)
                                : load(window.cell + static_cast<size_t>(row) * shape.width + first, lanes);
        }
        vec direct = Cell::backward(update, kept, before, cell, gradient, carried);
        if constexpr (Cell::CELL >= 0) store(cell_at, anew ? vec{} : carried);
        if (window.skip_scale) {
            direct += skip * update;
            sums[OTHER_SUMS + 2] += update * before;
        }
        T *drive = static_cast<T *>(window.grad_drive) + position * Cell::GRADIENTS * shape.width + first;
        for (int block = 0; block < Cell::GRADIENTS; ++block) {
            store(drive + static_cast<size_t>(block) * shape.width, gradient[block], lanes);
            sums[block] += gradient[block];
        }
        const vec *recurrent = gradient + Cell::RECURRENT_BLOCK;
        if (shape.diagonal) {
            for (int gate = 0; gate < Cell::GATES; ++gate) {
                direct += recurrent[gate] * weights[gate];
                sums[WEIGHT_SUMS + gate] += recurrent[gate] * before;
            }
        } else {
            // Of a head all units of a gate lie together, and the gates one after another.
            const int start = shape.first_unit_of_head(first);
            T *operand = operands.get() + (step & 1) * operand_size + row * operand_stride +
                         static_cast<size_t>(start) * Cell::GATES + (first - start);
            for (int gate = 0; gate < Cell::GATES; ++gate)
                store(operand + static_cast<size_t>(gate) * shape.head, recurrent[gate]);
        }
        return anew ? vec{} : direct;
    }

    // Through the recurrent product to the previous hidden state of a slice.
    void pass_back(int step, int slice) {
        alignas(64) float sums[ROW_CHUNK * SLICE];
        const int first = slice * SLICE;
        const T *operand = operands.get() + (step & 1) * operand_size +
                           static_cast<size_t>(shape.first_unit_of_head(first)) * Cell::GATES;
        for (int row = 0; row < shape.rows; row += ROW_CHUNK) {
            const int count = shape.rows - row < ROW_CHUNK ? shape.rows - row : ROW_CHUNK;
            multiply<T, 2>(
                operand + row * operand_stride, operand_stride, count, packed.get() + slice * panel_size,
                static_cast<size_t>(Cell::GATES) * shape.head, sums);
            for (int index = 0; index < count; ++index) {
                if (is_reset(row + index, step)) continue;
                float *at = hidden.get() + shape.local_at(2 * slice, row + index);
                store(at, load(at) + load(sums + index * SLICE));
                store(at + LANES, load(at + LANES) + load(sums + index * SLICE + LANES));
            }
        }
    }

    void end(int panel, const vec *sums) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        for (int row = 0; row < shape.rows; ++row) {
            const size_t from = shape.local_at(panel, row);
            const size_t to = static_cast<size_t>(row) * shape.width + first;
            store(window.grad_hidden + to, load(hidden.get() + from), lanes);
            if constexpr (Cell::CELL >= 0) store(window.grad_cell + to, load(cells.get() + from), lanes);
        }
        for (int block = 0; block < Cell::GRADIENTS; ++block)
            store(window.grad_bias + static_cast<size_t>(block) * shape.width + first, sums[block], lanes);
        if (shape.diagonal)
            for (int gate = 0; gate < Cell::GATES; ++gate)
                store(
                    window.grad_weight + static_cast<size_t>(gate) * shape.width + first, sums[WEIGHT_SUMS + gate],
                    lanes);
        float *others[3] = {window.grad_norm_scale, window.grad_norm_shift, window.grad_skip_scale};
        for (int index = 0; index < 3; ++index)
            if (others[index]) store(others[index] + first, sums[OTHER_SUMS + index], lanes);
    }

    const size_t operand_stride, operand_size, panel_size;
    Buffer<T> operands;
    Buffer<float> hidden, cells;
    Buffer<T> packed;
};

}  // namespace
