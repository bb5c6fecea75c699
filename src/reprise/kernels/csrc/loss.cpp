// Softmax and cross-entropy of a chunk of scores, and their gradient in its place, in one visit of every row.
//
// A row of scores is a few ten kilobytes: it is read into fp32 once, and its largest, its sum of exponentials and its
// gradient are taken while it is in the nearest cache. Equations: kernels/reference.py, linear_cross_entropy.

#include <cmath>
#include <new>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr float LOWEST = -3.0e38f;

struct Loss {
    float label_smoothing, z_loss;
    int64_t ignored;
};

INLINE float largest(vec value) {
    float lanes[LANES], best = LOWEST;
    store(lanes, value);
    for (float lane : lanes) best = lane > best ? lane : best;
    return best;
}

// One row: returns its loss; `scores` becomes the gradient by itself where `wants_gradient`.
template <class T>
float row_loss(T *scores, const float *bias, int64_t target, int words, const Loss &loss, bool wants_gradient, float *row) {
    if (target == loss.ignored) {
        if (wants_gradient) std::memset(static_cast<void *>(scores), 0, words * sizeof(T));
        return 0.0f;
    }
    vec best = splat(LOWEST), total = {}, exponentials = {};
    for (int word = 0; word < words; word += LANES) {
        const int left = words - word;
        vec score = load(scores + word, left) + load(bias + word, left);
        total += score;
        if (left < LANES)
            for (int lane = left; lane < LANES; ++lane) score[lane] = LOWEST;
        best = score > best ? score : best;
        store(row + word, score);
    }
    const float most = largest(best), target_score = row[target];
    for (int word = 0; word < words; word += LANES) {
        const int left = words - word;
        vec power = exponential(load(row + word) - most);
        if (left < LANES)
            for (int lane = left; lane < LANES; ++lane) power[lane] = 0.0f;
        exponentials += power;
        store(row + word, power);
    }
    const float sum_of_powers = sum(exponentials), log_sum = most + std::log(sum_of_powers);
    const float kept = 1.0f - loss.label_smoothing, spread = loss.label_smoothing / static_cast<float>(words);
    if (wants_gradient) {
        const float factor = (1.0f + 2.0f * loss.z_loss * log_sum) / sum_of_powers;
        for (int word = 0; word < words; word += LANES)
            store(scores + word, load(row + word) * factor - spread, words - word);
        from_float(scores + target, row[target] * factor - spread - kept);
    }
    // Not where it would count nothing: a word that a bias of -inf rules out makes the sum infinite.
    const float smoothed = spread > 0.0f ? spread * sum(total) : 0.0f;
    return log_sum - kept * target_score - smoothed + loss.z_loss * log_sum * log_sum;
}

template <class T>
void chunk_loss(
    T *scores, const float *bias, const int64_t *targets, int num_rows, int words, const Loss &loss, bool wants_gradient,
    int num_threads, float *losses) {
    std::vector<float> rows(static_cast<size_t>(num_threads) * (words + LANES));
#pragma omp parallel for num_threads(num_threads)
    for (int part = 0; part < num_threads; ++part) {
        const Range own = share(num_rows, part, num_threads);
        float *row = rows.data() + static_cast<size_t>(part) * (words + LANES);
        for (int index = own.first; index < own.last; ++index)
            losses[index] = row_loss(
                scores + static_cast<size_t>(index) * words, bias, targets[index], words, loss, wants_gradient, row);
    }
}

}  // namespace

extern "C" {

// scores [num_rows][words] without bias, in fp32 or bf16; losses [num_rows]. Returns 0, or 1 where memory ran out.
int cross_entropy_chunk(
    void *scores, const float *bias, const int64_t *targets, int64_t num_rows, int64_t words, int64_t ignored,
    float label_smoothing, float z_loss, int wants_gradient, int in_bf16, int64_t num_threads, float *losses) {
    const Loss loss = {label_smoothing, z_loss, ignored};
    const int threads = usable_threads(num_threads), rows = static_cast<int>(num_rows), columns = static_cast<int>(words);
    try {
        if (in_bf16)
            chunk_loss(static_cast<bf16 *>(scores), bias, targets, rows, columns, loss, wants_gradient, threads, losses);
        else
            chunk_loss(static_cast<float *>(scores), bias, targets, rows, columns, loss, wants_gradient, threads, losses);
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}
}
