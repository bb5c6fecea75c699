// Products of bf16 rows in the processor's matrix tiles (AMX), with the panels of products.h.
//
// A tile is 16 rows of 64 bytes: 16 rows of 32 inputs, 16 pairs of inputs of 16 outputs, or 16 rows of 16 fp32 sums.
// EMULATE_TILES computes the same from the same memory in plain code, so that the layout is tested where there is no AMX.
#pragma once

#if defined(__AMX_BF16__) || defined(EMULATE_TILES)
#define HAS_TILES

constexpr int TILE_ROWS = 16;

#if defined(EMULATE_TILES)

struct EmulatedTile {
    char bytes[TILE_ROWS][64];
};
static thread_local EmulatedTile emulated[8];

INLINE void emulated_load(int tile, const void *from, size_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
        std::memcpy(emulated[tile].bytes[row], static_cast<const char *>(from) + row * stride, 64);
}

INLINE void emulated_store(int tile, void *to, size_t stride) {
    for (int row = 0; row < TILE_ROWS; ++row)
        std::memcpy(static_cast<char *>(to) + row * stride, emulated[tile].bytes[row], 64);
}

INLINE void emulated_multiply(int sums, int inputs, int weights) {
    for (int row = 0; row < TILE_ROWS; ++row) {
        float total[LANES];
        std::memcpy(total, emulated[sums].bytes[row], sizeof total);
        for (int pair = 0; pair < TILE_ROWS; ++pair)
            for (int lane = 0; lane < LANES; ++lane)
                for (int part = 0; part < 2; ++part) {
                    bf16 input, weight;
                    std::memcpy(&input, &emulated[inputs].bytes[row][(pair * 2 + part) * 2], 2);
                    std::memcpy(&weight, &emulated[weights].bytes[pair][(lane * 2 + part) * 2], 2);
                    total[lane] += to_float(input) * to_float(weight);
                }
        std::memcpy(emulated[sums].bytes[row], total, sizeof total);
    }
}

#define TILE_ZERO(tile) std::memset(&emulated[tile], 0, sizeof(EmulatedTile))
#define TILE_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define TILE_MULTIPLY(sums, inputs, weights) emulated_multiply(sums, inputs, weights)

struct TileThread {};

#else

#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_MULTIPLY(sums, inputs, weights) _tile_dpbf16ps(sums, inputs, weights)

// Tiles are set up in every thread that uses them, and given back, so that the system need not save them.
struct TileThread {
    TileThread() {
        alignas(64) struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t num_rows[16];
        } shape = {};
        shape.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            shape.row_bytes[tile] = 64;
            shape.num_rows[tile] = TILE_ROWS;
        }
        _tile_loadconfig(&shape);
    }
    ~TileThread() {
        _tile_release();
    }
};

#endif

// One block of 16 rows (ROW_TILES 1) or of 32 rows (ROW_TILES 2) times a panel. Sums lie in tiles 0..5.
template <int VECTORS, int ROW_TILES>
INLINE void multiply_tile_block(const bf16 *inputs, size_t stride, const bf16 *panel, size_t num_inputs, float *out) {
    static_assert(VECTORS * ROW_TILES <= 6);
    const size_t input_bytes = stride * sizeof(bf16), panel_bytes = VECTORS * LANES * 2 * sizeof(bf16);
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (VECTORS > 2 || ROW_TILES == 2) TILE_ZERO(2);
    if constexpr (VECTORS > 3 || ROW_TILES == 2) TILE_ZERO(3);
    if constexpr (VECTORS == 3 && ROW_TILES == 2) {
        TILE_ZERO(4);
        TILE_ZERO(5);
    }
    for (size_t input = 0; input < num_inputs; input += INPUT_STEP) {
        const bf16 *weights = panel + packed_index<bf16, VECTORS>(input, 0, 0);
        TILE_LOAD(6, inputs + input, input_bytes);
        TILE_LOAD(7, weights, panel_bytes);
        TILE_MULTIPLY(0, 6, 7);
        TILE_LOAD(7, weights + 2 * LANES, panel_bytes);
        TILE_MULTIPLY(1, 6, 7);
        if constexpr (VECTORS > 2) {
            TILE_LOAD(7, weights + 4 * LANES, panel_bytes);
            TILE_MULTIPLY(2, 6, 7);
        }
        if constexpr (VECTORS > 3) {
            TILE_LOAD(7, weights + 6 * LANES, panel_bytes);
            TILE_MULTIPLY(3, 6, 7);
        }
        if constexpr (ROW_TILES == 2) {
            TILE_LOAD(6, inputs + TILE_ROWS * stride + input, input_bytes);
            if constexpr (VECTORS == 3) {
                // The last weights loaded are those of the third vector.
                TILE_MULTIPLY(5, 6, 7);
                TILE_LOAD(7, weights + 2 * LANES, panel_bytes);
                TILE_MULTIPLY(4, 6, 7);
                TILE_LOAD(7, weights, panel_bytes);
                TILE_MULTIPLY(3, 6, 7);
            } else {
                TILE_MULTIPLY(3, 6, 7);
                TILE_LOAD(7, weights, panel_bytes);
                TILE_MULTIPLY(2, 6, 7);
            }
        }
    }
    constexpr size_t out_bytes = VECTORS * LANES * sizeof(float);
    float *second = out + TILE_ROWS * VECTORS * LANES;
    TILE_STORE(0, out, out_bytes);
    TILE_STORE(1, out + LANES, out_bytes);
    if constexpr (VECTORS > 2) TILE_STORE(2, out + 2 * LANES, out_bytes);
    if constexpr (VECTORS > 3) TILE_STORE(3, out + 3 * LANES, out_bytes);
    if constexpr (ROW_TILES == 2 && VECTORS == 3) {
        TILE_STORE(3, second, out_bytes);
        TILE_STORE(4, second + LANES, out_bytes);
        TILE_STORE(5, second + 2 * LANES, out_bytes);
    }
    if constexpr (ROW_TILES == 2 && VECTORS == 2) {
        TILE_STORE(2, second, out_bytes);
        TILE_STORE(3, second + LANES, out_bytes);
    }
}

template <int VECTORS>
INLINE void multiply_tiles(
    const bf16 *inputs, size_t stride, int num_rows, const bf16 *panel, size_t num_inputs, float *out) {
    int row = 0;
    if constexpr (VECTORS < 4) {
        for (; row + TILE_ROWS < num_rows; row += 2 * TILE_ROWS)
            multiply_tile_block<VECTORS, 2>(
                inputs + row * stride, stride, panel, num_inputs, out + row * VECTORS * LANES);
    }
    for (; row < num_rows; row += TILE_ROWS)
        multiply_tile_block<VECTORS, 1>(inputs + row * stride, stride, panel, num_inputs, out + row * VECTORS * LANES);
}

#else

constexpr int TILE_ROWS = 1;

struct TileThread {};

#endif
