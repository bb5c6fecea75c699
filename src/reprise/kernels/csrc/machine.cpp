// What this process may use of the machine, and whether the fast products are right here.

#include <pthread.h>
#include <unistd.h>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#endif

#include <vector>

#include "products.h"
#include "team.h"

namespace {

bool is_forked_child = false;

// A forked child has none of its parent's threads, and OpenMP would wait for them for ever.
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });

uint32_t next_random(uint32_t &state) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

// Whole numbers from -8 to 8 are exact in bf16, and so are their products and sums here, whatever the order of adding.
template <class T, int VECTORS>
bool multiplies_right(int num_rows) {
    constexpr int num_inputs = 3 * INPUT_STEP;
    const int room = static_cast<int>(round_up(num_rows, 2 * TILE_ROWS));
    std::vector<T> inputs(static_cast<size_t>(room) * num_inputs), panel(num_inputs * VECTORS * LANES);
    std::vector<float> out(static_cast<size_t>(room) * VECTORS * LANES);
    uint32_t random = 1;
    for (T &value : inputs) from_float(&value, static_cast<float>(next_random(random) % 17) - 8.0f);
    for (T &value : panel) from_float(&value, static_cast<float>(next_random(random) % 17) - 8.0f);
    multiply<T, VECTORS>(inputs.data(), num_inputs, num_rows, panel.data(), num_inputs, out.data());
    for (int row = 0; row < num_rows; ++row)
        for (int vector = 0; vector < VECTORS; ++vector)
            for (int lane = 0; lane < LANES; ++lane) {
                float expected = 0.0f;
                for (int input = 0; input < num_inputs; ++input)
                    expected += to_float(inputs[row * num_inputs + input]) *
                                to_float(panel[packed_index<T, VECTORS>(input, vector, lane)]);
                if (out[(row * VECTORS + vector) * LANES + lane] != expected) return false;
            }
    return true;
}

}  // namespace

int usable_threads(int64_t wanted) {
    return is_forked_child || wanted < 1 ? 1 : static_cast<int>(wanted);
}

extern "C" {

// 1 where this build's products can run here and give the right numbers.
int machine_check() {
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(EMULATE_TILES)
    // Linux gives a process its tiles on request (arch_prctl, ARCH_REQ_XCOMP_PERM, the tiles' data).
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;
#endif
    [[maybe_unused]] const TileThread tiles{};
    for (int num_rows : {1, 5, 16, 17, 32, 47, 64}) {
        if (!multiplies_right<float, 2>(num_rows) || !multiplies_right<float, 3>(num_rows)) return 0;
        if (!multiplies_right<float, 4>(num_rows) || !multiplies_right<bf16, 2>(num_rows)) return 0;
        if (!multiplies_right<bf16, 3>(num_rows) || !multiplies_right<bf16, 4>(num_rows)) return 0;
    }
    return 1;
}
}
