/* The sampler's arithmetic, the C twin of kernels/sampler_math.py: IEEE fp64, every operation rounded by itself
 * (compile with -ffp-contract=off and without -ffast-math), so the bits equal numpy's on every instruction set.
 * The loops are elementwise and branch-free for the compiler to vectorise. */
#ifndef RELAY_SAMPLER_MATH_H
#define RELAY_SAMPLER_MATH_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { BLOCK = 64, WEIGHT_BITS = 40 };

static const double LN2_HIGH = 0x1.62e42fee00000p-1, LN2_LOW = 0x1.a39ef35793c76p-33, LOG2_E = 0x1.71547652b82fep+0;
static const double WEIGHT_CUTOFF = -30.0;
static const double MAX_GUMBEL = 22.88; /* over the noise of word 2^32 - 1, 22.8739 */

static inline double from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static inline uint64_t to_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

/* Natural logarithm of a positive normal number. */
static inline double sm_log(double x) {
    uint64_t shifted = to_bits(x) + (UINT64_C(0x3FF0000000000000) - UINT64_C(0x3FE6A09E667F3BCD));
    /* the biased exponent (< 2^52) as a double by way of the mantissa of 2^52: AVX2 has no such conversion */
    double exponent = from_bits((shifted >> 52) | UINT64_C(0x4330000000000000)) - 0x1p52 - 1023.0;
    double mantissa = from_bits((shifted & UINT64_C(0x000FFFFFFFFFFFFF)) + UINT64_C(0x3FE6A09E667F3BCD));
    double f = mantissa - 1.0;
    double s = f / (mantissa + 1.0);
    double z = s * s;
    double p = 0x1.5879231ea1088p-3;
    p = p * z + 0x1.732c0457edf8ep-3;
    p = p * z + 0x1.c722790eac73cp-3;
    p = p * z + 0x1.249241761121ap-2;
    p = p * z + 0x1.999999a295dc2p-2;
    p = p * z + 0x1.555555555395cp-1;
    double tail = s * (z * p) + exponent * LN2_LOW;
    return exponent * LN2_HIGH + (2.0 * s + tail);
}

/* floor(2^40 * exp(x)) for x <= 0, -inf included. */
static inline int64_t sm_weight(double x) {
    const double to_integer = 0x1.8p52; /* adding it rounds to an integer, held in the low bits */
    uint64_t over = -(uint64_t)(x > WEIGHT_CUTOFF); /* masks, since compilers turn ?: into jumps and do not vectorise */
    x = from_bits((to_bits(x) & over) | (to_bits(WEIGHT_CUTOFF) & ~over));
    double t = x * LOG2_E + to_integer;
    double k = t - to_integer;
    double r = (x - k * LN2_HIGH) - k * LN2_LOW;
    double p = 0x1.28bbe03bcab68p-22;
    p = p * r + 0x1.72e9dc0be9bc0p-19;
    p = p * r + 0x1.a0198a126a502p-16;
    p = p * r + 0x1.a0198cb6ad9c4p-13;
    p = p * r + 0x1.6c16c18a16170p-10;
    p = p * r + 0x1.11111125dacdcp-7;
    p = p * r + 0x1.555555554ee7ap-5;
    p = p * r + 0x1.5555555550733p-3;
    p = p * r + 0x1.000000000000dp-1;
    p = 1.0 + (r + (r * r) * p);
    double y = p * from_bits((to_bits(t) + (1023 + WEIGHT_BITS)) << 52);
    double nearest = (y + 0x1p52) - 0x1p52;
    /* floor, as 0 <= y <= 2^40 */
    nearest -= from_bits(UINT64_C(0x3FF0000000000000) & -(uint64_t)(nearest > y));
    return (int64_t)(to_bits(nearest + 0x1p52) & UINT64_C(0x000FFFFFFFFFFFFF));
}

/* Word 0 of Philox4x32-10 for counter (id, position, choice, 0), key (k0, k1). */
static inline uint32_t philox_word(uint32_t id, uint32_t position, uint32_t choice, uint32_t k0, uint32_t k1) {
    uint32_t c0 = id, c1 = position, c2 = choice, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t left = (uint64_t)c0 * 0xD2511F53u, right = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(right >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)right;
        c2 = (uint32_t)(left >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)left;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

/* The words of BLOCK ids. Integers are exact in any order, so the vector forms need no proof of rounding. */
static inline void philox_block(const int32_t *ids, uint32_t position, uint32_t choice, uint64_t seed, uint32_t *words) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
#define LANES64 8
#define VEC __m512i
#define V_SET1(x) _mm512_set1_epi64((long long)(x))
#define V_WIDEN(p) _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(p)))
#define V_MUL _mm512_mul_epu32
#define V_HIGH(x) _mm512_srli_epi64(x, 32)
#define V_XOR _mm512_xor_si512
#define V_STORE _mm512_storeu_si512
#else
#define LANES64 4
#define VEC __m256i
#define V_SET1(x) _mm256_set1_epi64x((long long)(x))
#define V_WIDEN(p) _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(p)))
#define V_MUL _mm256_mul_epu32
#define V_HIGH(x) _mm256_srli_epi64(x, 32)
#define V_XOR _mm256_xor_si256
#define V_STORE(p, x) _mm256_storeu_si256((__m256i *)(p), x)
#endif
    /* one 32-bit word in the low half of each 64-bit lane; high halves hold garbage, which no multiplication reads */
    uint64_t wide[BLOCK];
    const VEC m0 = V_SET1(0xD2511F53u), m1 = V_SET1(0xCD9E8D57u);
    for (int i = 0; i < BLOCK; i += 2 * LANES64) {
        VEC c0[2], c1[2], c2[2], c3[2];
        for (int j = 0; j < 2; j++) {
            c0[j] = V_WIDEN(ids + i + j * LANES64);
            c1[j] = V_SET1(position);
            c2[j] = V_SET1(choice);
            c3[j] = V_SET1(0);
        }
        uint32_t a = k0, b = k1;
        for (int round = 0; round < 10; round++, a += 0x9E3779B9u, b += 0xBB67AE85u) {
            for (int j = 0; j < 2; j++) {
                VEC left = V_MUL(c0[j], m0), right = V_MUL(c2[j], m1);
                c0[j] = V_XOR(V_XOR(V_HIGH(right), c1[j]), V_SET1(a));
                c1[j] = right;
                c2[j] = V_XOR(V_XOR(V_HIGH(left), c3[j]), V_SET1(b));
                c3[j] = left;
            }
        }
        for (int j = 0; j < 2; j++) V_STORE(wide + i + j * LANES64, c0[j]);
    }
    for (int i = 0; i < BLOCK; i++) words[i] = (uint32_t)wide[i];
#undef LANES64
#undef VEC
#undef V_SET1
#undef V_WIDEN
#undef V_MUL
#undef V_HIGH
#undef V_XOR
#undef V_STORE
#else
    for (int i = 0; i < BLOCK; i++) words[i] = philox_word((uint32_t)ids[i], position, choice, k0, k1);
#endif
}

/* Standard Gumbel noise of a word. */
static inline double sm_gumbel(uint32_t word) {
    double w = from_bits((uint64_t)word | UINT64_C(0x4330000000000000)) - 0x1p52;
    double u = (w + 0.5) * 0x1p-32;
    return -sm_log(-sm_log(u));
}

#endif
