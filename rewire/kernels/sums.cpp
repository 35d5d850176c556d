// Weighted sums of tensors on a CPU: each tensor is read once. Compiled, loaded and called by native.py.
//
// For M results and N terms, all contiguous and of one shape,
//
//     out_m = sum_j a_j + sum_n w_mn g_n        dots_mn = <x_m, g_n>, where states x_m are given,
//
// with one weight for each pair, or one for each pair and channel, and then as many dots. A tile of a result is summed
// in the cache, in the order of the terms, four of which stream past it together: alone, each would read and write the
// tile again.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t TILE = 4096;

struct BFloat16 {
    uint16_t bits;
};

// What elements are summed in.
template <typename T> struct Precise { using type = float; };
template <> struct Precise<double> { using type = double; };

template <typename T> inline T load(T x) { return x; }

inline float load(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <typename T> inline void store(T x, T* to) { *to = x; }

inline void store(float x, BFloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = x != x ? uint16_t(0x7fc0) : uint16_t(rounded);
}

// Adds K terms to a tile, and to their dots the products with the state x, if there is one.
template <int K, bool by_channel, bool with_dots, typename T, typename F>
void add_terms(F* __restrict total, const T* __restrict x, const T* const* terms, const F* weights, double* dots,
               int64_t stride, int64_t start, int64_t count) {
    constexpr int LANES = 16;  // sums of products side by side, or the compiler could not use vectors
    const T* g[K];
    const F* w[K];
    F factor[K], sum[K][LANES] = {};
    for (int k = 0; k < K; ++k) {
        g[k] = terms[k] + start;
        w[k] = weights + k * stride;
        factor[k] = w[k][0];
    }
    const auto add = [&](int64_t i, int lane) {
        F result = total[i];
        for (int k = 0; k < K; ++k) {
            const F value = load(g[k][i]);
            result += (by_channel ? w[k][i] : factor[k]) * value;
            if (with_dots && by_channel) dots[k * stride + i] += load(x[i]) * value;
            if (with_dots && !by_channel) sum[k][lane] += load(x[i]) * value;
        }
        total[i] = result;
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) add(i + lane, lane);
    for (; i < count; ++i) add(i, 0);
    if (with_dots && !by_channel)
        for (int k = 0; k < K; ++k)
            for (F value : sum[k]) dots[k] += value;
}

template <bool by_channel, bool with_dots, typename T, typename F = typename Precise<T>::type>
void sums(int64_t results, T* const* outs, const T* const* states, int64_t terms, const T* const* grads,
          const F* weights, F* dots, int64_t branches, const T* const* added, int64_t rows, int64_t width,
          int64_t parts) {
    const int64_t across = (width + TILE - 1) / TILE, tiles = rows * across;
    const int64_t stride = by_channel ? width : 1, pairs = with_dots ? results * terms * stride : 0;
    std::vector<double> partial(parts * pairs);  // each part has its own: dots are the same in every run
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
        F total[TILE];
        for (int64_t tile = tiles * part / parts; tile < tiles * (part + 1) / parts; ++tile) {
            const int64_t column = tile % across * TILE, start = tile / across * width + column;
            const int64_t count = std::min(TILE, width - column), channel = by_channel ? column : 0;
            for (int64_t m = 0; m < results; ++m) {
                for (int64_t i = 0; i < count; ++i) total[i] = branches ? load(added[0][start + i]) : F(0);
                for (int64_t j = 1; j < branches; ++j)
                    for (int64_t i = 0; i < count; ++i) total[i] += load(added[j][start + i]);
                const T* x = with_dots ? states[m] + start : nullptr;
                const F* w = weights + m * terms * stride + channel;
                double* d = partial.data() + part * pairs + (with_dots ? m * terms * stride + channel : 0);
                const int64_t step = with_dots ? stride : 0;  // of the dots
                int64_t n = 0;
                for (; n + 4 <= terms; n += 4)
                    add_terms<4, by_channel, with_dots>(total, x, grads + n, w + n * stride, d + n * step, stride,
                                                        start, count);
                for (; n < terms; ++n)
                    add_terms<1, by_channel, with_dots>(total, x, grads + n, w + n * stride, d + n * step, stride,
                                                        start, count);
                T* out = outs[m] + start;
                for (int64_t i = 0; i < count; ++i) store(total[i], out + i);
            }
        }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
        double sum = 0;
        for (int64_t part = 0; part < parts; ++part) sum += partial[part * pairs + pair];
        dots[pair] = F(sum);
    }
}
}  // namespace

// weights, dots: [M, N] or, by channel, [M, N, width]; tensors: [rows, width]. Without dots no states are read.
#define EXPORT(NAME, T, F)                                                                                          \
    extern "C" void NAME(int64_t by_channel, int64_t results, T* const* outs, const T* const* states, int64_t terms, \
                         const T* const* grads, const F* weights, F* dots, int64_t branches, const T* const* added,  \
                         int64_t rows, int64_t width, int64_t parts) {                                              \
        const auto chosen = by_channel ? (dots ? sums<true, true, T> : sums<true, false, T>)                        \
                                       : (dots ? sums<false, true, T> : sums<false, false, T>);                     \
        chosen(results, outs, states, terms, grads, weights, dots, branches, added, rows, width, parts);            \
    }

EXPORT(sums_float32, float, float)
EXPORT(sums_float64, double, double)
EXPORT(sums_bfloat16, BFloat16, float)
