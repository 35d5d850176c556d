// Weighted sums of tensors on a CPU: each tensor is read once. Compiled, loaded and called by native.py.
//
// For M results and N terms, of one shape, whose rows are contiguous and may lie apart,
//
//     out_m = c_m + sum_j a_j + sum_n (w_mn + s_mn) g_n        dots_mn = <x_m, g_n>, where states x_m are given,
//
// with one weight w for each pair, or one for each pair and channel, and perhaps one s for each pair and row (token),
// and then as many dots; those of w by pair alone are not computed beside those of s, whose sum they are. A tile of a
// result is summed in the cache, in the order of the terms, four of which stream past it together: alone, each would
// read and write the tile again.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "elements.h"

namespace {

constexpr int64_t TILE = 4096;
// Bytes that terms are asked for in advance: a piece of each in turn, they are no stream that a processor sees.
constexpr int64_t AHEAD = 2048;

// Adds K terms to a tile, and to their dots the products with the state x: each for itself, summed, or both.
template <int K, bool by_channel, bool dots_by_channel, bool summed, typename T, typename F>
void add_terms(F* __restrict total, const T* __restrict x, const Rows<T>* terms, const F* weights, const F* scores,
               double* dots, F* row_dots, int64_t stride, int64_t row, int64_t column, int64_t count) {
    const T* g[K];
    const F* w[K];
    F factor[K], sum[K][LANES] = {};
    for (int k = 0; k < K; ++k) {
        g[k] = terms[k].at(row, column);
        w[k] = weights + k * stride;
        factor[k] = (by_channel ? F(0) : w[k][0]) + (scores ? scores[k] : F(0));
    }
    const auto add = [&](int64_t i, int lane, auto&& state, auto&& value_of) {
        F result = total[i];
        for (int k = 0; k < K; ++k) {
            const F value = value_of(k);
            result += (by_channel ? w[k][i] + factor[k] : factor[k]) * value;
            if (dots_by_channel) dots[k * stride + i] += state() * value;
            if (summed) sum[k][lane] += state() * value;
        }
        total[i] = result;
    };
    const auto add_one = [&](int64_t i, int lane) {
        add(i, lane, [&] { return load(x[i]); }, [&](int k) { return load(g[k][i]); });
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int k = 0; k < K; ++k) __builtin_prefetch(g[k] + i + AHEAD / sizeof(T));
        if constexpr (std::is_same<T, Float16>()) {  // by the instruction for several at once
            F values[K][LANES], states[LANES];
            for (int k = 0; k < K; ++k) load_lanes(g[k] + i, values[k]);
            if (dots_by_channel || summed) load_lanes(x + i, states);
            for (int lane = 0; lane < LANES; ++lane)
                add(i + lane, lane, [&] { return states[lane]; }, [&](int k) { return values[k][lane]; });
        } else {
            for (int lane = 0; lane < LANES; ++lane) add_one(i + lane, lane);
        }
    }
    for (; i < count; ++i) add_one(i, 0);
    if (!summed) return;
    for (int k = 0; k < K; ++k) {
        for (int half = LANES / 2; half > 0; half /= 2)  // in pairs: as vectors, and not one after the other
            for (int lane = 0; lane < half; ++lane) sum[k][lane] += sum[k][lane + half];
        const double of_tile = sum[k][0];
        if (row_dots) row_dots[k] += F(of_tile);
        else dots[k] += of_tile;
    }
}

template <typename T, typename F = typename Precise<T>::type> struct Task {
    int64_t results, terms, branches;
    const Rows<T>* outs;      // M
    const Rows<T>* states;    // M, or null
    const Rows<T>* carried;   // M, or null
    const Rows<T>* grads;     // N
    const Rows<T>* added;     // of the branches
    const F* weights;         // [M, N] or, by channel, [M, N, width]
    const F* scores;          // [rows, M, N]
    F* dots;                  // as the weights
    F* row_dots;              // as the scores, zeros
    int64_t rows, width, parts;
};

