// Elements of four dtypes on a CPU, and rows of them: what the compiled loops have in common.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

// What elements are summed in.
template <typename T> struct Precise { using type = float; };
template <> struct Precise<double> { using type = double; };

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <typename T> inline T load(T x) { return x; }

inline float load(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

// Without branches, so that the compiler can use vectors; few processors compute in float16.
inline uint32_t chosen(bool first, uint32_t a, uint32_t b) {
    const uint32_t mask = -uint32_t(first);
    return (a & mask) | (b & ~mask);
}

inline float load(Float16 x) {
    const uint32_t size = x.bits & 0x7fff;
    const uint32_t normal = (size << 13) + chosen(size >= 0x7c00, 0x70000000, 0x38000000);  // the exponent's bias
    const uint32_t small = bits_of(float(int32_t(size)) * 0x1p-24f);                        // subnormal, or zero
    return float_of(chosen(size < 0x400, small, normal) | uint32_t(x.bits & 0x8000) << 16);
}

template <typename T> inline void store(T x, T* to) { *to = x; }

inline void store(float x, Float16* to) {  // to the nearest, ties to even
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff, rebased = size - 0x38000000;
    const uint32_t normal = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
    const uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000;  // the last bit of 0.5 is the smallest float16
    const uint32_t finite = chosen(size < 0x38800000, small, normal);
    const uint32_t other = chosen(x != x, 0x7e00, 0x7c00);
    to->bits = uint16_t((bits >> 16 & 0x8000) | chosen(size >= 0x477ff000, other, finite));
}

inline void store(float x, BFloat16* to) {  // to the nearest, ties to even
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = x != x ? uint16_t(0x7fc0) : uint16_t(rounded);
}

constexpr int LANES = 16;  // elements side by side: of several vectors, or their sums would wait for each other

template <typename T, typename F> inline void load_lanes(const T* x, F* values) {
    for (int lane = 0; lane < LANES; ++lane) values[lane] = load(x[lane]);
}

template <typename T, typename F> inline void store_lanes(const F* values, T* to) {
    for (int lane = 0; lane < LANES; ++lane) store(values[lane], to + lane);
}

// By the instruction for several at once; as wide as what is done to them, or the processor waits for two halves.
static_assert(LANES == 16, "below, 16 lanes are one vector or two");
#ifdef __AVX512F__
template <> inline void load_lanes(const Float16* x, float* values) {
    _mm512_storeu_ps(values, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)));
}

template <> inline void store_lanes(const float* values, Float16* to) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(_mm512_loadu_ps(values), 0));  // 0: to the nearest
}
#elif defined(__F16C__)
template <> inline void load_lanes(const Float16* x, float* values) {
    for (int lane = 0; lane < LANES; lane += 8)
        _mm256_storeu_ps(values + lane, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + lane))));
}

template <> inline void store_lanes(const float* values, Float16* to) {
    for (int lane = 0; lane < LANES; lane += 8)
        _mm_storeu_si128((__m128i*)(to + lane), _mm256_cvtps_ph(_mm256_loadu_ps(values + lane), 0));  // 0: to the nearest
}
#endif

// The rows of a tensor, by the elements from one to the next.
template <typename T> struct Rows {
    T* data;
    int64_t stride;
    T* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};
