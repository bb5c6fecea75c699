// A whole window of an LSTM or GRU in one call: forward, and the backward pass written out by hand.
//
// The input's product for all time steps comes in (`drive`), and its gradient goes out: both are one large product, and a
// library's. Here is what recurs. Threads own slices of the hidden units: the weight of a slice stays in its owner's cache
// for the whole window, gates and what follows them are computed while a slice's sums are hot, and the threads meet at a
// barrier where a step needs all units: before the norm's statistics are used and before the next product.

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "backward.h"
#include "forward.h"

namespace {

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
