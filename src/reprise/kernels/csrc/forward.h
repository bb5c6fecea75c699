// A window forward: every step's recurrent product, gates, norm and skip, the threads side by side.
#pragma once

#include "packing.h"
#include "window.h"

namespace {

template <class T, class Cell>
class Forward : Pass<T, Cell> {
    using Base = Pass<T, Cell>;
    using Base::barrier, Base::is_reset, Base::kept_at, Base::shape, Base::statistic, Base::window;

  public:
    Forward(const Window &window, const Shape<T, Cell> &shape)
        : Base(window, shape), operand_size((shape.rows + ROW_CHUNK) * static_cast<size_t>(shape.padded)),
          panel_size(static_cast<size_t>(Cell::GATES) * LANES * (shape.diagonal ? 1 : shape.head)),
          operands(zeros<T>(2 * operand_size)), hidden(zeros<float>(static_cast<size_t>(shape.rows) * shape.padded)),
          cells(zeros<float>(static_cast<size_t>(shape.rows) * shape.padded)),
          updates(zeros<float>(shape.norm ? static_cast<size_t>(shape.rows) * shape.padded : 0)),
          packed(room<T>(shape.diagonal ? 1 : shape.panels * panel_size)) {}

    void run(int thread, int num_threads) {
#pragma omp single
        barrier.set_size(num_threads);
        [[maybe_unused]] const TileThread tiles{};
        const Range slices = share(shape.slices, thread, num_threads);
        const Range panels = {slices.first * 2, slices.last * 2};
        std::vector<float> means(shape.row_stride), inverses(shape.row_stride);
        for (int panel = panels.first; panel < panels.last; ++panel) {
            if (!shape.diagonal) pack_panel<T, Cell>(window, shape, panel, packed.get() + panel * panel_size);
            for (int row = 0; row < shape.rows; ++row) begin(panel, row);
        }
        if (!shape.diagonal) barrier.meet();
        for (int step = 0; step < shape.steps; ++step) {
            for (int slice = slices.first; slice < slices.last; ++slice) gates(step, slice);
            if (shape.norm) {
                barrier.meet();
                combine(step, means.data(), inverses.data());
                if (thread == 0)
                    std::memcpy(
                        window.inverse_deviation + static_cast<size_t>(step) * shape.rows, inverses.data(),
                        shape.rows * sizeof(float));
                for (int slice = slices.first; slice < slices.last; ++slice)
                    normalise(step, slice, means.data(), inverses.data());
            }
            if (!shape.diagonal) barrier.meet();
        }
    }

  private:
    void begin(int panel, int row) {
        const size_t from = static_cast<size_t>(row) * shape.width + panel * LANES;
        const int lanes = shape.lanes(panel);
        const vec start = load(window.hidden + from, lanes);
        if constexpr (Cell::CELL >= 0) {
            const vec cell = is_reset(row, 0) ? vec{} : load(window.cell + from, lanes);
            store(cells.get() + shape.local_at(panel, row), cell);
        }
        hand_on(0, panel, row, start);
    }

    // The hidden state that `step` reads: zero in a row that starts anew there.
    INLINE void hand_on(int step, int panel, int row, vec value) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        const vec read = is_reset(row, step) ? vec{} : value;
        store(hidden.get() + shape.local_at(panel, row), read);
        store(operands.get() + (step & 1) * operand_size + static_cast<size_t>(row) * shape.padded + first, read);
        T *previous = static_cast<T *>(window.previous);
        store(previous + (static_cast<size_t>(row) * shape.steps + step) * shape.width + first, read, lanes);
    }