template <bool by_channel, bool dots_by_channel, bool summed, typename T, typename F>
void sums(const Task<T, F>& task) {
    constexpr bool with_dots = dots_by_channel || summed;
    const bool by_row = task.scores;
    const int64_t width = task.width, terms = task.terms, results = task.results;
    const int64_t across = (width + TILE - 1) / TILE, tiles = task.rows * across;
    const int64_t stride = by_channel ? width : 1;
    const int64_t pairs = task.dots ? results * terms * stride : 0;
    std::vector<double> partial(task.parts * pairs);  // each part has its own: dots are the same in every run
    const auto first_of = [&](int64_t part) {         // a row's dots are summed by one part
        return by_row ? task.rows * part / task.parts * across : tiles * part / task.parts;
    };
#pragma omp parallel for num_threads(task.parts) schedule(static)
    for (int64_t part = 0; part < task.parts; ++part) {
        F total[TILE];
        for (int64_t tile = first_of(part); tile < first_of(part + 1); ++tile) {
            const int64_t row = tile / across, column = tile % across * TILE;
            const int64_t count = std::min(TILE, width - column), channel = by_channel ? column : 0;
            for (int64_t m = 0; m < results; ++m) {
                std::fill(total, total + count, F(0));
                const auto add_all = [&](const T* f) {
                    for (int64_t i = 0; i < count; ++i) total[i] += load(f[i]);
                };
                if (task.carried) add_all(task.carried[m].at(row, column));
                for (int64_t j = 0; j < task.branches; ++j) add_all(task.added[j].at(row, column));
                const T* x = with_dots ? task.states[m].at(row, column) : nullptr;
                const F* w = task.weights + m * terms * stride + channel;
                double* d = partial.data() + (pairs ? part * pairs + m * terms * stride + channel : 0);
                const int64_t step = pairs ? stride : 0, of_row = by_row ? (row * results + m) * terms : 0;
                const F* s = by_row ? task.scores + of_row : nullptr;
                F* r = by_row && with_dots ? task.row_dots + of_row : nullptr;
                const auto add = [&](auto count_of_terms, int64_t n) {
                    constexpr int K = decltype(count_of_terms)::value;
                    add_terms<K, by_channel, dots_by_channel, summed>(total, x, task.grads + n, w + n * stride,
                                                                      s ? s + n : s, d + n * step, r ? r + n : r,
                                                                      stride, row, column, count);
                };
                int64_t n = 0;
                for (; n + 4 <= terms; n += 4) add(std::integral_constant<int, 4>(), n);
                for (; n < terms; ++n) add(std::integral_constant<int, 1>(), n);
                T* out = task.outs[m].at(row, column);
                int64_t i = 0;
                for (; i + LANES <= count; i += LANES) store_lanes(total + i, out + i);
                for (; i < count; ++i) store(total[i], out + i);
            }
        }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
        double sum = 0;
        for (int64_t part = 0; part < task.parts; ++part) sum += partial[part * pairs + pair];
        task.dots[pair] = F(sum);
    }
}

template <typename T, typename F> void run(bool by_channel, const Task<T, F>& task) {
    if (!by_channel) task.states ? sums<false, false, true>(task) : sums<false, false, false>(task);
    else if (!task.states) sums<true, false, false>(task);
    else task.scores ? sums<true, true, true>(task) : sums<true, true, false>(task);
}
}  // namespace

// See Task; tensors are outs, states and carried if there, grads, added. Without states there are no dots, without
// scores none by row.
#define EXPORT(NAME, T, F)                                                                                            \
    extern "C" void NAME(int64_t by_channel, int64_t results, int64_t terms, int64_t branches, int64_t with_states,   \
                         int64_t with_carried, const Rows<T>* tensors, const F* weights, const F* scores, F* dots,    \
                         F* row_dots, int64_t rows, int64_t width, int64_t parts) {                                   \
        const Rows<T>* states = tensors + results;                                                                    \
        const Rows<T>* carried = states + (with_states ? results : 0);                                                \
        const Rows<T>* grads = carried + (with_carried ? results : 0);                                                \
        run(by_channel, Task<T>{results, terms, branches, tensors, with_states ? states : nullptr,                    \
                                with_carried ? carried : nullptr, grads, grads + terms, weights, scores, dots,        \
                                row_dots, rows, width, parts});                                                       \
    }

EXPORT(sums_float32, float, float)
EXPORT(sums_float64, double, double)
EXPORT(sums_bfloat16, BFloat16, float)
EXPORT(sums_float16, Float16, float)
