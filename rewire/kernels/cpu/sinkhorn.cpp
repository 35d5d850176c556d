// Sinkhorn-Knopp of small matrices on a CPU; the formulas are those of rewire/topologies/manifolds.py. Compiled with
// sums.cpp by native.py, called by sinkhorn_cpu.py.
//
// Entry e of LANES matrices stands in a row, so that all they do is done to vectors; the steps of a block stay in the
// cache for backward, which runs them again.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;

template <typename F> struct Lanes {
    F value[LANES];
};

// Entries [n, n] of LANES matrices.
template <typename F> using Matrix = std::vector<Lanes<F>>;

// The entries of row i (down = false) or of column i (down = true), one after the other.
inline int64_t entry(int64_t n, bool down, int64_t i, int64_t k) { return down ? k * n + i : i * n + k; }

template <typename F, typename Function> void each(Lanes<F>& x, const Function& function) {
    for (int lane = 0; lane < LANES; ++lane) x.value[lane] = function(x.value[lane], lane);
}

template <typename F> Lanes<F> sum(const Matrix<F>& x, int64_t n, bool down, int64_t i) {
    Lanes<F> total{};
    for (int64_t k = 0; k < n; ++k) {
        const Lanes<F>& added = x[entry(n, down, i, k)];
        each(total, [&](F t, int lane) { return t + added.value[lane]; });
    }
    return total;
}

// Logarithm of exp(a) + exp(b).
template <typename F> F log_add(F a, F b) {
    if (b == -std::numeric_limits<F>::infinity()) return a;
    const F largest = std::max(a, b);
    return largest + std::log1p(std::exp(std::min(a, b) - largest));
}

// Takes the logarithm of the sum (plus that of which `floor` is the logarithm) from each row, or column.
template <typename F> void log_normalise(Matrix<F>& x, int64_t n, bool down, F floor) {
    for (int64_t i = 0; i < n; ++i) {
        Lanes<F> largest = x[entry(n, down, i, 0)], total{};
        for (int64_t k = 1; k < n; ++k)
            each(largest, [&](F m, int lane) { return std::max(m, x[entry(n, down, i, k)].value[lane]); });
        for (int64_t k = 0; k < n; ++k)
            each(total, [&](F t, int lane) {
                return t + std::exp(x[entry(n, down, i, k)].value[lane] - largest.value[lane]);
            });
        each(total, [&](F t, int lane) { return log_add(std::log(t), floor - largest.value[lane]); });
        for (int64_t k = 0; k < n; ++k)  // not their sum at once: it would be rounded as the larger one is
            each(x[entry(n, down, i, k)],
                 [&](F value, int lane) { return value - largest.value[lane] - total.value[lane]; });
    }
}

template <typename F> struct Task {
    int64_t matrices, n, iterations;
    F eps;
    const F* logits;  // [matrices, n, n]
    const F* grad;    // the same, or null: forward
    F* result;        // the same
    int64_t parts;
};

template <typename F> void load(Matrix<F>& to, const F* from, int64_t size, int64_t first, int64_t count) {
    for (int64_t e = 0; e < size; ++e)
        each(to[e], [&](F, int lane) { return from[(first + std::min<int64_t>(lane, count - 1)) * size + e]; });
}

// A block of matrices: the steps of `_normalised`, and with a gradient those of `_gradient`.
template <typename F>
void block(const Task<F>& task, int64_t first, std::vector<Matrix<F>>& steps, Matrix<F>& columns, Matrix<F>& padded,
           Matrix<F>& grad) {
    const int64_t n = task.n, size = n * n, count = std::min<int64_t>(LANES, task.matrices - first);
    const F nothing = -std::numeric_limits<F>::infinity(), floor = task.eps > 0 ? std::log(task.eps) : nothing;
    load(columns, task.logits, size, first, count);
    log_normalise(columns, n, true, nothing);
    padded = columns;
    if (task.eps > 0)
        for (auto& x : padded) each(x, [&](F value, int) { return log_add(value, floor); });
    int64_t last = 0;
    steps[0] = padded;
    log_normalise(steps[0], n, false, floor);
    for (auto& x : steps[0]) each(x, [](F value, int) { return std::exp(value); });
    for (int64_t step = 1; step < 2 * task.iterations - 1; ++step) {
        const int64_t next = task.grad ? last + 1 : last;
        if (task.grad) steps[next] = steps[last];
        for (int64_t i = 0; i < n; ++i) {
            const Lanes<F> total = sum(steps[next], n, step % 2 == 1, i);
            for (int64_t k = 0; k < n; ++k)
                each(steps[next][entry(n, step % 2 == 1, i, k)],
                     [&](F value, int lane) { return value / (total.value[lane] + task.eps); });
        }
        last = next;
    }
    const Matrix<F>* result = &steps[last];
    if (task.grad) {
        const auto undo = [&](const Matrix<F>& step, bool down) {  // g - p sum(g)
            for (int64_t i = 0; i < n; ++i) {
                const Lanes<F> total = sum(grad, n, down, i);
                for (int64_t k = 0; k < n; ++k) {
                    const int64_t e = entry(n, down, i, k);
                    each(grad[e], [&](F g, int lane) { return g - step[e].value[lane] * total.value[lane]; });
                }
            }
        };
        load(grad, task.grad, size, first, count);
        for (int64_t e = 0; e < size; ++e) each(grad[e], [&](F g, int lane) { return g * steps[last][e].value[lane]; });
        for (int64_t step = last; step >= 0; --step) undo(steps[step], step % 2 == 1);
        for (int64_t e = 0; e < size; ++e) {
            each(grad[e], [&](F g, int lane) { return g * std::exp(columns[e].value[lane] - padded[e].value[lane]); });
            each(columns[e], [](F value, int) { return std::exp(value); });
        }
        undo(columns, true);
        result = &grad;
    }
    for (int64_t lane = 0; lane < count; ++lane)
        for (int64_t e = 0; e < size; ++e) task.result[(first + lane) * size + e] = (*result)[e].value[lane];
}

template <typename F> void sinkhorn(const Task<F>& task) {
    const int64_t size = task.n * task.n, blocks = (task.matrices + LANES - 1) / LANES;
#pragma omp parallel for num_threads(task.parts) schedule(static)
    for (int64_t part = 0; part < task.parts; ++part) {
        const Matrix<F> empty(size);
        std::vector<Matrix<F>> steps(task.grad ? 2 * task.iterations - 1 : 1, empty);
        Matrix<F> columns = empty, padded = empty, grad = empty;
        for (int64_t i = blocks * part / task.parts; i < blocks * (part + 1) / task.parts; ++i)
            block(task, i * LANES, steps, columns, padded, grad);
    }
}
}  // namespace

#define EXPORT(NAME, F)                                                                                         \
    extern "C" void NAME(int64_t matrices, int64_t n, int64_t iterations, double eps, const F* logits,          \
                         const F* grad, F* result, int64_t parts) {                                             \
        sinkhorn(Task<F>{matrices, n, iterations, F(eps), logits, grad, result, parts});                        \
    }

EXPORT(sinkhorn_float32, float)
EXPORT(sinkhorn_float64, double)
