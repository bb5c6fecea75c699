// A whole window of an LSTM or GRU in one call: forward, and the backward pass written out by hand.
//
// The input's product for all time steps comes in (`drive`), and its gradient goes out: both are one large product, and a
// library's. Here is what recurs. Threads own slices of the hidden units: the weight of a slice stays in its owner's cache
// for the whole window, gates and what follows them are computed while a slice's sums are hot, and the threads meet at a
// barrier where a step needs all units: before the norm's statistics are used and before the next product.
//
// Memory: drive, outputs and gradients are [B][T][..] as the caller has them. `kept`, what backward reads again, is
// [T][slice][B][vector][unit], in the order in which both passes walk, in the products' format; the state itself stays in
// fp32. Operands of products are small copies of one step. A slice is two panels, and in bf16 one line of the cache: rows
// of a window lie so far apart, often by a power of two, that a line touched twice would be fetched twice.
//
// Legend: B rows, T time steps, D width, K inputs of a unit's recurrent product, G gates.

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <memory>
#include <new>
#include <vector>

#include "cells.h"
#include "products.h"
#include "team.h"

extern "C" {

// One window. The same layout as `cpu.Window`. Pointers that a pass does not use, and switches that are off, are null.
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

// Zeroed, so that padding never holds what a product could turn into NaN.
template <class T>
Buffer<T> zeros(size_t count) {
    T *memory = static_cast<T *>(::operator new[](count * sizeof(T), std::align_val_t(64)));
    std::memset(static_cast<void *>(memory), 0, count * sizeof(T));
    return Buffer<T>(memory);
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
    // The weight of gate `gate` of `unit` for the hidden unit `input`.
    float weight_at(const Window &window, int gate, int unit, int input) const {
        if (unit >= width || input >= width) return 0.0f;
        if (unit / unit_inputs != input / unit_inputs) return 0.0f;
        return window.weight[(static_cast<size_t>(gate) * width + unit) * unit_inputs + input % unit_inputs];
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
          packed(zeros<T>(shape.diagonal ? 1 : shape.panels * panel_size)) {}

    void run(int thread, int num_threads) {
#pragma omp single
        barrier.set_size(num_threads);
        [[maybe_unused]] const TileThread tiles{};
        const Range slices = share(shape.slices, thread, num_threads);
        const Range panels = {slices.first * 2, slices.last * 2};
        std::vector<float> means(shape.row_stride), inverses(shape.row_stride);
        for (int panel = panels.first; panel < panels.last; ++panel) {
            pack(panel);
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
    void pack(int panel) {
        if (shape.diagonal) return;
        const int first = panel * LANES, first_input = shape.first_unit_of_head(first);
        T *to = packed.get() + panel * panel_size;
        for (int input = 0; input < shape.head; ++input)
            for (int gate = 0; gate < Cell::GATES; ++gate)
                for (int lane = 0; lane < LANES; ++lane)
                    from_float(
                        to + packed_index<T, Cell::GATES>(input, gate, lane),
                        shape.weight_at(window, gate, first + lane, first_input + input));
    }

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
          packed(zeros<T>(shape.diagonal ? 1 : shape.slices * panel_size)) {}

    void run(int thread, int num_threads) {
#pragma omp single
        barrier.set_size(num_threads);
        [[maybe_unused]] const TileThread tiles{};
        const Range slices = share(shape.slices, thread, num_threads);
        const Range panels = {slices.first * 2, slices.last * 2};
        std::vector<float> means(shape.row_stride), products(shape.row_stride);
        std::vector<vec> sums(static_cast<size_t>(panels.last - panels.first) * SUMS, vec{});
        auto sums_of = [&](int panel) { return sums.data() + static_cast<size_t>(panel - panels.first) * SUMS; };
        for (int slice = slices.first; slice < slices.last; ++slice) pack(slice);
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
    // The transposed weight: outputs are a slice's hidden units, inputs the gates of all units of their head.
    void pack(int slice) {
        if (shape.diagonal) return;
        const int first = slice * SLICE, first_unit = shape.first_unit_of_head(first);
        T *to = packed.get() + slice * panel_size;
        for (int gate = 0; gate < Cell::GATES; ++gate)
            for (int unit = 0; unit < shape.head; ++unit)
                for (int column = 0; column < SLICE; ++column)
                    from_float(
                        to + packed_index<T, 2>(
                                 static_cast<size_t>(gate) * shape.head + unit, column / LANES, column % LANES),
                        shape.weight_at(window, gate, first_unit + unit, first + column));
    }

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

template <template <class, class> class Direction, class T, class Cell>
void run(const Window &window) {
    const Shape<T, Cell> shape(window);
    Direction<T, Cell> pass(window, shape);
    const int num_threads = usable_threads(window.num_threads < shape.slices ? window.num_threads : shape.slices);
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads)
    pass.run(omp_get_thread_num(), omp_get_num_threads());
#else
    pass.run(0, 1);
#endif
}

template <template <class, class> class Direction, class T>
int run_cell(const Window &window, int cell) {
    if (cell == 0)
        run<Direction, T, Coupled>(window);
    else if (cell == 1)
        run<Direction, T, Textbook>(window);
    else
        run<Direction, T, Gru>(window);
    return 0;
}

}  // namespace

extern "C" {

// cell: 0 coupled LSTM, 1 textbook LSTM, 2 GRU. Returns 0, or 1 where memory ran out.
int recurrence_forward(const Window *window, int cell, int in_bf16) {
    try {
        return in_bf16 ? run_cell<Forward, bf16>(*window, cell) : run_cell<Forward, float>(*window, cell);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

int recurrence_backward(const Window *window, int cell, int in_bf16) {
    try {
        return in_bf16 ? run_cell<Backward, bf16>(*window, cell) : run_cell<Backward, float>(*window, cell);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
}