    INLINE void finish(int step, int panel, int row, vec value) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        T *output = static_cast<T *>(window.output);
        store(output + (static_cast<size_t>(row) * shape.steps + step) * shape.width + first, value, lanes);
        if (step + 1 < shape.steps)
            hand_on(step + 1, panel, row, value);
        else
            store(window.last_hidden + static_cast<size_t>(row) * shape.width + first, value, lanes);
    }

    void gates(int step, int slice) {
        alignas(64) float sums[2][ROW_CHUNK * Cell::GATES * LANES];
        const T *operand = operands.get() + (step & 1) * operand_size + shape.first_unit_of_head(slice * SLICE);
        for (int row = 0; row < shape.rows; row += ROW_CHUNK) {
            const int count = shape.rows - row < ROW_CHUNK ? shape.rows - row : ROW_CHUNK;
            for (int half = 0; half < 2 && !shape.diagonal; ++half)
                multiply<T, Cell::GATES>(
                    operand + static_cast<size_t>(row) * shape.padded, shape.padded, count,
                    packed.get() + (2 * slice + half) * panel_size, shape.head, sums[half]);
            for (int index = 0; index < count; ++index) {
                const size_t at = static_cast<size_t>(index) * Cell::GATES * LANES;
                const vec update[2] = {
                    gate(step, 2 * slice, row + index, sums[0] + at),
                    gate(step, 2 * slice + 1, row + index, sums[1] + at),
                };
                if (shape.norm)
                    measure(step, slice, row + index, update);
                else
                    for (int half = 0; half < 2; ++half) finish(step, 2 * slice + half, row + index, update[half]);
            }
        }
    }

    // One row of a panel from its sums to the update.
    INLINE vec gate(int step, int panel, int row, const float *sums) {
        const int first = panel * LANES, lanes = shape.lanes(panel);
        const size_t at = shape.local_at(panel, row), row_size = static_cast<size_t>(shape.steps) * Cell::GATES * shape.width;
        const T *drive_row = static_cast<const T *>(window.drive) + row * row_size +
                             static_cast<size_t>(step) * Cell::GATES * shape.width + first;
        const vec before = load(hidden.get() + at);
        vec product[Cell::GATES], drive[Cell::GATES], kept[Cell::KEPT];
        for (int gate = 0; gate < Cell::GATES; ++gate) {
            const size_t offset = static_cast<size_t>(gate) * shape.width;
            product[gate] = shape.diagonal ? before * load(window.weight + offset + first, lanes)
                                           : load(sums + gate * LANES);
            drive[gate] = load(drive_row + offset, lanes) + load(window.bias + offset + first, lanes);
            // The next rows lie too far apart for the processor to see them coming.
            __builtin_prefetch(drive_row + offset + ROWS_AHEAD * row_size);
        }
        const vec candidate = window.candidate_bias ? load(window.candidate_bias + first, lanes) : vec{};
        vec update = Cell::forward(product, drive, before, load(cells.get() + at), candidate, kept);
        T *to = kept_at(step, panel, row);
        for (int index = 0; index < Cell::KEPT; ++index) store(to + index * SLICE, kept[index]);
        if constexpr (Cell::CELL >= 0) {
            const vec cell = kept[Cell::CELL];
            if (step + 1 == shape.steps)
                store(window.last_cell + static_cast<size_t>(row) * shape.width + first, cell, lanes);
            else
                store(cells.get() + at, is_reset(row, step + 1) ? vec{} : cell);
        }
        if (window.skip_scale) update += load(window.skip_scale + first, lanes) * before;
        return update;
    }

    // Mean and squared deviations of the updates of one slice of a row.
    INLINE void measure(int step, int slice, int row, const vec *update) {
        const int lanes[2] = {shape.lanes(2 * slice), shape.lanes(2 * slice + 1)};
        const float share_of_unit = 1.0f / (lanes[0] + lanes[1]);
        float *at = updates.get() + shape.local_at(2 * slice, row);
        for (int half = 0; half < 2; ++half) store(at + half * LANES, update[half]);
        const float mean = sum(only(update[0], lanes[0]) + only(update[1], lanes[1])) * share_of_unit;
        const vec deviation[2] = {only(update[0] - mean, lanes[0]), only(update[1] - mean, lanes[1])};
        statistic(step, 0, slice)[row] = mean;
        statistic(step, 1, slice)[row] = sum(deviation[0] * deviation[0] + deviation[1] * deviation[1]);
    }

    static INLINE vec only(vec value, int lanes) {
        if (lanes == LANES) return value;
        float all[LANES];
        store(all, value);
        return load(static_cast<const float *>(all), lanes);
    }

    // Every row's mean and inverse deviation from those of the slices (Chan et al. 1983).
    void combine(int step, float *means, float *inverses) {
        const float share_of_unit = 1.0f / shape.width;
        for (int row = 0; row < shape.rows; row += LANES) {
            vec mean = {}, squares = {};
            for (int slice = 0; slice < shape.slices; ++slice)
                mean += load(statistic(step, 0, slice) + row) * (units(slice) * share_of_unit);
            for (int slice = 0; slice < shape.slices; ++slice) {
                const vec apart = load(statistic(step, 0, slice) + row) - mean;
                squares += load(statistic(step, 1, slice) + row) + units(slice) * apart * apart;
            }
            store(means + row, mean);
            const vec variance = squares * share_of_unit + window.norm_epsilon;
            for (int lane = 0; lane < LANES; ++lane) inverses[row + lane] = 1.0f / __builtin_sqrtf(variance[lane]);
        }
    }

    float units(int slice) const {
        return static_cast<float>(shape.lanes(2 * slice) + shape.lanes(2 * slice + 1));
    }

    void normalise(int step, int slice, const float *means, const float *inverses) {
        for (int row = 0; row < shape.rows; ++row)
            for (int half = 0; half < 2; ++half) {
                const int panel = 2 * slice + half, first = panel * LANES, lanes = shape.lanes(panel);
                const vec normed = (load(updates.get() + shape.local_at(panel, row)) - means[row]) * inverses[row];
                store(kept_at(step, panel, row) + Cell::KEPT * SLICE, normed);
                const vec scale = load(window.norm_scale + first, lanes), shift = load(window.norm_shift + first, lanes);
                finish(step, panel, row, normed * scale + shift);
            }
    }

    const size_t operand_size, panel_size;
    Buffer<T> operands;
    Buffer<float> hidden, cells, updates;
    Buffer<T> packed;
};

}  // namespace
