/* Vectors of eight floats in GCC's vector extension: the compiler turns them into AVX, NEON or plain code. */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__F16C__) || defined(__FMA__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 8

typedef float vec __attribute__((vector_size(32)));
typedef float vec_at __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32)));
typedef uint32_t uvec __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(16)));
typedef uint16_t hvec_at __attribute__((vector_size(16), aligned(2), may_alias));
typedef int8_t bvec_at __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint8_t cvec_at __attribute__((vector_size(8), aligned(1), may_alias));

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *at) { return *(const vec_at *)at; }

/* Eight bf16 and eight fp16 as fp32, exactly; fp16 by arithmetic on bits where the machine has no instruction. */
INLINE vec load_bf16(const uint16_t *at) { return (vec)(__builtin_convertvector(*(const hvec_at *)at, uvec) << 16); }

INLINE vec load_f16(const uint16_t *at) {
#if defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    uvec wide = __builtin_convertvector(*(const hvec_at *)at, uvec);
    vec magnitude = (vec)((wide & 0x7fff) << 13) * (vec)(0x77800000 + (uvec){0}); /* 2^112 */
    return (vec)((uvec)magnitude | (wide & 0x8000) << 16);
#endif
}

/* Eight bytes as integers. */
INLINE ivec load_i8(const uint8_t *at) {
#if defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const bvec_at *)at, ivec);
#endif
}

INLINE ivec load_u8(const uint8_t *at) {
#if defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const cvec_at *)at, ivec);
#endif
}

/* Eight numbers of 8 bits (e4m3) as fp32, exactly but for NaN, which reads as 480: what holds one says so elsewhere. */
INLINE vec load_e4m3(const uint8_t *at) {
    uvec wide = (uvec)load_u8(at);
    vec magnitude = (vec)((wide & 0x7f) << 20) * (vec)(0x7b800000 + (uvec){0}); /* 2^120 */
    return (vec)((uvec)magnitude | (wide & 0x80) << 24);
}

INLINE vec as_floats(ivec v) { return __builtin_convertvector(v, vec); }

INLINE void store(float *at, vec v) { *(vec_at *)at = v; }
INLINE vec all(float x) { return (vec){x, x, x, x, x, x, x, x}; }

/* a * b + c. The compiler is told not to fuse by itself (-ffp-contract=off): whether it would depends on what surrounds
   the sum, and a sum's bits must not. Where the machine has no fused form, both operations round, everywhere. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    vec result;
    for (int half = 0; half < 8; half += 4)
        vst1q_f32((float *)&result + half, vfmaq_f32(vld1q_f32((float *)&c + half), vld1q_f32((float *)&a + half),
                                                     vld1q_f32((float *)&b + half)));
    return result;
#else
    return a * b + c;
#endif
}

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* The sum of the lanes, always in this order. */
INLINE float sum(vec v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE float largest(vec v) {
    float most = v[0];
    UNROLL for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* The first n < LANES floats, the rest zero. */
INLINE vec load_some(const float *at, long n) {
    float part[LANES] = {0};
    memcpy(part, at, n * sizeof(float));
    return load(part);
}

INLINE void store_some(float *at, vec v, long n) {
    float part[LANES];
    store(part, v);
    memcpy(at, part, n * sizeof(float));
}

/* e^x to about one unit in the last place; 0 below -87.3, infinite above 88, NaN stays NaN.
   x = n ln 2 + r; ln 2 in two parts (Cody and Waite), e^r by its Taylor polynomial on |r| <= ln 2 / 2. */
INLINE vec exponential(vec x) {
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const ivec tiny = x < all(-87.3f), vast = x > all(88.0f);
    x = choose(tiny | vast, all(0), x);
    vec rounded = fused(x, all(1.44269504088896341f), shift);
    vec n = rounded - shift;
    vec r = fused(n, all(-0.693359375f), x);
    r = fused(n, all(2.12194440e-4f), r);
    vec p = all(1.0f / 5040);
    p = fused(p, r, all(1.0f / 720));
    p = fused(p, r, all(1.0f / 120));
    p = fused(p, r, all(1.0f / 24));
    p = fused(p, r, all(1.0f / 6));
    p = fused(p, r, all(0.5f));
    p = fused(p, r * r, r) + all(1.0f);
    ivec exponent = ((ivec)rounded - (ivec)shift + 127) << 23;
    return choose(tiny, all(0), choose(vast, all(__builtin_inff()), p * (vec)exponent));
}
